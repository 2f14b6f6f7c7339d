"""Write down how the ranks of this node ended, and do what follows a good end."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import fault_injection, logs
from kubetune.rundir import checkpoints, exit_status, metrics
from kubetune.rundir.exit_status import ExitStatus
from kubetune.supervisor.after_training import ask_before_after, benchmarked, push
from kubetune.supervisor.node import Node


def end(node: Node, status: ExitStatus) -> int:
    """Write down how the ranks ended, do what follows a good end, and return the exit code of the run."""
    fault_injection.reach("node.ended")
    if status.code == errors.OK and node.place.node == 0:
        status = benchmarked(node.run_dir, node.relay, status)

    # A run that was stopped before a rank wrote its step is at its newest checkpoint.
    if status.code == errors.PREEMPTED and status.step is None:
        newest = checkpoints.newest_step(node.run_dir)
        status = replace(status, step=newest)

    # A full disk must not hide the exit code it caused.
    with suppress(errors.EnvironmentFault):
        if node.place.node == 0:
            exit_status.write_exit_status(node.run_dir, status)
        metrics.record_event(node.run_dir, "exit", node=node.place.node, **asdict(status))
    fault_injection.reach("node.noted")

    # In a pod, Kubernetes keeps this message when the pod is gone. Each node says how far the run is, as the host of
    # any may be lost.
    exit_status.leave_message(status, _progress(node.run_dir))

    if status.code != errors.OK:
        _print_end(node.run_dir, status)
    elif node.place.node == 0 and status.error is None:  # a run that only paused has no result yet
        ask_before_after(node.run_dir, node.relay)
        push(node.run_dir, node.relay)
    return status.code


def _print_end(run_dir: Path, status: ExitStatus) -> None:
    line = f"ended with exit code {status.code}, logs in {run_dir / 'logs'}"
    # A rank has logged its own reason already; only what was seen from outside is new.
    ranks = exit_status.read_rank_exit_statuses(run_dir).values()
    if not any(status.reason.endswith(rank.reason) for rank in ranks):
        line = f"{status.reason}; {line}"
    print(logs.scrub(f"kubetune: {line}"), file=sys.stderr)


def _progress(run_dir: Path) -> dict[str, Any] | None:
    """Return how far the run is, for Kubernetes to keep; None where its files are damaged."""
    from kubetune.rundir.status import progress

    try:
        facts = progress(run_dir)
    except (errors.KubetuneError, OSError, ValueError, KeyError):
        return None  # whoever reads the files names the damage
    return {key: fact for key, fact in facts.items() if key not in ("exit_status", "last_exit")}
