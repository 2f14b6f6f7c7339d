"""How a run ended, and why: the exit status that each rank writes, the death of its process, and one verdict from both.

torchrun returns 1 whatever its children did, and the first rank that fails is often only the one that lost a peer. The
verdict names the cause. Not for starting or stopping processes (agent.py).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kubetune import errors
from kubetune.base.files import read_object, write_atomic
from kubetune.base.jsonl import warn
from kubetune.base.logs import scrub
from kubetune.rundir.metrics import is_time, now

EXIT = "exit.json"
EndState = Literal["done", "stopped", "failed"]
DONE = "done"  # the reason of a run that ended well
# Kubernetes keeps what a container writes here in the pod's status when the container is gone.
TERMINATION_LOG = Path("/dev/termination-log")

# Characters of a reason, the only long part of the 4,096 bytes that Kubernetes keeps.
_MESSAGE_CHARACTERS = 1000
# torchrun kills the other ranks 30 seconds after the first death, so it did not cause deaths within this time.
_SAME_CAUSE_SECONDS = 10.0
_REQUESTS_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STOPPED_EARLY = "stopped before the first step of this start"


@dataclass(frozen=True)
class ExitStatus:
    """How a rank or a run ended."""

    code: int  # an exit code of errors.py
    reason: str
    step: int | None = None  # the last completed step, where known
    error: str | None = None  # name of the class in errors.py that ended it, where one was raised

    @property
    def state(self) -> EndState:
        """Return the word for this end in lists, pages and `status`. A missed gate is a failure, as its exit code is."""
        if self.code == errors.PREEMPTED or self.error == errors.Paused.__name__:
            return "stopped"
        return "done" if self.code == errors.OK else "failed"


@dataclass(frozen=True)
class Death:
    """The failed process of a rank."""

    rank: int
    status: int  # of the process; negative for a signal
    seen: float  # seconds since the epoch
    reason: str = ""  # where whoever started the process knows it

    @property
    def was_killed(self) -> bool:
        """True if a signal ended the process that is no request to stop, such as SIGKILL."""
        return self.status < 0 and -self.status not in _REQUESTS_TO_STOP


def reason_of(error: errors.KubetuneError) -> str:
    """Return the message of an error for the log of a run, whose directory has been written to already."""
    return str(error).replace(
        "Nothing was written.",
        "This start trained nothing; the run directory holds its config and logs.",
    )


def write_rank_exit_status(run_dir: Path, rank: int, status: ExitStatus) -> None:
    """Write the exit status of one rank to `logs/rank-N.exit.json`, where the agent reads it."""
    _write(run_dir, _rank_path(run_dir, rank), status)


def read_rank_exit_statuses(run_dir: Path) -> dict[int, ExitStatus]:
    """Return the exit status of each rank that wrote one since `clear_exit_statuses`."""
    statuses = {}
    for path in (run_dir / "logs").glob("rank-*.exit.json"):
        status = _read(path)
        if status is not None:
            statuses[int(path.name.split(".")[0].removeprefix("rank-"))] = status
    return dict(sorted(statuses.items()))


def write_exit_status(run_dir: Path, status: ExitStatus) -> None:
    """Write the verdict on the whole run to exit.json."""
    _write(run_dir, run_dir / EXIT, status)


def read_exit_status(run_dir: Path) -> ExitStatus | None:
    """Return the verdict of exit.json, None while the run goes on and where it was cut off without one."""
    return _read(run_dir / EXIT)


def read_end(run_dir: Path) -> str | None:
    """Return when the run ended, None where exit.json does not say it."""
    # Events cannot tell: a push or an export months later is one too.
    with suppress(FileNotFoundError, errors.EnvironmentFault):
        time = read_object(run_dir / EXIT).get("time")
        if is_time(time):
            return str(time)
    return None


def leave_message(status: ExitStatus, progress: Mapping[str, Any] | None = None) -> None:
    """Write for Kubernetes how this container ends, and how far the run is. Do nothing outside of Kubernetes."""
    reason = status.reason[:_MESSAGE_CHARACTERS]
    message = {**asdict(status), "reason": reason, "progress": progress}
    with suppress(OSError):
        if TERMINATION_LOG.is_file():
            TERMINATION_LOG.write_text(scrub(json.dumps(message)))


def clear_exit_statuses(run_dir: Path, ranks: Collection[int] | None = None) -> None:
    """Remove the exit statuses of an earlier start: those of these ranks, or all of them and the run's."""
    paths = [_rank_path(run_dir, rank) for rank in ranks or ()]
    if ranks is None:
        paths = [run_dir / EXIT, *(run_dir / "logs").glob("rank-*.exit.json")]
    for path in paths:
        path.unlink(missing_ok=True)


def judge(
    local_ranks: Collection[int],
    statuses: Mapping[int, ExitStatus],
    deaths: Sequence[Death],
    *,
    stopping: str | None = None,
    frozen: Mapping[int, ExitStatus] | None = None,
) -> ExitStatus:
    """Return the cause of the end of this node's ranks.

    `statuses` are those of all ranks, of other nodes too where their files are seen; `deaths` are in the order in
    which they were observed; `stopping` says why the ranks were asked to stop, if they were; `frozen` has a status for
    each rank whose process had long stood still when somebody killed it.

    Example: rank 0 ends with 145 (lost a peer), rank 1 with 2 (the user's error). The cause is "rank 1: …", code 2.
    """
    if all(rank in statuses and statuses[rank].code == errors.OK for rank in local_ranks):
        return statuses[min(local_ranks)]
    frozen = frozen or {}
    # What a rank has written says more than how its process died; a frozen rank could write nothing.
    ends = {**{death.rank: of_death(death) for death in deaths}, **statuses, **frozen}
    # 1. A rank with a cause of its own: wrong data, a full disk, divergence, …
    for code in _CAUSES:
        causes = _with_code(ends, code)
        if causes:
            return _named(causes, len(ends))
    step = max((status.step for status in ends.values() if status.step is not None), default=None)
    if stopping:
        # 2. A stop was asked for, so the ranks were right to end.
        saved = _with_code(statuses, errors.PREEMPTED)
        if saved:
            return saved[min(saved)]
        return ExitStatus(errors.PREEMPTED, stopping, step)
    # 3. A rank whose process stood still.
    if frozen:
        return frozen[min(frozen)]
    # 4. A rank that was killed, and not only because another had died.
    for death in deaths:
        if death.was_killed and death.seen - deaths[0].seen <= _SAME_CAUSE_SECONDS:
            return of_death(death)
    # 5. Whatever else the ranks say.
    for code in (errors.BUG, errors.PREEMPTED, errors.LOST_PEER):
        causes = _with_code(ends, code)
        if causes:
            return _named(causes, len(ends))
    silent = min(set(local_ranks) - set(ends))
    reason = f"rank {silent} ended without saying how; its log is logs/rank-{silent}.log"
    return ExitStatus(errors.BUG, reason, step)


# Codes that no death of another rank can bring about. Each is the cause on whatever rank it shows up.
_CAUSES = (errors.USER, errors.OUT_OF_MEMORY, errors.ENVIRONMENT, errors.DIVERGED, errors.GATE)

# Who sends a signal, as far as the system says.
_KILLERS = {
    "SIGKILL": "out of memory, somebody's kill -9, or its CPU time used up: `ulimit -t`",
    "SIGXCPU": "its CPU time is used up: `ulimit -t`",
    "SIGXFSZ": "a file as large as it may be: `ulimit -f`",
    "SIGSEGV": "a library failed, as it does where `ulimit -s` leaves it no room",
}


def _with_code(ends: Mapping[int, ExitStatus], code: int) -> dict[int, ExitStatus]:
    return {rank: status for rank, status in ends.items() if status.code == code}


def of_death(death: Death) -> ExitStatus:
    """Return the exit status of a rank that wrote none, by the status of its process alone."""
    if death.was_killed:
        name = signal.Signals(-death.status).name
        reason = f"rank {death.rank} was killed by {name}"
        if name in _KILLERS:
            reason += f" ({_KILLERS[name]})"
        return ExitStatus(errors.LOST_PEER, reason, error=errors.RankDied.__name__)
    if death.status < 0:
        return ExitStatus(errors.PREEMPTED, _STOPPED_EARLY)
    known = (*errors.FINAL, errors.ENVIRONMENT, errors.PREEMPTED, errors.LOST_PEER)
    code = death.status if death.status in known else errors.BUG
    log = f"logs/rank-{death.rank}.log"
    ended = f"rank {death.rank} ended with exit code {death.status}; its log is {log}"
    return ExitStatus(code, death.reason or ended)


def _named(causes: Mapping[int, ExitStatus], ranks: int) -> ExitStatus:
    """Return the cause of the lowest rank, and begin its reason with "rank N" where other ranks ended otherwise."""
    # A rank that hung names itself; those that waited for it only say that they lost a peer.
    naming = [rank for rank, cause in causes.items() if cause.reason.startswith("rank ")]
    if naming:
        return causes[min(naming)]
    rank = min(causes)
    cause = causes[rank]
    if ranks == 1 or len(causes) > 1:
        return cause
    return replace(cause, reason=f"rank {rank}: {cause.reason}")


def _rank_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank-{rank}.exit.json"


def _write(run_dir: Path, path: Path, status: ExitStatus) -> None:
    text = json.dumps({**asdict(status), "time": now()}, indent=2)
    write_atomic(path, scrub(text + "\n"), within=run_dir)


def _read(path: Path) -> ExitStatus | None:
    """Return the exit status in a file, None where it is missing or damaged; a warning names a damaged one."""
    try:
        values = read_object(path)
        code = values["code"]
        reason = values["reason"]
        step = values["step"]
        error = values.get("error")
        if isinstance(code, int) and isinstance(reason, str) and isinstance(step, int | None):
            return ExitStatus(code, reason, step, error if isinstance(error, str) else None)
        warn(f"{path} is damaged: it says nothing of how the run ended")
    except FileNotFoundError:
        pass
    except (errors.EnvironmentFault, KeyError) as error:
        warn(f"{path} is damaged, so it says nothing of how the run ended: {error}")
    return None
