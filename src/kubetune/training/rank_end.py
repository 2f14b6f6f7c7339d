"""Say and write down how a rank ended."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from kubetune import errors
from kubetune.base import faults, logs, processes
from kubetune.rundir import checkpoints, exit_status
from kubetune.rundir.exit_status import ExitStatus


def status_of_done(step: int | None, remark: str) -> ExitStatus:
    """Return the exit status of a rank that came to its end. `remark`: on the run, mostly empty."""
    reason = exit_status.DONE
    if remark:
        reason = f"{exit_status.DONE}, but {remark}"
    return ExitStatus(errors.OK, reason, step)


def status_of(error: Exception, run_dir: Path | None) -> ExitStatus:
    """Log what ended the rank, and return its exit status. `run_dir`: None if nothing may be written there."""
    if isinstance(error, errors.Preempted):
        step = error.step
        if not step and run_dir is not None:
            # A rank that is stopped before the loop does not know how far an earlier start came.
            step = checkpoints.newest_step(run_dir)
        reason = str(type(error)(step))
        logs.STEP.log(logs.NOTICE, "%s", reason)
        return ExitStatus(error.exit_code, reason, step, error.kind)

    if isinstance(error, errors.KubetuneError):
        reason = str(error)
        if run_dir is not None:
            reason = exit_status.reason_of(error)
        logs.ERROR.error("%s", reason)
        return ExitStatus(error.exit_code, reason, error=type(error).__name__)

    # Errors of the operating system that a user can fix, such as a full disk.
    fault = faults.fault_of(error)
    if fault is not None:
        logs.ERROR.error("%s", fault)
        return ExitStatus(fault.exit_code, str(fault))
    # Anything else nobody has thought of.
    logs.family_logger("ERROR").critical("this is a bug in kubetune", exc_info=error)
    return ExitStatus(errors.BUG, f"{type(error).__name__}: {error}")


def write_status(run_dir: Path, rank: int, status: ExitStatus) -> None:
    """Write how the rank ended to its run directory."""
    with suppress(errors.EnvironmentFault):  # a full disk must not hide the exit code it caused
        exit_status.write_rank_exit_status(run_dir, rank, status)


def end_at_once(run_dir: Path, rank: int, error: BaseException) -> None:
    """Say what ended the rank, and end it from a thread: its main thread imports torch, for seconds."""
    assert isinstance(error, Exception)
    status = status_of(error, run_dir)
    write_status(run_dir, rank, status)
    processes.kill_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status.code)
