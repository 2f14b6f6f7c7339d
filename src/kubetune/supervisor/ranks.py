"""Run the ranks of this node: their data prepared first, one rank by itself, several below torchrun; and judge their end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping

from kubetune import errors
from kubetune.base import cgroup, processes, reminders
from kubetune.config.naming import RESOLVED
from kubetune.rundir import exit_status, heartbeat
from kubetune.rundir.exit_status import Death, ExitStatus
from kubetune.supervisor import oom, over
from kubetune.supervisor.node import Node
from kubetune.supervisor.rank_environment import ONLY_RANK, environment

# torchrun kills what outlives the grace time. The relay's limit is for a torchrun that itself hangs.
TORCHRUN_MARGIN_SECONDS = 10.0


def run_alone(node: Node, variables: Mapping[str, str] | None = None) -> ExitStatus:
    """Run the ranks of the only node. `variables`: more than those of every rank."""
    began = time.time()
    kills = cgroup.oom_kills()
    environ = {**environment(node.place.processes), **(variables or {})}
    # A single rank needs no torchrun, whose import takes seconds. It prepares the data itself.
    if node.place.processes == 1:
        code = node.relay.run(processes.module(node.worker, node.run_dir), environ | ONLY_RANK)
        deaths = [Death(0, code, time.time())] if code else []
    else:
        deaths = prepare(node)
        if not deaths:
            # The host's name, torchrun's default, need not resolve.
            where = ["--standalone", "--local-addr", "127.0.0.1"]
            deaths = run_torchrun(node, where, environ)
    return judge(node, deaths, began, kills)


def prepare(node: Node) -> list[Death]:
    """Prepare the data. Return the death of the process that did, if it failed."""

    def remind(taken: str) -> None:
        print("kubetune:", reminders.OF_PREPARING % taken, flush=True)

    # Data are prepared before any rank exists: ranks that wait for another's data in a collective would
    # time out.
    with reminders.reminding(remind, reminders.PATIENT_SECONDS):
        environ = {**os.environ, "RANK": str(node.place.ranks[0])}
        code = node.relay.run(processes.module(node.prepare, node.run_dir), environ)
    if code:
        return [Death(node.place.ranks[0], code, time.time())]
    return []


def run_torchrun(node: Node, where: list[str], environ: Mapping[str, str]) -> list[Death]:
    """Run the ranks below torchrun, and return the deaths of those that failed. `where`: its arguments for the store."""
    place = node.place
    relay = node.relay
    # torchrun says through a pipe who died, so that a run ends with its reason even on a full disk.
    reading, writing = os.pipe()
    command = processes.module("kubetune.distributed.torchrun", writing, int(relay.grace_seconds))
    command += where
    command += ["--nnodes", str(place.nodes), "--nproc-per-node", str(place.processes)]
    command += ["--max-restarts", "0", "--module", node.worker, str(node.run_dir)]

    relay.grace_seconds += TORCHRUN_MARGIN_SECONDS

    with open(reading) as pipe:
        try:
            status = relay.run(
                command,
                environ,
                has_workers_below=True,
                pass_fds=[writing],
            )
        finally:
            # The pipe ends only when this end of it is closed too.
            os.close(writing)
        # Either the facts of each death, or one line: the reason why no rank was started.
        messages = [json.loads(line) for line in pipe]

    if messages and not isinstance(messages[0], str):
        return [Death(*facts) for facts in messages]
    if status == 0:
        return []
    return [Death(rank, status, time.time(), *messages) for rank in place.ranks]


def judge(node: Node, deaths: list[Death], began: float, kills: int | None) -> ExitStatus:
    """Return the verdict on the end of the ranks. `kills`: `cgroup.oom_kills()` before they started, at `began`."""
    if node.place.node and not deaths:
        # What these ranks wrote may be gone: node 0, started again for the report alone, clears it for all.
        step = over.last_step(node.run_dir)
        if step is not None:
            return ExitStatus(errors.OK, exit_status.DONE, step)

    frozen = heartbeat.find_frozen(node.run_dir, deaths, began)
    statuses = exit_status.read_rank_exit_statuses(node.run_dir)
    status = exit_status.judge(
        node.place.ranks,
        statuses,
        deaths,
        stopping=node.relay.stopping,
        frozen=frozen,
    )
    if status.code != errors.OK and not (node.run_dir / RESOLVED).exists():
        return ExitStatus(
            errors.ENVIRONMENT, f"{node.run_dir} was deleted or moved away while the run went on"
        )
    return oom.explain(node.run_dir, node.place.node, status, deaths, kills)
