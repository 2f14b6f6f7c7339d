"""PodGroups in the stand-in, and a run whose pods start together or not at all."""

from __future__ import annotations

import pytest

from standin.state.objects import name_of
from tests.cluster.harness import Cluster
from tests.cluster.manifests import job, pod, pod_spec
from tests.cluster.operation import Desk

VOLCANO = {"annotations": {"scheduling.k8s.io/group-name": "fit"}}
GROUP = {
    "apiVersion": "scheduling.volcano.sh/v1beta1",
    "kind": "PodGroup",
    "metadata": {"name": "fit"},
    "spec": {"minMember": 2},
}
EIGHT = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}


def test_a_gang_gets_its_nodes_together_or_none(cluster: Cluster) -> None:
    """While another pod holds one of two nodes' GPUs, the first of the gang does not take the other's."""
    cluster.apply(pod("other", "exec sleep 600", container=EIGHT, terminationGracePeriodSeconds=0))
    cluster.wait_condition("Pod", "other", "Ready")
    template = pod_spec("exec sleep 600", container=EIGHT, schedulerName="volcano")
    gang = job("fit", template, completions=2, parallelism=2)
    gang["spec"]["template"]["metadata"] = VOLCANO
    cluster.apply(GROUP, gang)
    why = "pod group is not ready, 2 of 2 pods are there, 1 fit on no node"
    for member in cluster.wait_pods("job-name=fit", 2):
        refused = cluster.wait(
            "Pod", name_of(member), lambda current: why in str(current["status"])
        )
        assert "nodeName" not in refused["spec"]
    cluster.delete("Pod", "other")
    assert len(cluster.wait_ready("fit", pods=2)) == 2


def test_a_run_makes_its_group_and_takes_it_along(desk: Desk) -> None:
    """Submitted twice without a change, trained to the end, and gone with the run; without Volcano it says so."""
    gang = {"kubernetes.scheduling": {"gang": "volcano"}}
    ref = desk.submit_script("echo trained", **gang)
    assert ref.outcome == "submitted"
    assert [group["spec"]["minMember"] for group in desk.cluster.find("PodGroup")] == [2]
    desk.cluster.wait_condition("Job", "fit", "Complete")
    assert desk.submit_script("echo trained", **gang).outcome == "unchanged"
    assert "PodGroup fit" in desk.quick("delete", "fit", "--yes").stdout
    assert desk.cluster.find("PodGroup") == []


ENDS = {"pytorchjob": ("PyTorchJob", "Succeeded"), "trainjob": ("TrainJob", "Complete")}


@pytest.mark.parametrize("kind", ENDS)
def test_operators_make_the_group_of_their_jobs(desk: Desk, kind: str) -> None:
    """While one of two pods fits nowhere, the other has no node either; then both run, and the group goes with them."""
    desk.cluster.never_schedule(".*(worker-0|node-0-1)")
    wanted = {"gang": "volcano", "queue": "team"}
    desk.submit_script("echo trained", kubernetes__kind=kind, kubernetes__scheduling=wanted)
    members = desk.cluster.wait_pods("app.kubernetes.io/component=trainer", 2)
    why = "pod group is not ready, 2 of 2 pods are there, 1 fit on no node"
    for member in members:
        refused = desk.cluster.wait(
            "Pod", name_of(member), lambda current: why in str(current["status"])
        )
        assert "nodeName" not in refused["spec"]
    (group,) = desk.cluster.find("PodGroup")
    assert group["spec"]["minMember"] == 2
    assert group["spec"]["queue"] == "team"
    assert why in desk.quick("status", "fit").stdout
    desk.cluster.clear_faults()
    desk.cluster.wait_condition(ENDS[kind][0], "fit", ENDS[kind][1])
    desk.quick("delete", "fit", "--yes")
    desk.cluster.wait_gone("PodGroup", "fit")


def test_a_cluster_without_volcano_says_so(desk: Desk) -> None:
    desk.cluster.uninstall("PodGroup")
    desk.write({"kubernetes.scheduling": {"gang": "volcano"}})
    refused = desk.quick("submit", "run.yaml", code=3).stderr
    assert (
        "the cluster has no kind PodGroup in scheduling.volcano.sh/v1beta1; install Volcano, or choose"
        in refused
    )
