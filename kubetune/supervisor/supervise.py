"""The ranks of one node from their start to the verdict on how the run ended, and what comes after the last step.

torchrun, where there are several ranks, is a process below this one, which never imports torch."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import cgroup, files, logs, processes, reminders
from kubetune.base.humanize import shell_word
from kubetune.base.signals import Relay
from kubetune.config.naming import RESOLVED, STARTED
from kubetune.rundir import checkpoints, events, exit_status, heartbeat, metrics
from kubetune.rundir.exit_status import Death, ExitStatus
from kubetune.rundir.mirror import copier
from kubetune.supervisor import oom
from kubetune.supervisor.observers import beside
from kubetune.supervisor.place import Place, read_place, read_plan
from kubetune.supervisor.rank_environment import ONLY_RANK, environment

PREPARE = "kubetune.data.prepared.prepare_worker"
WORKER = "kubetune.worker"
BENCHMARKS = "kubetune.result.inference.benchmarks"
BEFORE_AFTER = "kubetune.result.inference.before_after"

# After losing a peer on another node: time for that node's own, telling report to arrive on a shared disk.
_PEER_REPORT_SECONDS = 2.0
_TORCHRUN_MARGIN_SECONDS = 10.0
_DEFAULT_PATIENCE_SECONDS = 1800.0
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def supervise(run_dir: Path, relay: Relay, *, prepare: str = PREPARE, worker: str = WORKER) -> int:
    """Run the ranks of this node in a run directory that the caller holds; returns the exit code.

    `prepare` and `worker` are modules that take the directory as argument: before any rank starts, and as each rank.
    Writes exit.json (on node 0), and events. Raises EnvironmentFault when the directory cannot be written to.
    """
    place = read_place(run_dir)
    relay.grace_seconds = read_plan(run_dir).grace_seconds
    exit_status.clear_exit_statuses(run_dir, None if place.node == 0 else place.ranks)
    facts: dict[str, int | str] = {
        "node": place.node,
        "nodes": place.nodes,
        "processes": place.processes,
    }
    # Left behind where a start was cut off without a word: until then devices were held, and paid for.
    if beats := [float(beat["time"]) for beat in heartbeat.read_beats(run_dir)]:
        facts["last_seen"] = metrics.written(datetime.fromtimestamp(max(beats), UTC))
    begun = events.size(run_dir)
    metrics.record_event(run_dir, "launch", **facts)
    with _mirrored(run_dir, place, relay), beside.observed(run_dir, place.node, begun, relay):
        return _run_and_tell(run_dir, place, relay, prepare, worker)


def _mirrored(run_dir: Path, place: Place, relay: Relay) -> AbstractContextManager[None]:
    """Within, the run directory is copied to the object store that the config names, if it names one."""
    address = files.read_object(run_dir / RESOLVED).get("mirror")
    return (
        copier.following(run_dir, address, relay) if address and place.node == 0 else nullcontext()
    )


def _run_and_tell(run_dir: Path, place: Place, relay: Relay, prepare: str, worker: str) -> int:
    status = _run(run_dir, place, relay, prepare, worker)
    if status.code == errors.OK and place.node == 0:
        status = _benchmarked(run_dir, relay, status)
    if status.code == errors.PREEMPTED and status.step is None:  # no rank had come so far as to say
        status = replace(status, step=checkpoints.newest_step(run_dir))
    # A full disk must not hide the exit code it caused.
    with suppress(errors.EnvironmentFault):
        if place.node == 0:
            exit_status.write_exit_status(run_dir, status)
        metrics.record_event(run_dir, "exit", node=place.node, **asdict(status))
    exit_status.leave_message(status, _progress(run_dir) if place.node == 0 else None)
    if status.code != errors.OK:
        # What a rank says it has also logged; only what was seen from outside is news.
        ranks = exit_status.read_rank_exit_statuses(run_dir).values()
        is_told = any(status.reason.endswith(rank.reason) for rank in ranks)
        told = "" if is_told else f"{status.reason}; "
        line = f"kubetune: {told}ended with exit code {status.code}, logs in {run_dir / 'logs'}"
        print(logs.scrub(line), file=sys.stderr)
    elif place.node == 0 and status.error is None:  # a run that only paused has no result yet
        _ask_before_after(run_dir, relay)
        _push(run_dir, relay)
    return status.code


def _progress(run_dir: Path) -> dict[str, Any] | None:
    """Progress of the run, for when nobody can be asked any more."""
    from kubetune.rundir.status import progress

    try:
        return {
            key: told
            for key, told in progress(run_dir).items()
            if key not in ("exit_status", "last_exit")
        }
    except (errors.KubetuneError, OSError, ValueError, KeyError):
        return None  # damaged files are told of by whoever reads them


def _ask_before_after(run_dir: Path, relay: Relay) -> None:
    """Answers before and after training, where the config asks for some; when the ranks' memory is free again."""
    from kubetune.config.load import read_config

    if relay.stopping or not read_config(run_dir).logging.before_after:
        return
    environ = {**os.environ, **_as_started(run_dir)}
    if relay.run(processes.module(BEFORE_AFTER, run_dir), environ) != errors.OK:
        again = f"python -m {BEFORE_AFTER} {run_dir}"
        print(
            f"kubetune: no answers before and after; the run is done all the same. Again: {again}",
            file=sys.stderr,
        )


def _benchmarked(run_dir: Path, relay: Relay, status: ExitStatus) -> ExitStatus:
    """The end of a run after the benchmarks that its config asks for; without them it is as good, but for its gate."""
    if not files.read_object(run_dir / RESOLVED).get("evaluation", {}).get("benchmarks"):
        return status
    code = errors.PREEMPTED
    if not relay.stopping:
        environ = _with_network() | _as_started(run_dir)
        code = relay.run(processes.module(BENCHMARKS, run_dir), environ)
    if code == errors.OK:
        return status
    gate = metrics.read_verdict(run_dir).get("gate") or {"passed": True}
    if code != errors.GATE and gate["passed"]:
        again = f"python -m {BENCHMARKS} {run_dir}"
        print(
            f"kubetune: no benchmarks; the run is done all the same. Again: {again}",
            file=sys.stderr,
        )
        return status
    missed = "; ".join(check["said"] for check in gate.get("checks", ()) if not check["holds"])
    if relay.stopping:
        return replace(
            status,
            code=errors.PREEMPTED,
            reason=f"stopped before the benchmarks were done: {missed}",
        )
    if code == errors.GATE:
        return replace(
            status,
            code=code,
            reason=f"the gate failed: {missed}. The checkpoint is saved",
            error="GateFailed",
        )
    told = [event for event in metrics.read_events(run_dir) if event["event"] == "benchmarks"]
    reason = told[-1].get("reason") if told else None
    code = code if code in (errors.USER, errors.ENVIRONMENT) else errors.ENVIRONMENT
    return replace(
        status, code=code, reason=f"no benchmarks for the gate: {reason or 'their process died'}"
    )


def _with_network() -> dict[str, str]:
    """The environment without what keeps a run offline: pods train from what was fetched before."""
    return {name: value for name, value in os.environ.items() if name not in _OFFLINE}


def _as_started(run_dir: Path) -> dict[str, str]:
    """The variable that tells a process that the user has started this run, so that its code is no stranger's."""
    return {STARTED: os.path.realpath(run_dir)}


def _push(run_dir: Path, relay: Relay) -> None:
    """The last stage of a run that ended well, where its config asks for it; a failure leaves the run as good.

    A process of its own, when the ranks have gone and their memory with them.
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
    deaths: list[Death] = []
    began, kills = time.time(), cgroup.oom_kills()
    if place.nodes * place.processes > 1:
        # Before any rank exists, because a rank that waits for the data of another in a collective would time out.
        with reminders.reminding(
            lambda taken: print("kubetune:", reminders.OF_PREPARING % taken, flush=True),
            reminders.PATIENT_SECONDS,
        ):
            code = relay.run(
                processes.module(prepare, run_dir), {**os.environ, "RANK": str(place.ranks[0])}
            )
        if code == 0:
            deaths = _run_torchrun(run_dir, place, relay, worker)
        else:
            deaths = [Death(place.ranks[0], code, time.time())]
    elif code := relay.run(processes.module(worker, run_dir), environment() | ONLY_RANK):
        deaths = [Death(0, code, time.time())]
    frozen = heartbeat.find_frozen(run_dir, deaths, began)

    def judge() -> ExitStatus:
        said = exit_status.read_rank_exit_statuses(run_dir)
        return exit_status.judge(place.ranks, said, deaths, stopping=relay.stopping, frozen=frozen)

    status = judge()
    if status.code != errors.OK and not (run_dir / RESOLVED).exists():
        return ExitStatus(
            errors.ENVIRONMENT, f"{run_dir} was deleted or moved away while the run went on"
        )
    status = oom.explain(run_dir, place.node, status, deaths, kills)
    if status.code == errors.LOST_PEER and place.nodes > 1:
        time.sleep(_PEER_REPORT_SECONDS)
        if (heard := judge()).code != errors.LOST_PEER:
            return heard
    return status


def _run_torchrun(run_dir: Path, place: Place, relay: Relay, worker: str) -> list[Death]:
    if place.nodes == 1:
        # An address of its own: the host's name, torchrun's default, need not resolve.
        rendezvous = ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        rendezvous = ["--node-rank", str(place.node), "--master-addr", place.master_addr]
        rendezvous += ["--master-port", str(place.master_port)]
        patience = (
            files.read_object(run_dir / RESOLVED)
            .get("training", {})
            .get("timeout_seconds", _DEFAULT_PATIENCE_SECONDS)
        )
        rendezvous += ["--rdzv-conf", f"timeout={math.ceil(patience)}"]
        where = f"{place.master_addr}:{place.master_port}"
        print(
            f"kubetune: node {place.node} of {place.nodes} meets the others at {where}", flush=True
        )
    # A pipe: a run must be able to end with its own reason where nothing can be written any more.
    reading, writing = os.pipe()
    command = processes.module(
        "kubetune.distributed.torchrun", writing, int(relay.grace_seconds), *rendezvous
    )
    command += [
        "--nnodes",
        str(place.nodes),
        "--nproc-per-node",
        str(place.processes),
        "--max-restarts",
        "0",
    ]
    command += ["--module", worker, str(run_dir)]
    # torchrun kills what outlives the grace time; the relay's own limit is for a torchrun that hangs itself.
    relay.grace_seconds += _TORCHRUN_MARGIN_SECONDS
    with open(reading) as told:
        try:
            status = relay.run(
                command, environment(place.processes), has_workers_below=True, pass_fds=[writing]
            )
        finally:
            os.close(writing)
        facts = [json.loads(line) for line in told]
    if facts and not isinstance(facts[0], str):
        return [Death(*fact) for fact in facts]
    return [Death(rank, status, time.time(), *facts) for rank in place.ranks if status != 0]
