"""Why a start has ended: the pod that brought it about is named, by whatever Kubernetes still knows of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kubetune.k8s.cluster.run_status import last_stop
from kubetune.rundir.status import progress
from standin.state.objects import container_statuses, name_of
from tests.cluster.operation import Desk, slow, write_progress

TRAINERS = "app.kubernetes.io/component=trainer"

# Node 1 is killed as for lack of memory, in its first start; node 0 then loses its peer.
KILLED = """
trap 'exit 143' TERM
if test -e /outputs/again; then touch /outputs/up-$NODE; while :; do sleep 0.02; done; fi
if test "$NODE" = 1; then touch /outputs/again; exit 137; fi
while test ! -e /outputs/again; do sleep 0.02; done; sleep 0.5; exit 145
"""
NODES = {
    "jobset": "NODE=$JOB_COMPLETION_INDEX", "trainjob": "NODE=$JOB_COMPLETION_INDEX",
    "job": "NODE=$JOB_COMPLETION_INDEX", "pytorchjob": "NODE=$PET_NODE_RANK",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["jobset", slow("pytorchjob"), slow("trainjob"), slow("job")])
def test_a_killed_pod_is_named_though_it_is_gone(desk: Desk, kind: str) -> None:
    desk.submit_script(f"{NODES[kind]}\n{KILLED}", kubernetes__kind=kind)
    outputs = desk.cluster.claim_folder("fit-outputs")
    deadline = time.monotonic() + 120
    while not all((outputs / f"up-{node}").exists() for node in range(2)):
        assert time.monotonic() < deadline, "the gang did not start again"
        time.sleep(0.02)
    folder = write_progress(desk)
    events = [
        {"event": "launch", "node": 0, "time": "2020-01-01T00:00:00Z"},
        {"event": "launch", "node": 0, "time": "2020-01-01T00:00:01Z"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    status = json.loads(desk.quick("status", "fit", "--json").stdout)
    assert status["cause"]["code"] == 137
    assert status["cause"]["pod"].startswith(
        {"pytorchjob": "fit-worker-0", "job": "fit-1-"}.get(kind, "fit-node-0-1-")
    )
    shown = desk.quick("status", "fit").stdout
    assert (
        f"{status['cause']['pod']}: exit code 137: killed (SIGKILL): out of memory, or its grace period"
        in shown
    )


DRAINED = """
test -e /outputs/again && { touch /outputs/up-$JOB_COMPLETION_INDEX; while :; do sleep 0.02; done; }
trap 'touch /outputs/again; exit 143' TERM
echo up
while test ! -e /outputs/end; do sleep 0.02; done; exit 143
"""


@pytest.mark.parametrize("kind", ["job", slow("jobset"), slow("trainjob")])
def test_a_pod_that_was_drained_is_named_and_costs_no_retry(desk: Desk, kind: str) -> None:
    desk.submit_script(
        DRAINED, kubernetes__kind=kind, kubernetes__max_restarts=0, kubernetes__spread="required"
    )
    drained = max(desk.cluster.wait_pods(TRAINERS, 2), key=name_of)
    current = desk.cluster.wait_phase(name_of(drained), "Running")
    for pod in desk.cluster.find("Pod", TRAINERS):
        desk.cluster.wait_phase(name_of(pod), "Running")
        desk.cluster.wait_log(name_of(pod), "up")
    desk.cluster.drain(current["spec"]["nodeName"])
    folder = write_progress(desk)
    events = [
        {"event": "launch", "node": 0, "time": "2020-01-01T00:00:00Z"},
        {"event": "launch", "node": 0, "time": "2020-01-01T00:00:01Z"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    desk.cluster.wait_gone("Pod", name_of(drained))
    # Only now may the other pod end: whose end a Job sees first is what it fails by.
    (desk.cluster.claim_folder("fit-outputs") / "end").touch()
    if kind == "job":
        # It keeps the pod of the other node, which has ended.
        desk.cluster.wait_pods(TRAINERS, 3)
    else:
        desk.cluster.wait_event("has condition DisruptionTarget")
    status = json.loads(desk.quick("status", "fit", "--json").stdout)
    assert status["state"] in ("running", "waiting")
    assert (status["cause"]["pod"], status["cause"]["code"]) == (name_of(drained), 143)
    words = f"{name_of(drained)}: evicted or deleted, by a drain"
    assert words in last_stop(status)


def test_a_run_that_was_stopped_was_ended_by_nothing_from_outside(desk: Desk) -> None:
    desk.submit_script(DRAINED)
    for pod in desk.cluster.wait_ready("fit", pods=2):
        desk.cluster.wait_log(name_of(pod), "up")
    desk.quick("stop", "fit")
    desk.quick("resume", "fit")
    desk.cluster.wait_ready("fit", pods=2)
    assert json.loads(desk.quick("status", "fit", "--json").stdout)["cause"] is None


LEAVES_WORD = """
test "$JOB_COMPLETION_INDEX" = 1 || { trap 'exit 143' TERM; while :; do sleep 0.02; done; }
echo '{"code": 2, "reason": "train.jsonl:3: not JSON", "step": null, "progress": null}' > /dev/termination-log; exit 2
"""


@pytest.mark.parametrize("kind", ["job", slow("jobset")])
def test_the_reason_of_a_mistake_comes_from_any_node(desk: Desk, kind: str) -> None:
    desk.submit_script(LEAVES_WORD, kubernetes__kind=kind)
    desk.cluster.wait_condition({"job": "Job", "jobset": "JobSet"}[kind], "fit", "Failed")
    headline, *rows = desk.quick("status", "fit").stdout.splitlines()
    assert headline.endswith(", failed, train.jsonl:3: not JSON")
    assert any("exit code 2: train.jsonl:3: not JSON" in row for row in rows), rows


def test_the_agent_leaves_its_word_with_kubernetes(desk: Desk) -> None:
    """The true agent, which finds no model where the run file says, before its ranks have imported anything."""
    desk.write({"compute.nodes": 1, "compute.processes": 2})
    desk.quick("submit", "run.yaml")
    desk.cluster.wait_condition("Job", "fit", "Failed", seconds=60)
    (pod,) = desk.cluster.find("Pod", TRAINERS)
    (status,) = container_statuses(pod)
    left = json.loads(status["state"]["terminated"]["message"])
    assert left["code"] == 2
    assert "/models/tiny" in left["reason"]
    assert f"failed, {left['reason'].splitlines()[0]}" in desk.quick("status", "fit").stdout


@pytest.mark.parametrize("remark", [slow(""), "the loss ran away: 3,300 over the last 2 steps"])
def test_a_finished_run_tells_what_it_has_come_to(desk: Desk, remark: str) -> None:
    expected = {
        "step": 20,
        "steps": 20,
        "loss": 0.5,
        "tokens_per_second": 10.0,
        "saved_step": 20,
        "restarts": 0,
    }
    expected |= {"evaluation": {"step": 20, "eval_loss": 1.25}, "seconds_left": 0.0}
    left = {
        "code": 0,
        "reason": f"done, but {remark}" if remark else "done",
        "step": 20,
        "progress": expected,
    }
    desk.submit_script(f"echo '{json.dumps(left)}' > /dev/termination-log", compute__nodes=1)
    desk.cluster.wait_condition("Job", "fit", "Complete")
    headline, numbers, *_ = desk.quick("status", "fit").stdout.splitlines()
    assert headline.endswith(f", done, but {remark}" if remark else ", done")
    assert (
        "step 20/20 · loss 0.5000 · 10 tokens/s · eval_loss 1.2500 at step 20 · saved step 20"
        in numbers
    )


def test_of_the_exits_of_a_start_the_cause_is_told(tmp_path: Path) -> None:
    exits = [
        ("exit", 0, 145, "lost rank 1"),
        ("exit", 1, 3, "the disk is full"),
        ("exit", 2, 143, "stopped"),
    ]
    events = [
        ("launch", 0, 0, ""),
        ("exit", 0, 1, "an older one"),
        ("launch", 0, 0, ""),
        ("launch", 1, 0, ""),
        *exits,
    ]
    lines = [
        {"event": event, "node": node, "code": code, "reason": why}
        for event, node, code, why in events
    ]
    lines.append({"event": "start", "step": 0, "steps": 30})
    lines.append({"event": "launch", "node": 0})  # which is preparing now
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps({"time": "2026-11-20T10:15:00.000Z", **line}) + "\n" for line in lines)
    )
    progress_seen = progress(tmp_path)
    assert (progress_seen["last_exit"]["code"], progress_seen["last_exit"]["reason"]) == (
        3,
        "the disk is full",
    )
    assert progress_seen["steps"] == 30
