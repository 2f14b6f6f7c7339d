"""`kubetune runs`: the runs below a folder of this machine, one a line."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubetune.base.humanize import counted, visible
from kubetune.cli.tables import print_table
from kubetune.config.naming import RESOLVED
from kubetune.errors import OK, ConfigError, KubetuneError, first_line

_HEAD = ("RUN", "STATE", "STEP", "LOSS", "EVALUATION", "MODEL", "METHOD", "STARTED", "WHY")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("outputs"), metavar="DIR", help="where to look (default outputs)"
    )
    parser.add_argument(
        "--sort", default="started", metavar="KEY", help="started (default), path, state, step, loss, or a metric such "
        "as eval_loss; runs without it come last",
    )  # fmt: skip
    parser.add_argument("--reverse", action="store_true", help="the largest, or the latest, first")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table. Raises ConfigError where there is no such folder, or no run has what to sort by."""
    if not args.folder.is_dir():
        raise ConfigError(f"{args.folder}: no such folder; give the one that holds the run directories")
    found = [facts(run_dir) for run_dir in find_runs(args.folder)]
    found = in_order(found, args.sort, reverse=args.reverse)
    if args.json:
        print(json.dumps(found, indent=2))
    elif not found:
        print(f"no runs below {args.folder}")
    else:
        print_table(_HEAD, [_row(one) for one in found])
    return OK


def find_runs(folder: Path) -> Iterator[Path]:
    """The run directories at or below a folder, in the order of their paths. Links are not followed."""
    for place, folders, files in os.walk(folder):
        folders[:] = [] if RESOLVED in files else sorted(name for name in folders if not name.startswith("."))
        if RESOLVED in files:
            yield Path(place)


def facts(run_dir: Path) -> dict[str, Any]:
    """Facts that `--json` prints of a run: None for what is not known; `state` is `damaged` where it cannot be read."""
    from kubetune.cli.local.watch import look_here
    from kubetune.config.load import read_config
    from kubetune.config.naming import method_label, model_short_name
    from kubetune.rundir import metrics

    unknown = dict.fromkeys(
        ("name", "step", "steps", "loss", "evaluation", "saved_step", "metric", "model", "method", "started")
    )
    try:
        config, run_view = read_config(run_dir), look_here(run_dir)
        events = metrics.read_events(run_dir)
    except KubetuneError as error:
        return {"path": str(run_dir), **unknown, "state": "damaged", "why": first_line(error)}
    progress = run_view.status["progress"]
    known = {key: progress[key] for key in ("step", "steps", "loss", "evaluation", "saved_step")}
    return {
        "path": str(run_dir),
        "name": run_view.name,
        **known,
        "metric": config.training.metric_for_best_model,
        "model": model_short_name(config.model.path),
        "method": method_label(config),
        "started": events[0]["time"] if events else None,
        "state": run_view.state,
        "why": run_view.why,
    }


def in_order(found: list[dict[str, Any]], key: str, *, reverse: bool) -> list[dict[str, Any]]:
    """Runs by a fact, or a metric of the last evaluation, those without it last. Raises ConfigError if all lack it."""

    def value(one: dict[str, Any]) -> Any:
        return one[key] if key in one else (one["evaluation"] or {}).get(key)

    have = [one for one in found if value(one) is not None]
    if found and not have:
        metrics = sorted({name for one in found for name in (one["evaluation"] or {}) if name.startswith("eval_")})
        raise ConfigError(
            f"--sort {key}: none of {counted(len(found), 'run')} has that; expected started, path, state, step, loss"
            f"{''.join(f', {name}' for name in metrics)}"
        )
    return [*sorted(have, key=value, reverse=reverse), *(one for one in found if value(one) is None)]


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    step = "" if one["step"] is None else f"{one['step']:,}/{one['steps'] or '?'}"
    loss = "" if one["loss"] is None else f"{one['loss']:.4f}"
    evaluation = one["evaluation"] or {}
    others = [name for name in evaluation if name.startswith("eval_") and name != "eval_loss"]
    chosen_by = one["metric"] if one["metric"] in others else next(iter(others), "")
    shown = [f"{key} {evaluation[key]:.4g}" for key in ("eval_loss", chosen_by) if key in evaluation]
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
