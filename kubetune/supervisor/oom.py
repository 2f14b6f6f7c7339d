"""Ranks killed for memory: told from other kills, and ended for good where another start could only end the same way.

A killed rank is worth another start as long as the run gets farther by it. Not for what a rank itself can say of its
memory (base/files, training/loop): the kernel kills without a word.
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

KILLED = "killed"
"""The event of a start that ended so: node, rank, and the last step in metrics.jsonl then."""

_ADVICE = (
    "Allow more memory (compute.memory, or the limit of the container or service) or take fewer compute.processes, and "
    "run the same command again; a smaller training.per_device_train_batch_size, data.max_length or "
    "training.gradient_checkpointing: true need less too, but make it another run, with another output"
)


def explain(
    run_dir: Path, node: int, status: ExitStatus, deaths: Sequence[Death], kills_before: int | None
) -> ExitStatus:
    """`status`, unless a SIGKILL is its cause: then what is known of why, final when it came to nothing twice.

    `kills_before`: `cgroup.oom_kills()` before the ranks of this node started.
    """
    death = next(
        (d for d in deaths if d.status == -signal.SIGKILL and exit_status.of_death(d) == status),
        None,
    )
    if death is None:
        return status
    kills = cgroup.oom_kills()
    known = kills is not None and kills_before is not None
    if known and kills == kills_before:
        said = "not for memory, as the kernel counts no such kill here: somebody's kill -9, or `ulimit -t`"
        return replace(status, reason=f"rank {death.rank} was killed by SIGKILL ({said})")
    step, before = _newest_step(run_dir), _killed_before(run_dir, node)
    with suppress(errors.EnvironmentFault):  # a full disk must not hide the cause
        metrics.record_event(run_dir, KILLED, node=node, rank=death.rank, step=step)
    cause = "for want of memory" if known else "for want of memory, or by somebody's kill -9"
    where = f"after step {step}" if step else "before the first step was done"
    reason = f"rank {death.rank} was killed by SIGKILL {cause}, {where}; {_limit(known)}"
    if before is None or step > before:
        return ExitStatus(errors.LOST_PEER, reason, step, errors.RankDied.__name__)
    again = "The start before ended so too, and this one came no farther, so no other is tried by itself"
    final = f"{reason}. {again}. {_ADVICE}"
    found = ExitStatus(errors.OUT_OF_MEMORY, final, step, errors.OutOfMemoryAgain.__name__)
    with suppress(errors.EnvironmentFault):  # other nodes only know that they lost somebody
        told = replace(found, reason=f"{final} (seen by the agent of node {node})")
        exit_status.write_rank_exit_status(run_dir, death.rank, told)
    return found


def _limit(known: bool) -> str:
    limit = cgroup.memory_limit()
    if limit is None or limit > 1 << 60:  # version 1 has a number for none
        return f"no memory limit is set here, so {'' if known else 'in the first case '}the machine itself ran out"
    return f"the memory limit is {limit:,} bytes for all ranks of this node"


def _newest_step(run_dir: Path) -> int:
    return max(
        (int(line["step"]) for line in metrics.last_lines(run_dir / metrics.METRICS)), default=0
    )


def _killed_before(run_dir: Path, node: int) -> int | None:
    """Step of the run when the start before this one was killed on this node; None where it ended otherwise."""
    launches, step = 0, None
    for event in reversed(metrics.read_events(run_dir)):
        if event.get("node") != node:
            continue
        launches += event["event"] == "launch"
        if launches == 2:
            break
        if launches == 1 and event["event"] == KILLED and isinstance(event.get("step"), int):
            step = event["step"]
    return step
