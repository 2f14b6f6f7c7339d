"""Starts a run on this machine: makes the run directory, then becomes the run's agent.

The run directory belongs to one config. Another config is refused there, unless it differs only in what moves no
number, such as logging; then the run goes on from its newest checkpoint.
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
from kubetune.base import files, processes
from kubetune.base.files import StrPath
from kubetune.base.signals import Relay
from kubetune.config import consent
from kubetune.config.load import as_yaml, dotted_values, load_resolved, resolved
from kubetune.config.naming import RESOLVED
from kubetune.config.schema import Config
from kubetune.plan.plan import Plan
from kubetune.rundir import checkpoints, exit_status, metrics, starts, trackers
from kubetune.rundir.mirror import copier, stored_run
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
    """Run here to the end, and return the exit code.

    `source` is the text of the user's config file, which the run directory keeps. Raise ConfigError if
    the directory belongs to another run or a tracker is not installed, and EnvironmentFault if a run
    goes on there.
    """
    if relay is None:
        with Relay() as relay:
            return launch_run(config, plan, run_dir, source=source, relay=relay)

    # Everything that can be refused is refused before anything is written.
    run_dir = Path(run_dir)
    trackers.check_installed(config.tracking)
    hooks.check(config.hooks)
    place = find_place(plan.nodes, plan.processes_per_node, os.environ)
    has_token = any(os.environ.get(name) for name in _TOKENS)
    if config.push is not None and not has_token:
        print(
            "kubetune: push needs HF_TOKEN at the end, or `hf auth login` before; it is not set",
            file=sys.stderr,
        )

    # On a new machine, the run directory may exist in the mirror alone.
    if config.mirror is not None:
        stored_run.check_installed(config.mirror)
        if place.node == 0:
            code = _restore(config, run_dir, plan, config.mirror, relay)
            if code < 0:  # ended by a signal
                return errors.PREEMPTED
            if code > 0:
                return code

    check_run_dir(config, run_dir, plan)
    ended = _done_at(config, run_dir)
    if ended is not None:
        print(
            f"kubetune: {run_dir} is done since step {ended}, and there is nothing to go on with; to train anew, "
            "choose another `output`",
            flush=True,
        )
        return errors.OK
    with hold(run_dir, place.node):
        create_run_dir(config, run_dir, plan, source)
        return supervise.supervise(run_dir, relay)


def _done_at(config: Config, run_dir: Path) -> int | None:
    """Return the last step of a run that this very config has ended well here; None where anything is left to do."""
    status = exit_status.read_exit_status(run_dir)
    # A pause is an end that goes on, as is anything that the config asks for by now.
    if status is None or status.state != "done" or not (run_dir / RESOLVED).is_file():
        return None
    settings = json.loads(json.dumps(resolved(dated(config, run_dir))))
    is_same = files.read_object(run_dir / RESOLVED) == settings
    has_result = status.step is not None and checkpoints.newest_step(run_dir) == status.step
    return status.step if is_same and has_result else None


def dated(config: Config, run_dir: Path) -> Config:
    """Return the config with the date that chat templates write in this run: that of its first start."""
    first = None
    if _has_begun(run_dir) and (run_dir / RESOLVED).is_file():
        first = files.read_object(run_dir / RESOLVED)
    elif config.data.date is None:  # another node on the same disk may have fixed it already
        with suppress(errors.EnvironmentFault, FileNotFoundError):
            written = files.read_object(run_dir / RESOLVED)
            if (written.get("data") or {}).get("date"):
                first = written

    data = starts.dated(config.data, first)
    if config.data.date not in (None, data.date):
        print(
            f"kubetune: warning: data.date is {data.date} since the first start of {run_dir}, and stays so; "
            f"{config.data.date} is left out",
            file=sys.stderr,
        )
    return config.model_copy(update={"data": data})


def _restore(config: Config, run_dir: Path, plan: Plan, address: str, relay: Relay) -> int:
    """Bring back from the mirror what is newer there than here, and return the exit code of that."""
    # A directory that belongs to another run must not be filled from this one's mirror. `resume` is checked later, with
    # what was brought back.
    if (run_dir / RESOLVED).exists():
        training = config.training.model_copy(update={"resume": "auto"})
        check_run_dir(config.model_copy(update={"training": training}), run_dir, plan)
    with hold(run_dir, 0):
        # A process of its own, so that a signal can end it in the middle of a large file.
        command = processes.module("kubetune.rundir.mirror.copier", "restore", run_dir, address)
        environ = {**os.environ, copier.STARTING: json.dumps(resolved(config))}
        return relay.run(command, environ)


def create_run_dir(
    config: Config, run_dir: Path, plan: Plan | None = None, source: str | None = None
) -> None:
    """Write config.yaml, resolved.json and plan.json. Raise ConfigError as `check_run_dir` does."""
    check_run_dir(config, run_dir, plan)
    consent.allow(consent.effects_of(config))

    # resolved.json comes first: by it other nodes on the same disk, which may start at this moment, see
    # that the directory is this run's.
    text = json.dumps(resolved(dated(config, run_dir)), indent=2) + "\n"
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
