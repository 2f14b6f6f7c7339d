"""The faults that tests can ask for, each with what a user of a real cluster would see."""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import threading
import urllib.error
import urllib.request

import pytest

from tests.cluster.harness import Cluster
from tests.cluster.manifests import job, pod, pod_spec
from tests.cluster.standin.objects import Object, container_statuses, find_condition, name_of

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
    policy = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]}
    cluster.apply(job("fit", pod_spec(LIVE), backoffLimit=0, podFailurePolicy=policy))
    cluster.wait("Job", "fit", lambda found: found.get("status", {}).get("ready"))
    (first,) = cluster.list("Pod")
    cluster.wait_log(name_of(first), "up")
    cluster.drain(first["spec"]["nodeName"])
    cluster.wait_gone("Pod", name_of(first))
    cluster.wait("Job", "fit", lambda found: found["status"]["ready"])
    (second,) = cluster.list("Pod")
    assert second["spec"]["nodeName"] != first["spec"]["nodeName"]


def test_a_pod_that_never_comes_says_why(cluster: Cluster) -> None:
    cluster.never_schedule("fit-1-")
    cluster.apply(job("fit", pod_spec(LIVE), completions=2, parallelism=2))
    cluster.wait_event("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
    cluster.wait("Job", "fit", lambda found: found["status"]["ready"] == 1)
    (never,) = cluster.list("Pod", "batch.kubernetes.io/job-completion-index=1")
    assert find_condition(never, "PodScheduled")["reason"] == "Unschedulable"
    cluster.clear_faults()
    cluster.wait("Job", "fit", lambda found: found["status"]["ready"] == 2)


def test_an_image_that_cannot_be_pulled_keeps_its_pod_waiting(cluster: Cluster) -> None:
    cluster.break_image("busybox")
    cluster.apply(pod("fit", "true"))
    cluster.wait("Pod", "fit", lambda found: waiting_reason(found) == "ImagePullBackOff")
    cluster.clear_faults()
    cluster.wait_phase("fit", "Succeeded")
    unknown = pod("unknown", "true", container={"image": "registry.example/none:1"})
    cluster.apply(unknown)
    cluster.wait("Pod", "unknown", lambda found: waiting_reason(found) == "ImagePullBackOff")


def test_in_an_outage_connections_are_refused_and_pods_go_on(cluster: Cluster) -> None:
    cluster.apply(pod("fit", "for i in $(seq 20); do echo line $i; sleep 0.05; done"))
    cluster.wait_phase("fit", "Running")
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
    assert followed.wait(10)
    cluster.outage(0.5)
    thread.join(10)  # the watch was cut
    assert not thread.is_alive()
    with pytest.raises(urllib.error.URLError, match="Connection refused"):
        urllib.request.urlopen(url, timeout=5)
    cluster.wait_phase("fit", "Succeeded")  # waits for the server to be back
    assert cluster.log("fit").splitlines() == [f"line {i}" for i in range(1, 21)]


def test_kubectl_reports_an_outage(cluster: Cluster, kubectl: str) -> None:
    cluster.kubectl("get", "pods")  # so that discovery is cached
    cluster.outage(1.0)
    down = subprocess.run(
        [kubectl, "get", "pods"], env=cluster.environment(), capture_output=True, text=True, timeout=30
    )
    assert "refused" in down.stderr
    cluster.wait("Namespace", cluster.namespace, lambda _: True)
    cluster.kubectl("get", "pods")


def test_an_unknown_fault_is_refused(cluster: Cluster) -> None:
    with pytest.raises(AssertionError, match="there is no running pod"):
        cluster.kill_pod("none")
    with pytest.raises(AssertionError, match="there is no node none"):
        cluster.drain("none")
