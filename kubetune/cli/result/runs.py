"""`kubetune runs`: the runs below a folder of this machine, one a line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kubetune.base.humanize import visible
from kubetune.cli.json_answers import print_json
from kubetune.cli.tables import print_table
from kubetune.errors import OK, ConfigError
from kubetune.library.listing import facts, find_runs, in_order, is_like

_HEAD = ("RUN", "STATE", "STEP", "LOSS", "EVALUATION", "MODEL", "METHOD", "STARTED", "WHY")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("outputs"),
        metavar="DIR",
        help="where to look (default outputs)",
    )
    parser.add_argument(
        "--sort", default="started", metavar="KEY", help="started (default), path, state, step, loss, hours, price, or "
        "a metric such as eval_loss; runs without it come last",
    )  # fmt: skip
    parser.add_argument("--reverse", action="store_true", help="the largest, or the latest, first")
    parser.add_argument(
        "--filter",
        default="",
        metavar="WORDS",
        help="only runs that have all of them in path, model, method, tags or why",
    )
    parser.add_argument(
        "--state", default="", help="runs of this state, such as done, running or failed"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table. Raises ConfigError where there is no such folder, or no run has what to sort by."""
    if not args.folder.is_dir():
        raise ConfigError(
            f"{args.folder}: no such folder; give the one that holds the run directories"
        )
    found = [
        one for one in map(facts, find_runs(args.folder)) if is_like(one, args.filter, args.state)
    ]
    found = in_order(found, args.sort, reverse=args.reverse)
    if args.json:
        print_json(found)
    elif not found:
        print(
            f"no runs below {args.folder}{' that are like that' * bool(args.filter or args.state)}"
        )
    else:
        print_table(_HEAD, [_row(one) for one in found])
    return OK


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    step = "" if one["step"] is None else f"{one['step']:,}/{one['steps'] or '?'}"
    loss = "" if one["loss"] is None else f"{one['loss']:.4f}"
    evaluation = one["evaluation"] or {}
    others = [name for name in evaluation if name.startswith("eval_") and name != "eval_loss"]
    chosen_by = one["metric"] if one["metric"] in others else next(iter(others), "")
    shown = [
        f"{key} {evaluation[key]:.4g}" for key in ("eval_loss", chosen_by) if key in evaluation
    ]
    started = (one["started"] or "")[:16].replace("T", " ")
    why = visible(one["why"].splitlines()[0]) if one["why"] else ""
    return (
        one["path"],
        one["state"],
        step,
        loss,
        ", ".join(shown),
        one["model"] or "",
        one["method"] or "",
        started,
        why,
    )
