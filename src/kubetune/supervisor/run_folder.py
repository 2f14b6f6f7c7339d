"""The run directory of a run that is started here: make it, or see that it is of the same run.

It belongs to one config. Another config is refused there, unless it differs only in what moves no number, such as
logging; then the run goes on from its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import files
from kubetune.config import consent
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import as_yaml, dotted_values, load_resolved, resolved
from kubetune.config.schema import Config, DataConfig
from kubetune.plan.devices import device_bytes
from kubetune.plan.fitting import decide_parallelism
from kubetune.plan.plan import Plan
from kubetune.rundir import metrics, starts
from kubetune.rundir.starts import moved_numbers


def settled(config: Config, run_dir: Path, plan: Plan) -> Config:
    """Return the config with what the first start fixes: `dated`, and what `training.parallelism: auto` is."""
    config = config.model_copy(update={"data": dated(config.data, run_dir)})
    if config.training.parallelism != "auto":
        return config
    chosen = None
    if _has_begun(run_dir) and (run_dir / RESOLVED).is_file():
        before = files.read_object(run_dir / RESOLVED)
        chosen = (before.get("training") or {}).get("parallelism")
    if chosen in (None, "auto"):
        memory = device_bytes(config.compute, plan)
        chosen, why, _ = decide_parallelism(config, plan, memory, os.environ)
        print(f"kubetune: training.parallelism: auto -> {chosen}, because {why}", flush=True)
    training = config.training.model_copy(update={"parallelism": chosen})
    return config.model_copy(update={"training": training})


def dated(data: DataConfig, run_dir: Path) -> DataConfig:
    """Return the section with the date that chat templates write in this run: that of its first start."""
    first = None
    if _has_begun(run_dir) and (run_dir / RESOLVED).is_file():
        first = files.read_object(run_dir / RESOLVED)
    elif data.date is None:  # another node on the same disk may have fixed it already
        with suppress(errors.EnvironmentFault, FileNotFoundError):
            written = files.read_object(run_dir / RESOLVED)
            if (written.get("data") or {}).get("date"):
                first = written

    fixed = starts.dated(data, first)
    if data.date not in (None, fixed.date):
        print(
            f"kubetune: warning: data.date is {fixed.date} since the first start of {run_dir}, and stays so; "
            f"{data.date} is left out",
            file=sys.stderr,
        )
    return fixed


def create_run_dir(
    config: Config, run_dir: Path, plan: Plan | None = None, source: str | None = None
) -> None:
    """Write config.yaml, resolved.json and plan.json into a directory that `check_run_dir` has allowed."""
    consent.allow(consent.effects_of(config))

    # resolved.json comes first: by it other nodes on the same disk, which may start at this moment, see
    # that the directory is this run's.
    if plan is None:
        fixed = config.model_copy(update={"data": dated(config.data, run_dir)})
    else:
        fixed = settled(config, run_dir, plan)
    text = json.dumps(resolved(fixed), indent=2) + "\n"
    files.write_atomic(run_dir / RESOLVED, text)

    # The user's own text has comments, which a run made in Python lacks.
    if source is None:
        source = as_yaml(config)
    files.write_atomic(run_dir / metrics.CONFIG, source)
    if plan is not None:
        files.write_atomic(run_dir / metrics.PLAN, plan.to_json())


def check_run_dir(config: Config, run_dir: Path, plan: Plan | None = None) -> None:
    """Raise ConfigError if `run_dir` holds anything but this run, or `training.resume` forbids to go on."""
    # The folder is listed before resolved.json is looked for: another node may be making it just now, and
    # resolved.json comes first.
    names = sorted(entry.name for entry in run_dir.glob("[!.]*") if entry.name != "logs")
    if not (run_dir / RESOLVED).exists():
        if names:
            raise errors.ConfigError(
                f"{run_dir} holds {names[0]} but no run of kubetune; choose another `output`. Nothing was written."
            )
    elif _has_begun(run_dir):
        _require_same_numbers(resolved(config), run_dir, plan)

    has_checkpoint = any((run_dir / "checkpoints").glob("step-*"))
    if config.training.resume == "never" and has_checkpoint:
        raise errors.ConfigError(
            f"{run_dir} has checkpoints, but training.resume is never; choose another `output`, or `auto` to go on"
        )
    if config.training.resume == "must" and not has_checkpoint:
        raise errors.ConfigError(
            f"training.resume is must, but {run_dir} has no checkpoint; `auto` would start there"
        )


def _has_begun(run_dir: Path) -> bool:
    """True if a step was trained here. Before that, say after bad data, the config may change."""
    if any((run_dir / "checkpoints").glob("*step-*")):
        return True
    lines = run_dir / metrics.METRICS
    return lines.exists() and lines.stat().st_size > 0


def _require_same_numbers(settings: Mapping[str, Any], run_dir: Path, plan: Plan | None) -> None:
    """Raise ConfigError naming everything that changed and moves numbers. `settings`: the resolved config."""
    problems = []
    for key, old, new in _differences(settings, run_dir, plan):
        problems.append(f"{key} was {old}, now is {new}")
    if problems:
        problems.append(
            f"{run_dir} holds a run with another config; to go on with it undo these changes, to start afresh "
            "choose another `output`. Nothing was written."
        )
        raise errors.ConfigError(problems)


def _differences(
    settings: Mapping[str, Any], run_dir: Path, plan: Plan | None
) -> list[tuple[str, str, str]]:
    """Return (key, old value, new value) of everything that changed and moves numbers."""
    path = run_dir / RESOLVED
    # The file is loaded as a config, so that a key which it lacks counts with its default.
    config_before = load_resolved(files.read_object(path), str(path))
    old = dict(dotted_values(resolved(config_before)))
    new = dict(dotted_values(settings))

    # The global batch may follow from compute.*, which by itself is free to change.
    #     4 ranks × batch 2 × accumulation 1   →   2 ranks × batch 2 × accumulation 2: the same run
    plan_before = None
    if plan is not None:
        plan_before = _plan_before(run_dir)
    if plan is not None and plan_before is not None:
        name = "global_batch_size"
        if plan.global_batch_tokens is not None:
            name = "global_batch_tokens"
        old[f"training.{name}"] = getattr(plan_before, name)
        new[f"training.{name}"] = getattr(plan, name)
    return moved_numbers(old, new)


def _plan_before(run_dir: Path) -> Plan | None:
    """Return the plan of an earlier start. A damaged one is no matter: the newest checkpoint has its batch."""
    try:
        return Plan.read(run_dir / metrics.PLAN)
    except FileNotFoundError:
        return None
    except errors.ConfigError as error:
        print(f"kubetune: warning: {error}", file=sys.stderr)
        return None
