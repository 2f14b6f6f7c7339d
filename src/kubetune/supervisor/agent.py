"""The first process of a run, on a laptop and in a pod alike: starts the ranks, passes signals on, says how it ended.

    python -m kubetune.agent RUN_DIR                                   a run directory that a launcher made
    python -m kubetune.agent RUN_DIR --config run.yaml [key=value …]   makes it first, as pods do

As process 1 of a container torchrun would ignore SIGTERM while it imports and while it waits for other nodes; this one
never imports torch and listens from its first moments. Not for deciding what a run is (config/, planning/).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kubetune import errors
from kubetune.base import faults, logs, processes
from kubetune.base.signals import STAY, Relay
from kubetune.rundir import exit_status
from kubetune.rundir.exit_status import ExitStatus
from kubetune.supervisor.place import hold, read_place
from kubetune.supervisor.supervise import supervise

# Another start could only end the same way.
_FINAL = (errors.OK, *errors.FINAL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part of a run to its end, and return the exit code."""
    # From here on a SIGTERM is noticed, whatever is still being imported.
    with Relay() as relay:
        logs.scrub_tracebacks()
        parser = argparse.ArgumentParser(
            prog="kubetune.agent", description="The first process of a run."
        )
        parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
        parser.add_argument(
            "--config", type=Path, help="make the run directory from this file first"
        )
        parser.add_argument("overrides", nargs="*", metavar="key=value")
        args = parser.parse_intermixed_args(argv)
        code = _start(args, relay)

        # Some kinds start a pod again however it ended. The pod then stays until someone deletes it.
        if STAY in os.environ and code in _FINAL:
            print(
                f"kubetune: exit code {code} is final; waiting to be stopped, not started again",
                file=sys.stderr,
            )
            relay.wait_for_stop()
        return code


def _start(args: argparse.Namespace, relay: Relay) -> int:
    try:
        if args.config is not None:
            return _launch(args, relay)

        _require_consent(args.run_dir)
        place = read_place(args.run_dir)
        with hold(args.run_dir, place.node):
            return supervise(args.run_dir, place, relay)
    except Exception as error:
        known_error = faults.known(error)
        if known_error is None:
            raise
        return _end(known_error)


def _require_consent(run_dir: Path) -> None:
    """Raise ConfigError for what the run directory has done elsewhere, unless the user has allowed it here."""
    from kubetune.config import consent
    from kubetune.config.resolved import read_config

    consent.require(consent.effects_of(read_config(run_dir)), run_dir)


def _end(error: errors.KubetuneError) -> int:
    """Say why nothing was begun, and return the exit code."""
    print(logs.scrub(f"kubetune: {error}"), file=sys.stderr)
    exit_status.leave_message(ExitStatus(error.exit_code, exit_status.reason_of(error)))
    return error.exit_code


def _launch(args: argparse.Namespace, relay: Relay) -> int:
    from kubetune.base.gpus import visible_gpus
    from kubetune.base.yaml_reader import read_file
    from kubetune.config.load import load_config
    from kubetune.plan.plan import make_plan
    from kubetune.supervisor.launch import launch_run
    from kubetune.supervisor.services import require_services

    # The directory that the command names wins over the file's `output`.
    file = read_file(args.config)
    overrides = [*args.overrides, f"output={args.run_dir}"]
    config = load_config(file, overrides=overrides, environ=os.environ)
    plan = make_plan(config, gpus=visible_gpus(os.environ))
    require_services(config.tracking, config.hooks, config.mirror)
    return launch_run(config, plan, args.run_dir, source=file.text, relay=relay)


def run() -> NoReturn:
    """Run `main`, and leave with its exit code whatever signal comes then."""
    code = main()
    # A signal while Python shuts down must not change the exit code.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    processes.leave(code)
