"""Stopping and resuming a run that a queue holds, which would be started again if it were only suspended."""

from __future__ import annotations

import json

from kubetune.k8s.cluster import kueue
from tests.cluster.operation import Desk

TRAINERS = "app.kubernetes.io/component=trainer"
SCRIPT = "trap 'touch /outputs/saved; exit 143' TERM; echo up; while :; do sleep 0.02; done"


def queue(desk: Desk, stop_policy: str = "None") -> None:
    spec = {"clusterQueue": "all", "stopPolicy": stop_policy}
    desk.cluster.apply(
        {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "LocalQueue",
            "metadata": {"name": "gpu"},
            "spec": spec,
        }
    )


def test_a_queued_run_is_stopped_stays_so_and_goes_on(desk: Desk) -> None:
    queue(desk)
    desk.submit_script(SCRIPT, kubernetes__queue="gpu", compute__nodes=1)
    desk.cluster.wait_ready("fit", pods=1)
    desk.quick("stop", "fit")
    assert (desk.cluster.claim_folder("fit-outputs") / "saved").exists()
    (workload,) = desk.cluster.find("Workload", "")
    assert workload["spec"]["active"] is False
    assert desk.cluster.get("Job", "fit")["spec"]["suspend"] is True
    assert json.loads(desk.quick("status", "fit", "--json").stdout)["state"] == "stopped"
    desk.quick("resume", "fit")
    desk.cluster.wait_ready("fit", pods=1)
    (workload,) = desk.cluster.find("Workload", "")
    assert workload["spec"]["active"] is True
    assert json.loads(desk.quick("status", "fit", "--json").stdout)["state"] == "running"
    assert "is not stopped" in desk.quick("resume", "fit", code=2).stderr


def test_a_run_that_another_cluster_has_says_where_to_look(desk: Desk) -> None:
    """MultiKueue marks it so when it is made, and no controller of this cluster makes pods of it."""
    patch = {
        "target": {"kind": "Job", "name": "fit"},
        "patch": {"spec": {"managedBy": "kueue.x-k8s.io/multikueue"}},
    }
    queue(desk)
    desk.submit_script(
        SCRIPT, kubernetes__queue="gpu", compute__nodes=1, kubernetes__patches=[patch]
    )
    status = json.loads(desk.quick("status", "fit", "--json").stdout)
    assert (status["state"], status["pods"]) == ("waiting", [])
    assert status["why"].startswith("MultiKueue gives it to another cluster")
    assert not desk.cluster.find("Pod", TRAINERS)
    assert status["why"] in desk.quick("logs", "-f", "fit", code=3).stderr


def test_without_a_workload_nothing_is_said_to_be_stopped(desk: Desk) -> None:
    """Kueue is there, but has made none for this run: it could start it at any moment."""
    queue(desk)
    desk.cluster.refuse("Workload", "not yet")
    desk.submit_script(SCRIPT, kubernetes__queue="gpu", compute__nodes=1)
    desk.cluster.wait_ready("fit", pods=1)
    assert "Kueue has no Workload of Job fit (yet)" in desk.quick("stop", "fit", code=3).stderr
    assert not desk.cluster.get("Job", "fit")["spec"].get("suspend")
    assert len(desk.cluster.find("Pod", TRAINERS)) == 1


def test_a_queue_that_is_not_there_is_refused_before_anything_is_made(desk: Desk) -> None:
    queue(desk)
    desk.write({"kubernetes.queue": "gpus", "compute.nodes": 1})
    stderr = desk.quick("submit", "run.yaml", code=3).stderr
    where = f"in namespace {desk.cluster.namespace}"
    assert f"kubernetes.queue: there is no LocalQueue gpus {where}" in stderr
    assert "queues there: gpu\n" in stderr
    assert desk.cluster.find("Job") == []


def test_a_run_that_waits_says_what_its_queue_says(desk: Desk) -> None:
    queue(desk, stop_policy="Hold")
    desk.submit_script(SCRIPT, kubernetes__queue="gpu", compute__nodes=1)
    desk.cluster.wait("Job", "fit", lambda job: job["spec"].get("suspend"))
    shown = desk.quick("status", "fit").stdout
    assert "waiting in queue gpu: LocalQueue gpu is inactive" in shown.splitlines()[0]
    assert "queue gpu: LocalQueue gpu is inactive" in desk.quick("logs", "fit").stderr


def test_a_run_that_was_preempted_says_by_whom() -> None:
    """In the words of Kueue 0.19, of which the stand-in knows no preemption."""
    by = "Preempted to accommodate a workload (UID: 1f) due to prioritization in the ClusterQueue"
    lacking = (
        "couldn't assign flavors to pod set main: insufficient unused quota for cpu, 1 more needed"
    )
    conditions = [
        {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": lacking},
        {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "Preempted"},
        {"type": "Preempted", "status": "True", "reason": "InClusterQueue", "message": by},
    ]
    reason = kueue._reason_of({"status": {"conditions": conditions}})
    assert reason == f"taken off its nodes (Preempted): {by}; {lacking}"
    reserved = {"type": "QuotaReserved", "status": "True"}
    check = {"name": "capacity", "state": "Pending", "message": "waits for a node"}
    reason = kueue._reason_of({"status": {"conditions": [reserved], "admissionChecks": [check]}})
    assert reason == "admission check capacity is Pending: waits for a node"
    assert (
        kueue._reason_of({"status": {"conditions": [{"type": "Admitted", "status": "True"}]}}) == ""
    )
