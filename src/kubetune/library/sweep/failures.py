"""Failures that end a sweep, since other trials would meet them too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kubetune import errors
from kubetune.library.sweep.sweep_record import Record, Trial, TrialRun
from kubetune.rundir.exit_status import ExitStatus

# Trials that fail in one way before the sweep ends. Mistakes in the run file are the same in all.
_SAME_FAILURES: Final = 3
_SAME_USER_ERRORS: Final = 2


def common_failure(trials: Sequence[Trial], total: int) -> ExitStatus | None:
    """Return how the first trials failed, if all so far failed in the same way, else None.

    `total`: trials of the sweep at most.
    """
    failed = []
    for trial in trials:
        if trial.state == "failed":
            failed.append(trial)
        elif trial.state != "open" or trial.rung > 0:
            return None  # this one has come to a rung

    # The name of a run in the reason, such as that of its folder, makes no difference.
    failures: dict[tuple[int | None, str], TrialRun] = {}
    for trial in failed:
        for run in trial.runs:
            if run.state == "failed":
                reason = run.reason.replace(run.name, "…")
                failures.setdefault((run.code, reason), run)
    if len(failures) != 1:
        return None

    (first,) = failures.values()
    code = first.code or errors.BUG
    enough = _SAME_USER_ERRORS if code == errors.USER else _SAME_FAILURES
    if len(failed) < min(enough, total):
        return None
    return ExitStatus(code, first.reason)


def raise_common_error(record: Record, total: int, fault: str, *, greater: bool) -> None:
    """Raise the error that ended the sweep, or the last trial's if none succeeded.

    `fault`: of the disk, a device or the network. `greater`: True if more of the metric is better.
    """
    failure = common_failure(record.trials, total)
    if failure:
        reason = f"the sweep ended because every trial so far failed: {failure.reason}"
        raise _error(failure.code, reason)
    if fault:
        raise errors.EnvironmentFault(
            f"{fault}\nThe sweep stopped, since other trials would fail in the same way. "
            "Fix this, then repeat the command to continue."
        )
    failed = [run for run in record.runs if run.state == "failed"]
    if failed and not record.ranked(greater=greater) and not record.reason:
        last = failed[-1]
        reason = f"no trial succeeded, so there is no best one; the last failure: {last.reason}"
        raise _error(last.code, reason)


def _error(code: int | None, message: str) -> errors.KubetuneError:
    """Return an error that ends the sweep with the exit code of a run."""
    error = errors.KubetuneError(message)
    error.exit_code = code or errors.BUG
    return error
