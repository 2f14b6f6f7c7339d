"""The faults that tests can ask for, each with what a user of a real cluster would see."""

from __future__ import annotations

import contextlib
import http.client
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from standin.state.objects import Object, container_statuses, find_condition, name_of
from tests.cluster.harness import Cluster
from tests.cluster.manifests import job, pod, pod_spec

pytestmark = pytest.mark.slow  # other tests of the default suite use all of it

LIVE = "trap 'exit 143' TERM; echo up; while :; do sleep 0.02; done"


def waiting_reason(pod: Object) -> str | None:
    reasons = [entry["state"].get("waiting", {}).get("reason") for entry in container_statuses(pod)]
    return reasons[0] if reasons else None


def test_a_killed_pod_ends_with_137(cluster: Cluster) -> None:
    cluster.apply(pod("fit", LIVE))
    cluster.wait_phase("fit", "Running")
    cluster.kill_pod("fit", reason="OOMKilled")
    failed = cluster.wait_phase("fit", "Failed")
    terminated = failed["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (terminated["exitCode"], terminated["reason"]) == (137, "OOMKilled")


def test_a_drained_node_disrupts_its_pods(cluster: Cluster) -> None:
    policy = {
        "rules": [
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            }
        ]
    }
    cluster.apply(job("fit", pod_spec(LIVE), backoffLimit=0, podFailurePolicy=policy))
    (first,) = cluster.wait_ready("fit")
    cluster.wait_log(name_of(first), "up")
    cluster.drain(first["spec"]["nodeName"])
    second = cluster.wait_replacement(first)
    assert second["spec"]["nodeName"] != first["spec"]["nodeName"]
    assert cluster.get("Job", "fit")["status"].get("failed", 0) == 0


def test_a_pod_that_never_comes_says_why(cluster: Cluster) -> None:
    cluster.never_schedule("fit-1-")
    cluster.apply(job("fit", pod_spec(LIVE), completions=2, parallelism=2))
    cluster.wait_event("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    cluster.wait_ready("fit")
    (never,) = cluster.find("Pod", "batch.kubernetes.io/job-completion-index=1")
    assert find_condition(never, "PodScheduled")["reason"] == "Unschedulable"
    cluster.clear_faults()
    cluster.wait_ready("fit", pods=2)


def test_an_image_that_cannot_be_pulled_keeps_its_pod_waiting(cluster: Cluster) -> None:
    cluster.break_image("busybox")
    cluster.apply(pod("fit", "true"))
    cluster.wait("Pod", "fit", lambda current: waiting_reason(current) == "ImagePullBackOff")
    cluster.clear_faults()
    cluster.wait_phase("fit", "Succeeded")
    unknown = pod("unknown", "true", container={"image": "registry.example/none:1"})
    cluster.apply(unknown)
    cluster.wait("Pod", "unknown", lambda current: waiting_reason(current) == "ImagePullBackOff")


def test_in_an_outage_connections_are_refused_and_pods_go_on(
    cluster: Cluster, kubectl: str
) -> None:
    cluster.apply(
        pod("fit", "trap 'echo got it; exit' USR1; echo up; while :; do sleep 0.02; done")
    )
    cluster.wait_phase("fit", "Running")
    cluster.wait_log("fit", "up")
    url = f"{cluster.control_plane.url}/api/v1/namespaces/{cluster.namespace}/pods"
    followed = threading.Event()

    def follow() -> None:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(f"{url}?watch=true", timeout=30) as watch,
        ):
            for _ in watch:
                followed.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert followed.wait(60)
    with cluster.outage():
        thread.join(60)  # the watch was cut
        assert not thread.is_alive()
        with pytest.raises(urllib.error.URLError, match="Connection refused"):
            urllib.request.urlopen(url, timeout=30)
    # the same process goes on, and is under control as before
    cluster.kubectl(
        "exec", "fit", "--", "kill", "-USR1", "1", check=False
    )  # process 1 may end before the answer
    cluster.wait_phase("fit", "Succeeded")
    assert cluster.log("fit") == "up\ngot it\n"


def test_kubectl_reports_an_outage(cluster: Cluster, kubectl: str) -> None:
    cluster.kubectl("get", "pods")  # so that discovery is cached
    with cluster.outage():
        assert "refused" in cluster.kubectl("get", "pods", check=False).stderr
    cluster.kubectl("get", "pods")


def test_a_kind_that_is_not_installed_is_not_found(cluster: Cluster, kubectl: str) -> None:
    assert "jobsets" in cluster.kubectl("api-resources", "--api-group=jobset.x-k8s.io").stdout
    cluster.uninstall("JobSet")
    with pytest.raises(AssertionError, match=r"404 .*could not find the requested resource"):
        cluster.get("JobSet", "fit")
    assert "jobsets" not in cluster.kubectl("api-resources", "--api-group=jobset.x-k8s.io").stdout


def test_a_quota_refuses_pods_and_the_job_tells(cluster: Cluster) -> None:
    cluster.refuse("Pod", "exceeded quota: gpus, requested: 8, used: 8, limited: 8")
    with pytest.raises(AssertionError, match=r"403 .*exceeded quota"):
        cluster.apply(pod("fit", "true"))
    cluster.apply(job("fit", pod_spec("true")))
    assert cluster.wait_event("exceeded quota")["reason"] == "FailedCreate"
    cluster.clear_faults()
    cluster.wait_condition("Job", "fit", "Complete")


def test_an_unknown_fault_is_refused(cluster: Cluster) -> None:
    with pytest.raises(AssertionError, match="there is no running pod"):
        cluster.kill_pod("none")
    with pytest.raises(AssertionError, match="there is no node none"):
        cluster.drain("none")


def test_what_a_test_adds_to_the_cluster_goes_with_it(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "another"
    folder.mkdir()
    another = Cluster(cluster.control_plane, f"{cluster.namespace}-too", folder)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": another.namespace}}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-0"}}
    before = {name_of(node): node["spec"] for node in cluster.find("Node")}
    with another.borrowed():
        another.apply(namespace)
        another.add_fake_node("fake")
        another.drain("node-0")
        another.uninstall("JobSet")
    assert {name_of(node): node["spec"] for node in cluster.find("Node")} == before
    assert cluster.find("JobSet") == []
    with pytest.raises(AssertionError, match="what all namespaces share"), another.borrowed():
        another.apply(
            namespace, node | {"metadata": {"name": "node-0", "labels": {"left": "behind"}}}
        )
    cluster.apply(node)
