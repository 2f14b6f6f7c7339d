"""Runs of this machine as a list: those below a folder, a few facts of each, in the order that somebody wants.

Not for all that a run has to show (runs, reporting).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kubetune.base.humanize import counted
from kubetune.config.naming import RESOLVED, method_label, model_label
from kubetune.config.resolved import read_config
from kubetune.config.schema.tracking import MlflowConfig, TrackingConfig, WandbConfig
from kubetune.errors import ConfigError, EnvironmentFault, KubetuneError, first_line
from kubetune.plan.actuals import held_seconds
from kubetune.rundir import metrics, shapes
from kubetune.rundir.cautions import cautions
from kubetune.rundir.heartbeat import read_beats
from kubetune.rundir.labels import read_labels
from kubetune.rundir.outcome import before_training, evaluation_of_best
from kubetune.rundir.status import progress, ranks, state_of


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the run directories at or below a folder, in the order of their paths. Links are not followed."""
    for place, folders, files in os.walk(folder):
        if RESOLVED in files:
            folders.clear()  # a run holds no other runs
            yield Path(place)
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))


def newest_run(folder: Path) -> Path | None:
    """Return the run below a folder that was started last, for the first time or again; None without runs."""
    newest = None
    newest_time = ""
    for run_dir in find_runs(folder):
        for event in metrics.stream_lines(run_dir / metrics.EVENTS):
            # Times are in UTC and of one form, so that texts are in their order.
            if event["event"] == "launch" and event["time"] > newest_time:
                newest = run_dir
                newest_time = event["time"]
    return newest


# Facts that are None for a damaged run.
_UNKNOWN_IF_DAMAGED = (
    "name",
    "note",
    "archived",
    "step",
    "steps",
    "loss",
    "evaluation",
    "before",
    "saved_step",
    "metric",
    "task",
    "model",
    "method",
    "started",
    "launched",
    "tags",
    "seconds_left",
    "hours",
    "price",
    "cautions",
)


def facts(run_dir: Path) -> dict[str, Any]:
    """Return the facts that `--json` prints of a run, each None if it is not known.

    `state` is `damaged` if the run cannot be read.
    """
    try:
        config = read_config(run_dir)
        events = metrics.read_events(run_dir)
        beats = read_beats(run_dir)
        status = progress(run_dir, events, beats)
        at_ranks = ranks(run_dir, beats)
        state, why = state_of(
            status["exit_status"], at_ranks, status["launched"], status["waits_for"]
        )
    except KubetuneError as error:
        unknown = dict.fromkeys(_UNKNOWN_IF_DAMAGED)
        return {"path": str(run_dir), **unknown, "state": "damaged", "why": first_line(error)}

    labels = read_labels(run_dir)
    is_over = status["exit_status"] is not None
    training = config.training
    evaluation = evaluation_of_best(
        run_dir,
        metrics.evaluations(run_dir),
        training.metric_for_best_model,
        greater=training.prefers_greater,
    )
    cost = _cost(config.compute.price_per_gpu_hour, events, is_over=is_over)
    return {
        "path": str(run_dir),
        "name": labels.title or config.name or run_dir.absolute().name,
        "note": labels.note,
        "archived": labels.archived,
        "step": status["step"],
        "steps": status["steps"],
        "loss": status["loss"],
        "evaluation": evaluation,
        "before": before_training(run_dir) if evaluation else {},
        "saved_step": status["saved_step"],
        "metric": training.metric_for_best_model,
        "task": config.task,
        "model": model_label(config.model.path),
        "method": method_label(config.lora),
        "tags": [*_tags(config.tracking), *labels.tags],
        "started": events[0]["time"] if events else None,
        "launched": status["launched"],
        "seconds_left": status["seconds_left"],
        **cost,
        "state": state,
        "why": why,
        "cautions": cautions(
            _object(run_dir, metrics.REPORT),
            _object(run_dir, metrics.DATA),
            [reward.title for reward in config.rewards],
            _last_step(run_dir) if config.rewards else {},
            evaluation or {},
        ),
    }


def _last_step(run_dir: Path) -> dict[str, Any]:
    """Return the line of the last step, empty before the first one."""
    return metrics.newest_with(run_dir / metrics.METRICS, ["loss"])["loss"] or {}


def _object(run_dir: Path, name: str) -> dict[str, Any]:
    """Return what a JSON file of a run holds; nothing of a missing or damaged one, of which the run's own page says so."""
    with suppress(FileNotFoundError, EnvironmentFault):
        return shapes.read(run_dir / name)
    return {}


def _tags(tracking: TrackingConfig) -> list[str]:
    """Return the tags that the run has in its trackers."""
    tags = []
    if isinstance(tracking.mlflow, MlflowConfig):
        tags += [f"{key}={value}" for key, value in tracking.mlflow.tags.items()]
    if isinstance(tracking.wandb, WandbConfig):
        tags += tracking.wandb.tags
    return tags


def _cost(
    price_per_hour: float | None, events: Sequence[Mapping[str, Any]], *, is_over: bool
) -> dict[str, float | None]:
    """Return the hours for which devices were held so far, and their price if one is given."""
    if not events:
        return {"hours": None, "price": None}
    # A run that goes on holds its devices until now.
    until = metrics.now()
    if is_over:
        until = events[-1]["time"]
    hours = held_seconds(events, until) / 3600
    if price_per_hour is None:
        return {"hours": hours, "price": None}
    # Only some events name the devices, and a later start may have other ones.
    devices = 1
    for event in events:
        devices = max(devices, event.get("nodes", 1) * event.get("processes", 1))
    return {"hours": hours, "price": hours * devices * price_per_hour}


# Facts that runs are put in order by, besides metrics.
SORTS = ("started", "path", "state", "step", "loss", "hours", "price")
# Facts in which `is_like` looks for words.
SEARCHED = ("path", "name", "note", "task", "model", "method", "state", "why")
# Asked for like a state: the runs that somebody has archived, which are in no other list.
ARCHIVED = "archived"


def is_like(run: Mapping[str, Any], text: str, state: str = "") -> bool:
    """True if a run has this state (any, if empty) and holds every word of the text in its facts."""
    if state == ARCHIVED:
        if not run["archived"]:
            return False
    elif run["archived"] or state not in ("", run["state"]):
        return False
    # All facts make one line, so that words may be in different ones of them.
    searched = [run[key] or "" for key in SEARCHED]
    searched += run["tags"] or ()
    line = " ".join(searched).lower()
    return all(word in line for word in text.lower().split())


def value_of(run: Mapping[str, Any], key: str) -> Any:
    """Return a fact of a run, or a metric of its last evaluation, or None if it has neither."""
    if key in SORTS:
        return run[key]
    return (run["evaluation"] or {}).get(key)


def metric_names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metrics that any of the runs was evaluated by."""
    # A damaged run has no evaluation.
    names = set()
    for run in runs:
        for name in run["evaluation"] or {}:
            if name.startswith("eval_"):
                names.add(name)
    return sorted(names)


def in_order(runs: list[dict[str, Any]], key: str, *, reverse: bool) -> list[dict[str, Any]]:
    """Return the runs in the order of a fact or of a metric. Runs without it come last.

    Raise ConfigError for a metric that no run has.
    """
    valued = []
    without = []
    for run in runs:
        if value_of(run, key) is None:
            without.append(run)
        else:
            valued.append(run)
    if runs and not valued and key not in SORTS:
        raise ConfigError(
            f"--sort {key}: none of {counted(len(runs), 'run')} has that; "
            f"expected {', '.join((*SORTS, *metric_names(runs)))}"
        )
    valued.sort(key=lambda run: value_of(run, key), reverse=reverse)
    return [*valued, *without]
