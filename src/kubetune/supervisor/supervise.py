"""The ranks of one node from their start to the verdict on how the run ended, and what comes after the last step.

torchrun, where there are several ranks, is a process below this one, which never imports torch.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import cgroup, fault_injection, files, logs, processes, reminders
from kubetune.base.humanize import shell_word
from kubetune.base.signals import Relay
from kubetune.config.naming import RESOLVED, STARTED
from kubetune.errors import only_followed
from kubetune.rundir import checkpoints, events, exit_status, heartbeat, metrics
from kubetune.rundir.exit_status import Death, ExitStatus
from kubetune.rundir.mirror import copier
from kubetune.supervisor import gang, oom, over, start_signs
from kubetune.supervisor.observers import observer_process
from kubetune.supervisor.place import Place, read_place, read_plan
from kubetune.supervisor.rank_environment import ONLY_RANK, RANKS, START_ID, environment

PREPARE = "kubetune.data.findings.prepare_worker"
WORKER = "kubetune.worker"
BENCHMARKS = "kubetune.result.inference.benchmarks"
BEFORE_AFTER = "kubetune.result.inference.before_after"

# After losing a peer on another node: time for that node's own report, which knows the cause, to
# arrive on a shared disk.
_PEER_REPORT_SECONDS = 2.0
_TORCHRUN_MARGIN_SECONDS = 10.0
_DEFAULT_PATIENCE_SECONDS = 1800.0
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def supervise(run_dir: Path, relay: Relay, *, prepare: str = PREPARE, worker: str = WORKER) -> int:
    """Run the ranks of this node in a run directory that the caller holds, and return the exit code.

    `prepare` and `worker` are modules that take the directory as argument: `prepare` runs before any
    rank starts, `worker` is each rank. Write events, and exit.json on node 0. Raise EnvironmentFault
    if the directory cannot be written to.
    """
    place = read_place(run_dir)
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
    with (
        _mirrored(run_dir, place, relay),
        observer_process.observed(run_dir, place.node, begun, relay),
    ):
        with start_signs.shown(run_dir):
            status = _run(run_dir, place, relay, prepare, worker)
        return _end(run_dir, place, relay, status)


def _mirrored(run_dir: Path, place: Place, relay: Relay) -> AbstractContextManager[None]:
    """Copy the run directory, while the block runs, to the object store that the config names, if any."""
    address = files.read_object(run_dir / RESOLVED).get("mirror")
    if address and place.node == 0:
        return copier.following(run_dir, address, relay)
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


def _end(run_dir: Path, place: Place, relay: Relay, status: ExitStatus) -> int:
    """Write down how the ranks ended, do what follows a good end, and return the exit code of the run."""
    fault_injection.reach("node.ended")
    if status.code == errors.OK and place.node == 0:
        status = _benchmarked(run_dir, relay, status)

    # A run that was stopped before a rank wrote its step is at its newest checkpoint.
    if status.code == errors.PREEMPTED and status.step is None:
        newest = checkpoints.newest_step(run_dir)
        status = replace(status, step=newest)

    # A full disk must not hide the exit code it caused.
    with suppress(errors.EnvironmentFault):
        if place.node == 0:
            exit_status.write_exit_status(run_dir, status)
        metrics.record_event(run_dir, "exit", node=place.node, **asdict(status))
    fault_injection.reach("node.noted")

    # In a pod, Kubernetes keeps this message when the pod is gone.
    progress = None
    if place.node == 0:
        progress = _progress(run_dir)
    exit_status.leave_message(status, progress)

    if status.code != errors.OK:
        _print_end(run_dir, status)
    elif place.node == 0 and status.error is None:  # a run that only paused has no result yet
        _ask_before_after(run_dir, relay)
        _push(run_dir, relay)
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


def _ask_before_after(run_dir: Path, relay: Relay) -> None:
    """Have prompts answered before and after training, if the config has some.

    That is a process of its own, which begins when the ranks have freed their memory.
    """
    from kubetune.config.load import read_config

    if relay.stopping or not read_config(run_dir).logging.before_after:
        return
    command = processes.module(BEFORE_AFTER, run_dir)
    environ = {**os.environ, **_as_started(run_dir)}
    if relay.run(command, environ) != errors.OK:
        again = f"python -m {BEFORE_AFTER} {run_dir}"
        print(
            f"kubetune: no answers before and after; the run is done all the same. Again: {again}",
            file=sys.stderr,
        )


def _benchmarked(run_dir: Path, relay: Relay, status: ExitStatus) -> ExitStatus:
    """Run the benchmarks that the config names, and return how the run ends then.

    A run without its benchmarks ends as well, unless its gate waits for one of them.
    """
    evaluation = files.read_object(run_dir / RESOLVED).get("evaluation", {})
    if not evaluation.get("benchmarks"):
        return status

    code = errors.PREEMPTED
    if not relay.stopping:
        environ = _with_network() | _as_started(run_dir)
        code = relay.run(processes.module(BENCHMARKS, run_dir), environ)
    if code == errors.OK:
        return status

    # Their process has judged the gate anew, with what it measured. No gate, or one that holds without them: all is well.
    gate = metrics.read_verdict(run_dir).get("gate") or {"passed": True}
    if code != errors.GATE and gate["passed"]:
        again = f"python -m {BENCHMARKS} {run_dir}"
        print(
            f"kubetune: no benchmarks; the run is done all the same. Again: {again}",
            file=sys.stderr,
        )
        return status

    # What the run ends with, else: the next start may still pass the gate, or it failed, or nobody knows.
    failed_checks = [check["message"] for check in gate.get("checks", ()) if not check["holds"]]
    missed = "; ".join(failed_checks)
    if relay.stopping:
        reason = f"stopped before the benchmarks were done: {missed}"
        return replace(status, code=errors.PREEMPTED, reason=reason)
    if code == errors.GATE:
        reason = f"the gate failed: {missed}. The checkpoint is saved"
        return replace(status, code=code, reason=reason, error="GateFailed")

    cause = None
    for event in metrics.read_events(run_dir):
        if event["event"] == "benchmarks":
            cause = event.get("reason")
    if code not in (errors.USER, errors.ENVIRONMENT):
        code = errors.ENVIRONMENT
    reason = f"no benchmarks for the gate: {cause or 'their process died'}"
    return replace(status, code=code, reason=reason)


def _with_network() -> dict[str, str]:
    """Return the environment without what keeps a run offline: pods train from fetched files."""
    return {name: value for name, value in os.environ.items() if name not in _OFFLINE}


def _as_started(run_dir: Path) -> dict[str, str]:
    """Return the variable by which a process knows that the user has started this run and its code."""
    return {STARTED: os.path.realpath(run_dir)}


def _push(run_dir: Path, relay: Relay) -> None:
    """Push the result, if the config says so. The run is done even if that fails.

    That is a process of its own, which begins when the ranks have freed their memory.
    """
    if relay.stopping or not files.read_object(run_dir / RESOLVED).get("push"):
        return
    command = processes.module("kubetune", "push", run_dir)
    if relay.run(command, _with_network() | _as_started(run_dir)) != errors.OK:
        print(
            f"kubetune: not pushed; the run is done all the same. Again: kubetune push {shell_word(run_dir)}",
            file=sys.stderr,
        )


def _run(run_dir: Path, place: Place, relay: Relay, prepare: str, worker: str) -> ExitStatus:
    """Run the ranks to their end, and return the verdict on it."""
    if place.nodes == 1:
        return _run_alone(run_dir, place, relay, prepare, worker)

    ranks = place.nodes * place.processes
    if over.last_step(run_dir) is None:
        try:
            return _run_with_others(run_dir, place, relay, prepare, worker)
        except gang.Over:
            if place.node:
                return ExitStatus(errors.OK, exit_status.DONE, over.last_step(run_dir))

    # The other nodes may have ended for good, so rank 0 alone does what is left: the report, and what follows it.
    print(
        "kubetune: all steps were done before; node 0 ends the run without the others", flush=True
    )
    alone = Place(nodes=1, processes=1)
    return _run_alone(run_dir, alone, relay, prepare, worker, {RANKS: str(ranks)})


def _run_alone(
    run_dir: Path,
    place: Place,
    relay: Relay,
    prepare: str,
    worker: str,
    variables: Mapping[str, str] | None = None,
) -> ExitStatus:
    """Run the ranks of the only node. `variables`: more than those of every rank."""
    began = time.time()
    kills = cgroup.oom_kills()
    environ = {**environment(place.processes), **(variables or {})}
    # A single rank needs no torchrun, whose import takes seconds. It prepares the data itself.
    if place.processes == 1:
        code = relay.run(processes.module(worker, run_dir), environ | ONLY_RANK)
        deaths = [Death(0, code, time.time())] if code else []
    else:
        deaths = _prepare(run_dir, place, relay, prepare)
        if not deaths:
            # The host's name, torchrun's default, need not resolve.
            where = ["--standalone", "--local-addr", "127.0.0.1"]
            deaths = _run_torchrun(run_dir, place, relay, worker, where, environ)
    return _judge(run_dir, place, relay, deaths, began, kills)


def _run_with_others(
    run_dir: Path, place: Place, relay: Relay, prepare: str, worker: str
) -> ExitStatus:
    """Meet the other nodes and run the ranks of this one, as long as no other is lost.

    Raise gang.Over if the run turns out to be over meanwhile.
    """
    began = time.time()
    kills = cgroup.oom_kills()
    deaths = _prepare(run_dir, place, relay, prepare)
    if deaths:
        return _judge(run_dir, place, relay, deaths, began, kills)

    judge = partial(_judge, run_dir, place, relay, began=began, kills=kills)
    status = ExitStatus(errors.BUG, "its agent failed")
    try:
        link = gang.link_of(place, run_dir)
    except errors.EnvironmentFault as fault:
        return ExitStatus(fault.exit_code, str(fault))
    try:
        status = _run_linked(run_dir, place, relay, worker, link, judge)
    finally:
        link.leave(status)

    if status.code == errors.LOST_PEER:
        # The status of a rank on another node may arrive late on a shared disk.
        time.sleep(_PEER_REPORT_SECONDS)
        now = time.time()
        later = judge([Death(rank, status.code, now, status.reason) for rank in place.ranks])
        if later.code != errors.LOST_PEER:
            return later
    return status


def _run_linked(
    run_dir: Path,
    place: Place,
    relay: Relay,
    worker: str,
    link: gang.Link,
    judge: Callable[[list[Death]], ExitStatus],
) -> ExitStatus:
    """Meet the other nodes and run the ranks of this one while all stay connected. Return the verdict of `judge`."""
    # Pods of one run may start minutes apart, so the nodes wait as long for each other as ranks do.
    training = files.read_object(run_dir / RESOLVED).get("training", {})
    patience = training.get("timeout_seconds", _DEFAULT_PATIENCE_SECONDS)
    waiting = gang.Waiting(
        patience, lambda: relay.stopping, lambda: over.last_step(run_dir) is not None
    )
    address = f"{place.master_addr}:{place.master_port}"
    print(f"kubetune: node {place.node} of {place.nodes} meets the others at {address}", flush=True)
    try:
        start = link.meet(waiting)
    except gang.Stopping:
        return judge([])
    except errors.KubetuneError as error:
        return ExitStatus(error.exit_code, str(error))

    where = ["--node-rank", str(place.node), "--master-addr", place.master_addr]
    where += ["--master-port", str(start.port), "--rdzv-conf", f"timeout={math.ceil(patience)}"]
    environ = {**environment(place.processes), START_ID: start.id}
    watch = gang.Watch(
        link,
        is_busy=lambda: heartbeat.is_busy_alone(run_dir, place.ranks),
        kill=relay.kill,
        grace_seconds=relay.grace_seconds + _TORCHRUN_MARGIN_SECONDS,
    )
    with watch:
        deaths = _run_torchrun(run_dir, place, relay, worker, where, environ)
    if watch.loss is None:
        return judge(deaths)

    # torchrun's own end says nothing if this agent has killed it.
    if watch.has_killed:
        now = time.time()
        deaths = [Death(rank, errors.LOST_PEER, now, watch.loss.reason) for rank in place.ranks]
    status = judge(deaths)
    if status.code == errors.LOST_PEER and only_followed(status.code, status.error):
        status = replace(status, reason=watch.loss.reason)
    return status


def _judge(
    run_dir: Path,
    place: Place,
    relay: Relay,
    deaths: list[Death],
    began: float,
    kills: int | None,
) -> ExitStatus:
    """Return the verdict on the end of the ranks. `kills`: `cgroup.oom_kills()` before they started, at `began`."""
    frozen = heartbeat.find_frozen(run_dir, deaths, began)
    statuses = exit_status.read_rank_exit_statuses(run_dir)
    status = exit_status.judge(
        place.ranks,
        statuses,
        deaths,
        stopping=relay.stopping,
        frozen=frozen,
    )
    if status.code != errors.OK and not (run_dir / RESOLVED).exists():
        return ExitStatus(
            errors.ENVIRONMENT, f"{run_dir} was deleted or moved away while the run went on"
        )
    return oom.explain(run_dir, place.node, status, deaths, kills)


def _prepare(run_dir: Path, place: Place, relay: Relay, prepare: str) -> list[Death]:
    """Prepare the data. Return the death of the process that did, if it failed."""

    def remind(taken: str) -> None:
        print("kubetune:", reminders.OF_PREPARING % taken, flush=True)

    # Data are prepared before any rank exists: ranks that wait for another's data in a collective would
    # time out.
    with reminders.reminding(remind, reminders.PATIENT_SECONDS):
        environ = {**os.environ, "RANK": str(place.ranks[0])}
        code = relay.run(processes.module(prepare, run_dir), environ)
    if code:
        return [Death(place.ranks[0], code, time.time())]
    return []


def _run_torchrun(
    run_dir: Path,
    place: Place,
    relay: Relay,
    worker: str,
    where: list[str],
    environ: Mapping[str, str],
) -> list[Death]:
    """Run the ranks below torchrun, and return the deaths of those that failed. `where`: its arguments for the store."""
    # torchrun says through a pipe who died, so that a run ends with its reason even on a full disk.
    reading, writing = os.pipe()
    command = processes.module("kubetune.distributed.torchrun", writing, int(relay.grace_seconds))
    command += where
    command += ["--nnodes", str(place.nodes), "--nproc-per-node", str(place.processes)]
    command += ["--max-restarts", "0", "--module", worker, str(run_dir)]

    # torchrun kills what outlives the grace time. The relay's limit is for a torchrun that itself hangs.
    relay.grace_seconds += _TORCHRUN_MARGIN_SECONDS

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
