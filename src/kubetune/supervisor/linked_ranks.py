"""Run the ranks of this node with those of the other nodes, which are met first and watched meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kubetune import errors
from kubetune.base import cgroup, files
from kubetune.config.naming import RESOLVED
from kubetune.rundir import exit_status, heartbeat
from kubetune.rundir.exit_status import Death, ExitStatus
from kubetune.supervisor import over
from kubetune.supervisor.gang.link import Link, Over, Stopping, Waiting
from kubetune.supervisor.gang.peer_watch import PeerWatch, link_of
from kubetune.supervisor.node import Node
from kubetune.supervisor.place import Place
from kubetune.supervisor.rank_environment import RANKS, START_ID, environment
from kubetune.supervisor.ranks import (
    TORCHRUN_MARGIN_SECONDS,
    judge,
    prepare,
    run_alone,
    run_torchrun,
)

# After losing a peer on another node: time for that node's own report, which knows the cause, to
# arrive on a shared disk.
_PEER_REPORT_SECONDS = 2.0
_DEFAULT_PATIENCE_SECONDS = 1800.0


def run_node(node: Node) -> ExitStatus:
    """Run the ranks to their end, and return the verdict on it."""
    if node.place.nodes == 1:
        return run_alone(node)

    ranks = node.place.nodes * node.place.processes
    if over.last_step(node.run_dir) is None:
        try:
            return _run_with_others(node)
        except Over:
            if node.place.node:
                return ExitStatus(errors.OK, exit_status.DONE, over.last_step(node.run_dir))

    # The other nodes may have ended for good, so rank 0 alone does what is left: the report, and what follows it.
    print(
        "kubetune: all steps were done before; node 0 ends the run without the others", flush=True
    )
    alone = Place(nodes=1, processes=1)
    return run_alone(replace(node, place=alone), {RANKS: str(ranks)})


def _run_with_others(node: Node) -> ExitStatus:
    """Meet the other nodes and run the ranks of this one, as long as no other is lost.

    Raise Over if the run turns out to be over meanwhile.
    """
    began = time.time()
    kills = cgroup.oom_kills()
    deaths = prepare(node)
    if deaths:
        return judge(node, deaths, began, kills)

    verdict = partial(judge, node, began=began, kills=kills)
    status = ExitStatus(errors.BUG, "its agent failed")
    try:
        link = link_of(node.place, node.run_dir)
    except errors.EnvironmentFault as fault:
        return ExitStatus(fault.exit_code, str(fault))
    try:
        status = _run_linked(node, link, verdict)
    finally:
        link.leave(status)

    if status.code == errors.LOST_PEER:
        # The status of a rank on another node may arrive late on a shared disk.
        time.sleep(_PEER_REPORT_SECONDS)
        now = time.time()
        later = verdict([Death(rank, status.code, now, status.reason) for rank in node.place.ranks])
        if later.code != errors.LOST_PEER:
            return later
    return status


def _run_linked(node: Node, link: Link, verdict: Callable[[list[Death]], ExitStatus]) -> ExitStatus:
    """Meet the other nodes and run the ranks of this one while all stay connected. `verdict`: on deaths."""
    place = node.place
    # Pods of one run may start minutes apart, so the nodes wait as long for each other as ranks do.
    training = files.read_object(node.run_dir / RESOLVED).get("training", {})
    patience = training.get("timeout_seconds", _DEFAULT_PATIENCE_SECONDS)
    waiting = Waiting(
        patience, lambda: node.relay.stopping, lambda: over.last_step(node.run_dir) is not None
    )
    address = f"{place.master_addr}:{place.master_port}"
    print(
        f"kubetune: node {place.node} of {place.nodes} meets the others at {address}",
        flush=True,
    )
    try:
        start = link.meet(waiting)
    except Stopping:
        return verdict([])
    except errors.KubetuneError as error:
        return ExitStatus(error.exit_code, str(error))

    where = ["--node-rank", str(place.node), "--master-addr", place.master_addr]
    where += ["--master-port", str(start.port), "--rdzv-conf", f"timeout={math.ceil(patience)}"]
    environ = {**environment(place.processes), START_ID: start.id}
    watch = PeerWatch(
        link,
        is_busy=lambda: heartbeat.is_busy_alone(node.run_dir, place.ranks),
        kill=node.relay.kill,
        grace_seconds=node.relay.grace_seconds + TORCHRUN_MARGIN_SECONDS,
    )
    with watch:
        deaths = run_torchrun(node, where, environ)
    if watch.loss is None:
        return verdict(deaths)

    # torchrun's own end says nothing if this agent has killed it.
    if watch.has_killed:
        now = time.time()
        deaths = [Death(rank, errors.LOST_PEER, now, watch.loss.reason) for rank in place.ranks]
    status = verdict(deaths)
    if status.code == errors.LOST_PEER and errors.only_followed(status.code, status.error):
        status = replace(status, reason=watch.loss.reason)
    return status
