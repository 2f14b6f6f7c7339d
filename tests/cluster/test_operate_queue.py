"""Stopping and resuming a run that a queue holds, which would be started again if it were only suspended."""

from __future__ import annotations

import json
from typing import Any

from kubetune.k8s.cluster import kueue
from tests.cluster.operation import Desk
from tests.ranks import wait_until

TRAINERS = "app.kubernetes.io/component=trainer"
SCRIPT = "trap 'touch /outputs/saved; exit 143' TERM; echo up; while :; do sleep 0.02; done"


def queue(desk: Desk, stop_policy: str = "None", cpus: str = "1000", name: str = "gpu") -> None:
    """Make a queue, and what it takes to have it."""
    quota = {"cpu": cpus, "memory": "1Ti", "nvidia.com/gpu": "1000"}
    resources = [{"name": name, "nominalQuota": amount} for name, amount in quota.items()]
    group = {
        "coveredResources": list(quota),
        "flavors": [{"name": "any", "resources": resources}],
    }
    everything = {
        "resourceGroups": [group],
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "LowerPriority"},
    }
    local = {"clusterQueue": "all", "stopPolicy": stop_policy}
    desk.cluster.apply(
        of_kueue("ResourceFlavor", "any"),
        of_kueue("ClusterQueue", "all", spec=everything),
        of_kueue("LocalQueue", name, spec=local),
        of_kueue("WorkloadPriorityClass", "urgent", value=10),
    )


def of_kueue(kind: str, name: str, **fields: Any) -> dict[str, Any]:
    version = "kueue.x-k8s.io/v1beta2"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **fields}


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


def test_a_run_that_names_no_queue_may_be_in_that_of_the_namespace(desk: Desk) -> None:
    """Kueue puts it there, and would start it again if it were only suspended."""
    queue(desk, stop_policy="Hold", name="default")
    desk.submit_script(SCRIPT, compute__nodes=1)
    desk.cluster.wait("Job", "fit", lambda job: job["spec"].get("suspend"))
    shown = desk.quick("status", "fit").stdout
    assert "waiting in queue default: LocalQueue default is inactive" in shown
    assert "queue default: LocalQueue default is inactive" in desk.quick("logs", "fit").stderr
    queue(desk, name="default")
    desk.cluster.wait_ready("fit", pods=1)
    desk.quick("stop", "fit")
    assert json.loads(desk.quick("status", "fit", "--json").stdout)["state"] == "stopped"
    (workload,) = desk.cluster.find("Workload", "")
    assert workload["spec"]["active"] is False
    desk.quick("resume", "fit")
    desk.cluster.wait_ready("fit", pods=1)


def test_a_stateful_set_is_resumed_though_kueue_still_takes_it_away(desk: Desk) -> None:
    """Its webhook refuses that while pods of the time before are there."""
    queue(desk)
    slow_end = SCRIPT.replace("exit 143", "sleep 1; exit 143")
    desk.submit_script(slow_end, kubernetes__kind="statefulset", kubernetes__queue="gpu", compute__nodes=1)  # fmt: skip
    desk.cluster.wait("StatefulSet", "fit", lambda obj: obj["status"].get("readyReplicas") == 1)
    desk.quick("stop", "fit", "--no-wait")
    desk.quick("resume", "fit")
    desk.cluster.wait("StatefulSet", "fit", lambda obj: obj["status"].get("readyReplicas") == 1)


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
    assert "Kueue has no Workload for Job fit yet" in desk.quick("stop", "fit", code=3).stderr
    assert json.loads(desk.quick("status", "fit", "--json").stdout)["state"] == "waiting"
    assert desk.cluster.find("Pod", TRAINERS) == []


def test_a_kind_that_kueue_leaves_alone_is_stopped_and_goes_on(desk: Desk) -> None:
    """As Kueue 0.19 does it with PyTorchJobs, unless it is told to look after them."""
    queue(desk)
    desk.submit_script(
        SCRIPT, kubernetes__queue="gpu", kubernetes__kind="pytorchjob", compute__nodes=1
    )
    desk.cluster.wait_phase("fit-master-0", "Running")
    desk.quick("stop", "fit")
    assert json.loads(desk.quick("status", "fit", "--json").stdout)["state"] == "stopped"
    desk.quick("resume", "fit")
    desk.cluster.wait_phase("fit-master-0", "Running")
    assert json.loads(desk.quick("status", "fit", "--json").stdout)["state"] == "running"


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


def test_what_is_urgent_takes_the_quota_of_a_run_which_then_goes_on(desk: Desk) -> None:
    """Both say why they wait, in the words of Kueue, and none of the one's pods runs while the other has the quota."""
    queue(desk, cpus="1500m")
    ending = SCRIPT.replace("while :;", "touch /outputs/up; while [ ! -e /outputs/end ];")
    desk.submit_script(ending, kubernetes__queue="gpu", compute__nodes=1)
    desk.cluster.wait_ready("fit", pods=1)
    # From here on the script saves if it is asked to stop.
    wait_until((desk.cluster.claim_folder("fit-outputs") / "up").exists)
    desk.submit_script(
        ending,
        name="now",
        kubernetes__queue="gpu",
        kubernetes__queue_priority="urgent",
        compute__nodes=1,
    )
    desk.cluster.wait_ready("now", pods=1)
    assert (desk.cluster.claim_folder("fit-outputs") / "saved").exists()
    desk.cluster.wait_pods("app.kubernetes.io/instance=fit", 0)
    shown = desk.quick("status", "fit").stdout
    assert "waiting in queue gpu: taken off its nodes (Preempted)" in shown
    assert "due to prioritization in the ClusterQueue" in shown
    assert "insufficient unused quota for cpu in flavor any, 500m more needed" in shown
    (desk.cluster.claim_folder("now-outputs") / "end").touch()
    desk.cluster.wait_condition("Job", "now", "Complete")
    desk.cluster.wait_ready("fit", pods=1)
    assert ", running" in desk.quick("status", "fit").stdout.splitlines()[0]


def test_a_run_that_no_quota_is_large_enough_for_says_so(desk: Desk) -> None:
    queue(desk, cpus="500m")
    desk.submit_script(SCRIPT, kubernetes__queue="gpu", compute__nodes=1)
    desk.cluster.wait("Workload", "job-fit-1a2b3", lambda record: record.get("status"))
    shown = desk.quick("status", "fit").stdout
    assert "waiting in queue gpu: couldn't assign flavors to pod set main" in shown
    assert "current podset request (1) > maximum capacity (500m)" in shown
    assert not desk.cluster.find("Pod", TRAINERS)


def test_a_run_that_a_check_holds_back_names_it() -> None:
    """In the words of Kueue 0.19, of which the stand-in has no admission checks."""
    reserved = {"type": "QuotaReserved", "status": "True"}
    check = {"name": "capacity", "state": "Pending", "message": "waits for a node"}
    reason = kueue._reason_of({"status": {"conditions": [reserved], "admissionChecks": [check]}})
    assert reason == "admission check capacity is Pending: waits for a node"
    assert (
        kueue._reason_of({"status": {"conditions": [{"type": "Admitted", "status": "True"}]}}) == ""
    )
