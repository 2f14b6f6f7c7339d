"""The ranks of one node from their start to the verdict on how the run ended, and what comes after the last step.

torchrun, where there are several ranks, is a process below this one, which never imports torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from kubetune import errors
from kubetune.base import files
from kubetune.base.signals import Relay
from kubetune.config.naming import RESOLVED
from kubetune.rundir import events, exit_status, heartbeat, metrics
from kubetune.rundir.exit_status import ExitStatus
from kubetune.rundir.mirror import copier
from kubetune.supervisor import over, start_signs
from kubetune.supervisor.linked_ranks import run_node
from kubetune.supervisor.node import Node
from kubetune.supervisor.node_end import end
from kubetune.supervisor.observers import observer_process
from kubetune.supervisor.place import Place, read_plan

PREPARE = "kubetune.data.findings.prepare_worker"
WORKER = "kubetune.worker"


def supervise(
    run_dir: Path, place: Place, relay: Relay, *, prepare: str = PREPARE, worker: str = WORKER
) -> int:
    """Run the ranks of this node in a run directory that the caller holds, and return the exit code.

    `place`: this node's. `prepare` and `worker` are modules that take the directory as argument: `prepare` runs before any
    rank starts, `worker` is each rank. Write events, and exit.json on node 0. Raise EnvironmentFault
    if the directory cannot be written to.
    """
    relay.grace_seconds = read_plan(run_dir).grace_seconds
    if place.node and over.last_step(run_dir) is not None:
        return _end_without_start(run_dir, place)

    # Node 0 clears the statuses of all ranks, another node those of its own.
    ranks_to_clear = None
    if place.node != 0:
        ranks_to_clear = place.ranks
    exit_status.clear_exit_statuses(run_dir, ranks_to_clear)

    facts: dict[str, int | str] = {
        "node": place.node,
        "nodes": place.nodes,
        "processes": place.processes,
    }

    # Heartbeats are left behind where a start was cut off. Until the last of them it held its devices,
    # which cost money.
    beats = [float(beat["time"]) for beat in heartbeat.read_beats(run_dir)]
    if beats:
        facts["last_seen"] = metrics.written(datetime.fromtimestamp(max(beats), UTC))

    # Observers read the events from here on, this start's launch first.
    begun = events.size(run_dir)
    metrics.record_event(run_dir, "launch", **facts)
    node = Node(run_dir, place, relay, prepare, worker)
    with _mirrored(node), observer_process.observed(run_dir, place.node, begun, relay):
        with start_signs.shown(run_dir, place):
            status = run_node(node)
        return end(node, status)


def _mirrored(node: Node) -> AbstractContextManager[None]:
    """Copy the run directory, while the block runs, to the object store that the config names, if any."""
    address = files.read_object(node.run_dir / RESOLVED).get("mirror")
    if address and node.place.node == 0:
        return copier.following(node.run_dir, address, node.relay)
    return nullcontext()


def _end_without_start(run_dir: Path, place: Place) -> int:
    """Say that the run is over, and that nothing is left to do for a node other than node 0. Return its exit code."""
    step = over.last_step(run_dir)
    print(
        f"kubetune: the run is over: all steps are done, and step {step} is saved. Node {place.node} has nothing to do",
        flush=True,
    )
    exit_status.leave_message(ExitStatus(errors.OK, exit_status.DONE, step))
    return errors.OK
