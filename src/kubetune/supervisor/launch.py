"""Start a run on this machine: make the run directory, then become the run's agent."""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path

from kubetune import errors
from kubetune.base import files, processes
from kubetune.base.files import StrPath
from kubetune.base.signals import Relay
from kubetune.config import consent
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import resolved
from kubetune.config.schema import Config
from kubetune.plan.plan import Plan
from kubetune.rundir import checkpoints, exit_status
from kubetune.rundir.mirror import copier
from kubetune.supervisor import supervise
from kubetune.supervisor.newer_data import written_since
from kubetune.supervisor.place import find_place, hold
from kubetune.supervisor.run_folder import check_run_dir, create_run_dir, settled


def launch_run(
    config: Config,
    plan: Plan,
    run_dir: StrPath,
    *,
    source: str | None = None,
    relay: Relay | None = None,
) -> int:
    """Run here to the end, and return the exit code.

    `source` is the text of the user's config file, which the run directory keeps. The verdict on the run, or
    `require_services`, has come before. Raise ConfigError if the directory belongs to another run, and
    EnvironmentFault if a run goes on there.
    """
    if relay is None:
        with Relay() as relay:
            return launch_run(config, plan, run_dir, source=source, relay=relay)

    run_dir = Path(run_dir)
    place = find_place(plan.nodes, plan.processes_per_node, os.environ)

    # On a new machine, the run directory may exist in the mirror alone.
    if config.mirror is not None and place.node == 0:
        code = _restore(config, run_dir, plan, config.mirror, relay)
        if code < 0:  # ended by a signal
            return errors.PREEMPTED
        if code > 0:
            return code

    # It is refused before anything of this run is written.
    check_run_dir(config, run_dir, plan)
    ended = _done_at(config, run_dir, plan)
    if ended is not None:
        newer = written_since(chain(*config.sources.values()), run_dir / exit_status.EXIT)
        changed = (
            f"{newer} was written after it ended, and what is new there is not learned; "
            if newer
            else ""
        )
        print(
            f"kubetune: {run_dir} is done since step {ended}, and there is nothing to go on with; {changed}to train anew, "
            "choose another `output`",
            flush=True,
        )
        return errors.OK
    with hold(run_dir, place.node):
        create_run_dir(config, run_dir, plan, source)
        return supervise.supervise(run_dir, place, relay)


def _done_at(config: Config, run_dir: Path, plan: Plan) -> int | None:
    """Return the last step of a run that this very config has ended well here; None where anything is left to do."""
    status = exit_status.read_exit_status(run_dir)
    # A paused run goes on, and so does one whose config asks for more by now.
    if status is None or status.state != "done" or not (run_dir / RESOLVED).is_file():
        return None
    settings = json.loads(json.dumps(resolved(settled(config, run_dir, plan))))
    is_same = files.read_object(run_dir / RESOLVED) == settings
    has_result = status.step is not None and checkpoints.newest_step(run_dir) == status.step
    return status.step if is_same and has_result else None


def _restore(config: Config, run_dir: Path, plan: Plan, address: str, relay: Relay) -> int:
    """Bring back from the mirror what is newer there than here, and return the exit code of that."""
    # A directory that belongs to another run must not be filled from this one's mirror. `resume` is checked later, with
    # what was brought back.
    if (run_dir / RESOLVED).exists():
        training = config.training.model_copy(update={"resume": "auto"})
        check_run_dir(config.model_copy(update={"training": training}), run_dir, plan)
    with hold(run_dir, 0):
        # An empty store gets the claim of this run, so what the user allows is kept before.
        consent.allow(consent.effects_of(config, ["mirror"]))
        # A process of its own, so that a signal can end it in the middle of a large file.
        command = processes.module("kubetune.rundir.mirror.copier", "restore", run_dir, address)
        environ = {**os.environ, copier.STARTING: json.dumps(resolved(config))}
        return relay.run(command, environ)
