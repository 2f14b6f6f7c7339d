"""Runs of this machine as a list: those below a folder, a few facts of each, in the order that somebody wants.

Not for all that a run has to show (runs, reporting).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kubetune.base.humanize import counted
from kubetune.config.load import read_config
from kubetune.config.naming import RESOLVED, method_label, model_short_name
from kubetune.config.schema import Config
from kubetune.config.schema.tracking import MlflowConfig, WandbConfig
from kubetune.errors import ConfigError, KubetuneError, first_line
from kubetune.plan.actuals import held_seconds
from kubetune.rundir import metrics
from kubetune.rundir.heartbeat import read_beats
from kubetune.rundir.status import progress, ranks, state_of


def find_runs(folder: Path) -> Iterator[Path]:
    """The run directories at or below a folder, in the order of their paths. Links are not followed."""
    for place, folders, files in os.walk(folder):
        folders[:] = (
            []
            if RESOLVED in files
            else sorted(name for name in folders if not name.startswith("."))
        )
        if RESOLVED in files:
            yield Path(place)


def facts(run_dir: Path) -> dict[str, Any]:
    """Facts that `--json` prints of a run: None for what is not known; `state` is `damaged` where it cannot be read."""
    unknown = dict.fromkeys(
        (
            "name",
            "step",
            "steps",
            "loss",
            "evaluation",
            "saved_step",
            "metric",
            "model",
            "method",
            "started",
            "tags",
            "seconds_left",
            "hours",
            "price",
        )
    )
    try:
        config, events = read_config(run_dir), metrics.read_events(run_dir)
        beats = read_beats(run_dir)
        found = progress(run_dir, events, beats)
        state, why = state_of(found["exit_status"], ranks(run_dir, beats))
    except KubetuneError as error:
        return {"path": str(run_dir), **unknown, "state": "damaged", "why": first_line(error)}
    known = {key: found[key] for key in ("step", "steps", "loss", "evaluation", "saved_step")}
    return {
        "path": str(run_dir),
        "name": config.name or run_dir.absolute().name,
        **known,
        "metric": config.training.metric_for_best_model,
        "model": model_short_name(config.model.path),
        "method": method_label(config),
        "tags": _tags(config),
        "started": events[0]["time"] if events else None,
        "seconds_left": found["seconds_left"],
        **_cost(config, events, is_over=found["exit_status"] is not None),
        "state": state,
        "why": why,
    }


def _tags(config: Config) -> list[str]:
    """Tags that the run has in its trackers."""
    mlflow, wandb = config.tracking.mlflow, config.tracking.wandb
    named = mlflow.tags if isinstance(mlflow, MlflowConfig) else {}
    return [
        *(f"{key}={value}" for key, value in named.items()),
        *(wandb.tags if isinstance(wandb, WandbConfig) else ()),
    ]


def _cost(
    config: Config, events: Sequence[Mapping[str, Any]], *, is_over: bool
) -> dict[str, float | None]:
    """Hours for which devices were held so far, and their price where one is given."""
    if not events:
        return {"hours": None, "price": None}
    hours = held_seconds(events, events[-1]["time"] if is_over else metrics.now()) / 3600
    rate = config.compute.price_per_gpu_hour
    devices = max(event.get("nodes", 1) * event.get("processes", 1) for event in events)
    return {"hours": hours, "price": hours * devices * rate if rate is not None else None}


SORTS = ("started", "path", "state", "step", "loss", "hours", "price")
"""Facts that runs are put in order by, besides metrics."""


def is_like(run: Mapping[str, Any], text: str, state: str = "") -> bool:
    """A run of this state, if one is asked for, that has every word somewhere in what the table says of it."""
    said = " ".join(
        str(run[key] or "") for key in ("path", "name", "model", "method", "state", "why")
    )
    said = f"{said} {' '.join(run['tags'] or ())}".lower()
    return state in ("", run["state"]) and all(word in said for word in text.lower().split())


def value_of(run: Mapping[str, Any], key: str) -> Any:
    """A fact of a run, or a metric of its last evaluation; None where it has none."""
    return run[key] if key in SORTS else (run["evaluation"] or {}).get(key)


def metric_names(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Metrics that any of the runs was evaluated by."""
    return sorted(
        {name for run in found for name in (run["evaluation"] or {}) if name.startswith("eval_")}
    )


def in_order(found: list[dict[str, Any]], key: str, *, reverse: bool) -> list[dict[str, Any]]:
    """Runs by a fact, or a metric of the last evaluation, those without it last. Raises ConfigError for others."""
    have = [one for one in found if value_of(one, key) is not None]
    if found and not have and key not in SORTS:
        raise ConfigError(
            f"--sort {key}: none of {counted(len(found), 'run')} has that; "
            f"expected {', '.join((*SORTS, *metric_names(found)))}"
        )
    lacking = [one for one in found if value_of(one, key) is None]
    return [*sorted(have, key=lambda one: value_of(one, key), reverse=reverse), *lacking]
