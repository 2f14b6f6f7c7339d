"""`kubetune verify-resume`: whether a stopped and resumed run of your config ends bit by bit like one that never was.

Exit code 0: exact. 4: the two runs diverged. Any other: one of them could not be trained, and that is its code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.base.gpus import visible_gpus
from kubetune.base.humanize import counted
from kubetune.base.signals import Relay
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.prepare.plan import show_notes
from kubetune.data.inspect.estimate import estimate_rows
from kubetune.plan.plan import make_plan
from kubetune.supervisor.command_line import add_run_arguments, config_from_args

if TYPE_CHECKING:
    from kubetune.plugins.diagnostics.resume_proof import Difference, Verdict

# Three before the stop and three after it: enough for a wrong learning rate or order of rows to show.
STEPS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run_arguments(parser)
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=f"steps to train (default {STEPS})"
    )
    parser.add_argument(
        "--stop-at", type=int, metavar="K", help="stop after this step (default: half of them)"
    )
    add_json(parser, "the verdict as JSON")
    parser.epilog = (
        "Trains in a temporary folder below $TMPDIR and leaves the run's own output alone."
    )


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Train twice, compare, and print the verdict. Raise ConfigError before anything is trained."""
    stop_at = args.stop_at
    if stop_at is None:
        stop_at = args.steps // 2
    if args.steps < 2:
        raise errors.ConfigError(
            f"command line: found --steps {args.steps}; expected at least 2, one before the stop and one after it. "
            "Nothing was written."
        )
    if not 1 <= stop_at < args.steps:
        raise errors.ConfigError(
            f"command line: found --steps {args.steps} and --stop-at {stop_at}; expected 1 ≤ K < N. "
            "Nothing was written."
        )
    show_notes()
    config = config_from_args(args, os.environ)
    _require_one_node(config.compute.nodes)

    from kubetune.plugins.diagnostics.resume_proof import by_agent, shortened, verify

    # Both runs have the plan of the shortened config, so that they differ in nothing but the stop.
    short = shortened(config, args.steps)
    plan = make_plan(short, *estimate_rows(short.data), visible_gpus(os.environ))
    with tempfile.TemporaryDirectory(prefix="kubetune-verify-") as folder, Relay() as relay:
        verdict = verify(short, plan, stop_at, Path(folder), by_agent(relay))
    code = errors.OK if verdict.is_exact else errors.DIVERGED
    facts = asdict(verdict) | {"exact": verdict.is_exact}
    return Answer(facts, lambda: _show(verdict), code)


def _show(verdict: Verdict) -> None:
    """Print the verdict, wrapped to the width of the terminal after its labels."""
    print()
    width = shutil.get_terminal_size().columns
    for label, text in describe(verdict):
        lines = textwrap.wrap(text, max(width - 15, 40), break_on_hyphens=False)
        print(f"{label:<14} " + f"\n{'':15}".join(lines))


def _require_one_node(nodes: int) -> None:
    """Raise ConfigError for a run of several nodes."""
    if nodes > 1:
        raise errors.ConfigError(
            f"compute.nodes: found {nodes}; expected 1, because verify-resume trains on this machine "
            "only. Add compute.nodes=1 and, to keep the batch, training.global_batch_size. Nothing was written."
        )


def describe(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield the verdict as labelled lines."""
    ranks = f"{counted(verdict.world_size, 'rank')} on {verdict.device}"
    runs = f"{verdict.steps} steps, and again with a stop after step {verdict.stopped_at}"
    yield "runs", f"{runs}; {ranks}"
    # What is equal at each step, and not only at the end: two mistakes could make up for each other.
    yield (
        "compared",
        f"{verdict.facts:,} values: batch ids, learning rate, random state, losses, gradient norm, "
        "optimizer and weights at each step; every tensor of the last checkpoint",
    )
    if verdict.difference is None:
        yield "exact", "the resumed run is bit by bit the uninterrupted one"
    else:
        yield "not exact", _where(verdict.difference)
        yield from _why(verdict)
    if verdict.device == "cuda":
        yield (
            "holds for",
            "this GPU and these versions of CUDA and torch: others may choose other kernels",
        )


def _where(difference: Difference) -> str:
    """Return the first value that differs, and what it is in both runs."""
    values = f"{_short(difference.uninterrupted)} uninterrupted, {_short(difference.other)}"
    return f"first at step {difference.step}, rank {difference.rank}, {difference.what}: {values}"


def _short(value: str, limit: int = 60) -> str:
    """Return the beginning of a value, such as that of a random state."""
    if len(value) <= limit:
        return value
    return f"{value[: limit - 1]}…"


def _why(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield where the difference comes from: a second run without a stop tells it."""
    # A run without a stop was trained again. If it differs from the first too, resuming is not to blame.
    if verdict.repeat is None:
        yield (
            "because",
            "of the resume: a second uninterrupted run equals the first. Please report this",
        )
        return
    yield "a repeat", f"differs too, {_where(verdict.repeat)}"
    text = "the computation itself does not repeat here, with or without a stop"
    if verdict.device == "cuda":
        text += "; kernels that add in changing order do that. Try CUBLAS_WORKSPACE_CONFIG=:4096:8"
    yield "because", text
