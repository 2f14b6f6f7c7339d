"""Ranks killed for memory: their exit status, which is final if another start could only end the same way.

Example: a start is killed after step 40, the next one after step 55: another start is worth it. If the next one is
killed after step 40 again, the run ends for good. Not for errors that a rank itself can report (base/faults,
training/loop): the kernel kills without a word.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kubetune import errors
from kubetune.base import cgroup
from kubetune.rundir import exit_status, metrics
from kubetune.rundir.exit_status import Death, ExitStatus

# The event of a rank killed for memory: its node, its rank, and the last step in metrics.jsonl then.
KILLED = "killed"

_ADVICE = "allow more memory (compute.memory, or the limit of the container), or take fewer compute.processes"


def explain(
    run_dir: Path, node: int, status: ExitStatus, deaths: Sequence[Death], kills_before: int | None
) -> ExitStatus:
    """Return `status`, or if a SIGKILL is its cause one that says why the kernel may have killed.

    It is final if two starts in turn were killed at the same step. `kills_before`:
    `cgroup.oom_kills()` before the ranks of this node started.
    """
    death = _cause(status, deaths)
    if death is None:
        return status
    kills = cgroup.oom_kills()
    known = kills is not None and kills_before is not None
    if known and kills == kills_before:
        cause = "not for memory, as the kernel counts no such kill here: somebody's kill -9, or `ulimit -t`"
        return replace(status, reason=f"rank {death.rank} was killed by SIGKILL ({cause})")
    step = _newest_step(run_dir)
    step_before = _killed_before(run_dir, node)
    with suppress(errors.EnvironmentFault):  # a full disk must not hide the cause
        metrics.record_event(run_dir, KILLED, node=node, rank=death.rank, step=step)
    cause = "for lack of memory" if known else "for lack of memory, or by somebody's kill -9"
    where = f"after step {step}" if step else "before the first step was done"
    reason = f"rank {death.rank} was killed by SIGKILL {cause}, {where}; {_limit(known)}"
    if step_before is None or step > step_before:
        return ExitStatus(errors.LOST_PEER, reason, step, errors.RankDied.__name__)
    final = f"{reason}. The start before ended so too, and this one got no further: {_ADVICE}"
    verdict = ExitStatus(errors.OUT_OF_MEMORY, final, step, errors.OutOfMemoryAgain.__name__)
    with suppress(errors.EnvironmentFault):
        # For the other nodes, which only know that they lost a peer.
        for_others = replace(verdict, reason=f"{final} (seen by the agent of node {node})")
        exit_status.write_rank_exit_status(run_dir, death.rank, for_others)
    return verdict


def _cause(status: ExitStatus, deaths: Sequence[Death]) -> Death | None:
    """Return the death by SIGKILL that `status` comes from."""
    for death in deaths:
        if death.status == -signal.SIGKILL and exit_status.of_death(death) == status:
            return death
    return None


def _limit(known: bool) -> str:
    limit = cgroup.memory_limit()
    if limit is None or limit > 1 << 60:  # cgroups of version 1 have a huge number for no limit
        case = "" if known else "in the first case "
        return f"no memory limit is set here, so {case}the machine itself ran out"
    return f"the memory limit is {limit:,} bytes for all ranks of this node"


def _newest_step(run_dir: Path) -> int:
    lines = metrics.last_lines(run_dir / metrics.METRICS)
    return max((int(line["step"]) for line in lines), default=0)


def _killed_before(run_dir: Path, node: int) -> int | None:
    """Return the step at which the start before this one was killed on this node; None if it was not."""
    # From the newest event back: first those of this start, up to its launch; then those of the start
    # before, up to its launch.
    launches = 0
    step = None
    for event in reversed(metrics.read_events(run_dir)):
        if event.get("node") != node:
            continue
        if event["event"] == "launch":
            launches += 1
            if launches == 2:
                break
        elif launches == 1 and event["event"] == KILLED and isinstance(event.get("step"), int):
            step = event["step"]
    return step
