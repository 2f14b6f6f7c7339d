"""End of a run, and its cause: what each rank says of itself, what was seen of its process, and one verdict from both.

torchrun returns 1 whatever its children did, and the first rank seen to fail is often only the one that lost a peer.
The verdict names the cause. Not for starting or stopping processes (agent.py).
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
from kubetune.rundir.metrics import now

EXIT = "exit.json"
EndState = Literal["done", "stopped", "failed"]
DONE = "done"
"""The reason of an end that leaves nothing to say."""
TERMINATION_LOG = Path("/dev/termination-log")
"""File for a container's exit status: Kubernetes keeps it in the pod's status when the container is gone."""

# Kubernetes keeps 4,096 bytes, in which the reason is what may be long.
_MESSAGE_CHARACTERS = 1000
# Deaths that follow from a first one within this time were not yet caused by torchrun, which kills after 30 seconds.
_SAME_CAUSE_SECONDS = 10.0
_REQUESTS_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STOPPED_EARLY = "stopped before the first step of this start"


@dataclass(frozen=True)
class ExitStatus:
    """An exit code of errors.py, its reason in words, and the last completed step where known.

    `error`: the class in errors.py of what ended it, where one was raised.
    """

    code: int
    reason: str
    step: int | None = None
    error: str | None = None

    @property
    def state(self) -> EndState:
        """Word for this end, the same in lists, pages and `status`. A missed gate is a failure, as its exit code is."""
        if self.code == errors.PREEMPTED or self.error == errors.Paused.__name__:
            return "stopped"
        return "done" if self.code == errors.OK else "failed"


@dataclass(frozen=True)
class Death:
    """The process of a rank seen to fail: its status, negative for a signal, and when, in seconds since the epoch.

    `said`: why, where whoever started it knows.
    """

    rank: int
    status: int
    seen: float
    said: str = ""

    @property
    def was_killed(self) -> bool:
        """End by a signal that asks nothing, such as SIGKILL."""
        return self.status < 0 and -self.status not in _REQUESTS_TO_STOP


def reason_of(error: errors.KubetuneError) -> str:
    """An error in words, as a run tells it: where one begins, its directory has been written to already."""
    return str(error).replace(
        "Nothing was written.",
        "This start trained nothing; the run directory holds its config and logs.",
    )


def write_rank_exit_status(run_dir: Path, rank: int, status: ExitStatus) -> None:
    """Leave the exit status of one rank for the agent, as `logs/rank-N.exit.json`."""
    _write(run_dir, _rank_path(run_dir, rank), status)


def read_rank_exit_statuses(run_dir: Path) -> dict[int, ExitStatus]:
    """The last words of all ranks that left one since `clear_exit_statuses`."""
    statuses = {}
    for path in (run_dir / "logs").glob("rank-*.exit.json"):
        if (status := _read(path)) is not None:
            statuses[int(path.name.split(".")[0].removeprefix("rank-"))] = status
    return dict(sorted(statuses.items()))


def write_exit_status(run_dir: Path, status: ExitStatus) -> None:
    """Write the verdict on the whole run to exit.json."""
    _write(run_dir, run_dir / EXIT, status)


def read_exit_status(run_dir: Path) -> ExitStatus | None:
    """The verdict of exit.json; None while the run goes on or when it was cut off without one."""
    return _read(run_dir / EXIT)


def leave_message(status: ExitStatus, progress: Mapping[str, Any] | None = None) -> None:
    """Tell Kubernetes how this container ends, and how far the run is. Nothing where there is no Kubernetes."""
    told = {**asdict(status), "reason": status.reason[:_MESSAGE_CHARACTERS], "progress": progress}
    with suppress(OSError):
        if TERMINATION_LOG.is_file():
            TERMINATION_LOG.write_text(scrub(json.dumps(told)))


def clear_exit_statuses(run_dir: Path, ranks: Collection[int] | None = None) -> None:
    """Forget how an earlier start ended: these ranks, or all of them and the run."""
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
    """The cause of how this node's ranks ended.

    `statuses` are the last words of all ranks, other nodes' included where their files are seen; `deaths` are in the
    order in which they were observed; `stopping` says why the ranks were asked to stop, if they were; `frozen` speaks
    for ranks whose process had long stood still when somebody killed it.
    """
    if all(rank in statuses and statuses[rank].code == errors.OK for rank in local_ranks):
        return statuses[min(local_ranks)]
    frozen = frozen or {}
    told = {**{death.rank: of_death(death) for death in deaths}, **statuses, **frozen}
    # What no other rank's death can bring about is a cause wherever it shows up.
    for code in (
        errors.USER,
        errors.OUT_OF_MEMORY,
        errors.ENVIRONMENT,
        errors.DIVERGED,
        errors.GATE,
    ):
        if causes := {rank: status for rank, status in told.items() if status.code == code}:
            return _named(causes, len(told))
    step = max((status.step for status in told.values() if status.step is not None), default=None)
    if stopping:
        saved = [status for status in statuses.values() if status.code == errors.PREEMPTED]
        return saved[0] if saved else ExitStatus(errors.PREEMPTED, stopping, step)
    if frozen:
        return frozen[min(frozen)]
    for death in deaths:
        if death.was_killed and death.seen - deaths[0].seen <= _SAME_CAUSE_SECONDS:
            return of_death(death)
    for code in (errors.BUG, errors.PREEMPTED, errors.LOST_PEER):
        if causes := {rank: status for rank, status in told.items() if status.code == code}:
            return _named(causes, len(told))
    silent = sorted(set(local_ranks) - set(told))
    return ExitStatus(
        errors.BUG,
        f"rank {silent[0]} ended without saying how; its log is logs/rank-{silent[0]}.log",
        step,
    )


_KILLERS = {
    "SIGKILL": "out of memory, somebody's kill -9, or its CPU time used up: `ulimit -t`",
    "SIGXCPU": "its CPU time is used up: `ulimit -t`",
    "SIGXFSZ": "a file as large as it may be: `ulimit -f`",
    "SIGSEGV": "a library failed, as it does where `ulimit -s` leaves it no room",
}
"""Senders of a signal of this name, as far as the system says."""


def of_death(death: Death) -> ExitStatus:
    """Exit status of a rank that left no word, by its status alone."""
    if death.was_killed:
        name = signal.Signals(-death.status).name
        hint = f" ({_KILLERS[name]})" if name in _KILLERS else ""
        reason = f"rank {death.rank} was killed by {name}{hint}"
        return ExitStatus(errors.LOST_PEER, reason, error=errors.RankDied.__name__)
    if death.status < 0:
        return ExitStatus(errors.PREEMPTED, _STOPPED_EARLY)
    known = (*errors.FINAL, errors.ENVIRONMENT, errors.PREEMPTED, errors.LOST_PEER)
    code = death.status if death.status in known else errors.BUG
    return ExitStatus(
        code,
        death.said
        or f"rank {death.rank} ended with exit code {death.status}; its log is logs/rank-{death.rank}.log",
    )


def _named(causes: Mapping[int, ExitStatus], ranks: int) -> ExitStatus:
    # A rank that hung names itself; those that waited for it only say that they lost somebody.
    rank, cause = min(
        causes.items(), key=lambda item: (not item[1].reason.startswith("rank "), item[0])
    )
    if ranks == 1 or len(causes) > 1 or cause.reason.startswith("rank "):
        return cause
    return replace(cause, reason=f"rank {rank}: {cause.reason}")


def _rank_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank-{rank}.exit.json"


def _write(run_dir: Path, path: Path, status: ExitStatus) -> None:
    write_atomic(
        path, scrub(json.dumps({**asdict(status), "time": now()}, indent=2) + "\n"), within=run_dir
    )


def _read(path: Path) -> ExitStatus | None:
    """Exit status in a file; None where there is none, or the file is damaged, which is told."""
    try:
        values = read_object(path)
        code, reason, step = (values[key] for key in ("code", "reason", "step"))
        error = values.get("error")
        if isinstance(code, int) and isinstance(reason, str) and isinstance(step, int | None):
            return ExitStatus(code, reason, step, error if isinstance(error, str) else None)
        warn(f"{path} is damaged: it says nothing of how the run ended")
    except FileNotFoundError:
        pass
    except (errors.EnvironmentFault, KeyError) as error:
        warn(f"{path} is damaged, so it says nothing of how the run ended: {error}")
    return None
