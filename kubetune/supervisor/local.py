"""Starts a run on this machine: makes the run directory, then becomes the run's agent.

The run directory belongs to one config. Another config is refused there, unless it differs only in what moves no
number, such as logging; then the run goes on from its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from kubetune import errors
from kubetune.base import files, processes
from kubetune.base.files import StrPath
from kubetune.base.signals import Relay
from kubetune.config import consent
from kubetune.config.load import as_yaml, dotted_values, load_resolved, resolved
from kubetune.config.naming import RESOLVED
from kubetune.config.schema import Config
from kubetune.plan.plan import Plan
from kubetune.rundir import metrics, starts, trackers
from kubetune.rundir.mirror import copier, sync
from kubetune.rundir.starts import moved_numbers
from kubetune.supervisor import supervise
from kubetune.supervisor.observers import hooks
from kubetune.supervisor.place import find_place, hold

_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")


def launch_run(
    config: Config,
    plan: Plan,
    run_dir: StrPath,
    *,
    source: str | None = None,
    relay: Relay | None = None,
) -> int:
    """Run here to the end; returns the exit code. `source` is the text of the user's own config file, which is kept.

    Raises ConfigError when the directory belongs to another run or a tracker is not installed, and EnvironmentFault
    when a run goes on there.
    """
    if relay is None:
        with Relay() as relay:
            return launch_run(config, plan, run_dir, source=source, relay=relay)
    run_dir = Path(run_dir)
    trackers.check_installed(config.tracking)
    hooks.check(config.hooks)
    place = find_place(plan.nodes, plan.processes_per_node, os.environ)
    if config.push is not None and not any(os.environ.get(name) for name in _TOKENS):
        print(
            "kubetune: push needs HF_TOKEN at the end, or `hf auth login` before; it is not set",
            file=sys.stderr,
        )
    if config.mirror is not None:
        sync.check_installed(config.mirror)
        if place.node == 0 and (status := _restore(config, run_dir, plan, config.mirror, relay)):
            return status if status > 0 else errors.PREEMPTED
    check_run_dir(config, run_dir, plan)
    with hold(run_dir, place.node):
        create_run_dir(config, run_dir, plan, source)
        return supervise.supervise(run_dir, relay)


def dated(config: Config, run_dir: Path) -> Config:
    """The config with the date that chat templates write in this run, which its first start fixed."""
    first = None
    if _has_begun(run_dir) and (run_dir / RESOLVED).is_file():
        first = files.read_object(run_dir / RESOLVED)
    elif config.data.date is None:  # another node on the same disk may have fixed it already
        with suppress(errors.EnvironmentFault, FileNotFoundError):
            there = files.read_object(run_dir / RESOLVED)
            first = there if (there.get("data") or {}).get("date") else None
    found = starts.dated(config, first)
    if config.data.date not in (None, found.data.date):
        print(
            f"kubetune: warning: data.date is {found.data.date} since the first start of {run_dir}, and stays so; "
            f"{config.data.date} is left out",
            file=sys.stderr,
        )
    return found


def _restore(config: Config, run_dir: Path, plan: Plan, address: str, relay: Relay) -> int:
    """Bring back from the mirror what it knows longer than this machine; returns the exit code of that."""
    if (run_dir / RESOLVED).exists():
        training = config.training.model_copy(update={"resume": "auto"})
        check_run_dir(config.model_copy(update={"training": training}), run_dir, plan)
    with hold(run_dir, 0):
        command = processes.module("kubetune.rundir.mirror.copier", "restore", run_dir, address)
        return relay.run(command, {**os.environ, copier.STARTING: json.dumps(resolved(config))})


def create_run_dir(
    config: Config, run_dir: Path, plan: Plan | None = None, source: str | None = None
) -> None:
    """Write config.yaml, resolved.json and plan.json. Raises ConfigError as `check_run_dir` does."""
    check_run_dir(config, run_dir, plan)
    consent.allow_start(config)
    # First what tells other nodes on the same disk, at this very moment perhaps, that the directory is this run's.
    files.write_atomic(
        run_dir / RESOLVED, json.dumps(resolved(dated(config, run_dir)), indent=2) + "\n"
    )
    files.write_atomic(run_dir / metrics.CONFIG, source if source is not None else as_yaml(config))
    if plan is not None:
        files.write_atomic(run_dir / metrics.PLAN, plan.to_json())


def check_run_dir(config: Config, run_dir: Path, plan: Plan | None = None) -> None:
    """Raise ConfigError when `run_dir` holds anything but this run, or `training.resume` forbids to go on there."""
    # Listed before it is looked for: another node may be making the directory just now, and that file comes first.
    found = sorted(entry.name for entry in run_dir.glob("[!.]*") if entry.name != "logs")
    if not (run_dir / RESOLVED).exists():
        if found:
            raise errors.ConfigError(
                f"{run_dir} holds {found[0]} but no run of kubetune; choose another `output`. Nothing was written."
            )
    elif _has_begun(run_dir) and (differences := _differences(config, run_dir, plan)):
        raise errors.ConfigError(
            [
                *(f"{key} was {was}, now is {now}" for key, was, now in differences),
                f"{run_dir} holds a run with another config; to go on with it undo these changes, to start afresh "
                "choose another `output`. Nothing was written.",
            ]
        )
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
    """A step was trained here: a start that was refused before, say for its data, may come back mended."""
    lines = run_dir / metrics.METRICS
    return any((run_dir / "checkpoints").glob("*step-*")) or (
        lines.exists() and lines.stat().st_size > 0
    )


def _differences(config: Config, run_dir: Path, plan: Plan | None) -> list[tuple[str, str, str]]:
    """(key, old value, new value) of everything that changed and moves numbers."""
    path = run_dir / RESOLVED
    # The file is loaded as a config, so that a key which it lacks counts with its default.
    old = dict(dotted_values(resolved(load_resolved(files.read_object(path), str(path)))))
    new = dict(dotted_values(resolved(config)))
    # The global batch may follow from compute.*, which by itself is free to change.
    if plan is not None and (before := _plan_before(run_dir)) is not None:
        name = "global_batch_size" if plan.global_batch_tokens is None else "global_batch_tokens"
        old[f"training.{name}"], new[f"training.{name}"] = (
            getattr(before, name),
            getattr(plan, name),
        )
    return moved_numbers(old, new)


def _plan_before(run_dir: Path) -> Plan | None:
    """The plan of an earlier start. A damaged one decides nothing: the newest checkpoint has its batch."""
    try:
        return Plan.read(run_dir / metrics.PLAN)
    except FileNotFoundError:
        return None
    except errors.ConfigError as error:
        print(f"kubetune: warning: {error}", file=sys.stderr)
        return None
