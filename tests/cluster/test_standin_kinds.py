"""Every kind of workload starts the right pods with the right environment, and ends as on a real cluster."""

from __future__ import annotations

import pytest

from standin.state.objects import (
    COMPLETION_INDEX,
    Object,
    condition,
    find_condition,
    name_of,
    phase,
)
from tests.cluster.harness import Cluster
from tests.cluster.manifests import job, jobset, pod_spec
from tests.ranks import wait_until

pytestmark = pytest.mark.slow  # other tests of the default suite use all of it

# every pod shows what it was told, finds the master, and stays until all have: what has ended is in no Service
SHOW = """
for name in PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT WORLD_SIZE RANK; do
  echo $name=$(printenv $name)
done
until getent hosts ${PET_MASTER_ADDR-fit-node-0-0.fit} > /dev/null; do sleep 0.02; done
touch /shared/$HOSTNAME
until test $(ls /shared | wc -l) = 2; do sleep 0.02; done
"""
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "shared"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Mi"}}},
}


def meeting_spec(*argv: str, name: str = "main") -> Object:
    """Return a pod spec for SHOW, with the claim through which its pods meet."""
    container = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
    volumes = [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}]
    return pod_spec(
        *argv, name=name, container=container, volumes=volumes, terminationGracePeriodSeconds=0
    )


def shown(cluster: Cluster, pod: Object) -> dict[str, str]:
    """Return the variables a SHOW pod printed, without those it does not have."""
    pairs = (line.split("=", 1) for line in cluster.log(name_of(pod)).splitlines())
    return {name: value for name, value in pairs if value}


def fail_on(*codes: int, action: str = "FailJob") -> Object:
    return {
        "action": action,
        "onExitCodes": {"containerName": "main", "operator": "In", "values": list(codes)},
    }


def pods_by(cluster: Cluster, label: str) -> dict[str, Object]:
    return {pod["metadata"]["labels"][label]: pod for pod in cluster.find("Pod", label)}


# -- Job
def test_a_failed_pod_is_replaced_until_the_limit(cluster: Cluster) -> None:
    cluster.apply(job("fit", pod_spec("exit 1"), backoffLimit=1))
    failed = cluster.wait_condition("Job", "fit", "Failed")
    assert condition(failed, "Failed")["reason"] == "BackoffLimitExceeded"
    assert failed["status"]["failed"] == 2
    assert len(cluster.find("Pod")) == 2  # failed pods stay, with their logs


def test_an_exit_code_of_the_failure_policy_fails_the_job_at_once(cluster: Cluster) -> None:
    script = "test $JOB_COMPLETION_INDEX = 1 && exit 2; exec sleep 600"
    template = pod_spec(script, terminationGracePeriodSeconds=0)
    policy = {"rules": [fail_on(2)]}
    cluster.apply(
        job("fit", template, completions=2, parallelism=2, backoffLimit=9, podFailurePolicy=policy)
    )
    failure = condition(cluster.wait_condition("Job", "fit", "Failed"), "Failed")
    assert failure["reason"] == "PodFailurePolicy"
    assert failure["message"].endswith("failed with exit code 2 matching FailJob rule at index 0")


def test_failures_are_counted_by_index(cluster: Cluster) -> None:
    """A gang whose members fail together spends one restart a failure, and waits once for it."""
    limits = {"backoffLimitPerIndex": 2, "maxFailedIndexes": 0}
    cluster.apply(job("fit", pod_spec("exit 1"), completions=3, parallelism=3, **limits))
    failed = cluster.wait_condition("Job", "fit", "Failed")
    assert condition(failed, "Failed")["reason"] == "MaxFailedIndexesExceeded"
    starts = [pod["metadata"]["annotations"] for pod in cluster.find("Pod")]
    for index in "012":
        starts_of_index = [
            start for start in starts if start["batch.kubernetes.io/job-completion-index"] == index
        ]
        counted = sorted(
            int(start["batch.kubernetes.io/job-index-failure-count"]) for start in starts_of_index
        )
        assert counted in (
            [0, 1, 2],
            [0, 1],
        )  # two where another index had failed for good before it started again
    assert failed["status"]["failedIndexes"]


def test_a_limit_by_index_needs_indexes(cluster: Cluster) -> None:
    wrong = job("fit", pod_spec("exit 1"), backoffLimitPerIndex=1, completionMode="NonIndexed")
    with pytest.raises(Exception, match="requires indexed completion mode"):
        cluster.apply(wrong)
    with pytest.raises(Exception, match="Required value: when maxFailedIndexes is specified"):
        cluster.apply(job("fit", pod_spec("exit 1"), maxFailedIndexes=0))


def test_suspending_a_job_stops_its_pods_until_it_is_resumed(cluster: Cluster) -> None:
    cluster.apply(job("fit", pod_spec("exec sleep 600", terminationGracePeriodSeconds=0)))
    cluster.wait_ready("fit")
    for suspend, active in ((True, 0), (False, 1)):
        path = f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs/fit"
        cluster.request(
            "PATCH", path, {"spec": {"suspend": suspend}}, "application/merge-patch+json"
        )

        def settled(current: Object, suspend: bool = suspend, active: int = active) -> bool:
            status = current["status"]
            shown = (find_condition(current, "Suspended") or {}).get("status")
            return (status["active"], status["terminating"], shown) == (active, 0, str(suspend))

        cluster.wait("Job", "fit", settled)


def test_a_deadline_and_a_ttl_end_a_job(cluster: Cluster) -> None:
    template = pod_spec("exec sleep 600", terminationGracePeriodSeconds=0)
    cluster.apply(job("fit", template, activeDeadlineSeconds=1, ttlSecondsAfterFinished=1))
    failed = cluster.wait_condition("Job", "fit", "Failed")
    assert condition(failed, "Failed")["reason"] == "DeadlineExceeded"
    cluster.wait_gone("Job", "fit")


# -- StatefulSet
def test_members_of_a_stateful_set_have_names_ranks_and_claims(cluster: Cluster) -> None:
    rank = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
    container = {
        "env": [{"name": "RANK", "valueFrom": rank}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    }
    script = "echo $RANK > /cache/rank; exec sleep 600"
    template = {"metadata": {"labels": {"app": "fit"}}}
    template["spec"] = pod_spec(
        script, restart="Always", container=container, terminationGracePeriodSeconds=0
    )
    claim = {"metadata": {"name": "cache"}}
    claim["spec"] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
    }
    spec = {
        "serviceName": "fit",
        "replicas": 2,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {"app": "fit"}},
        "template": template,
        "volumeClaimTemplates": [claim],
    }
    cluster.apply(
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "fit"}, "spec": spec}
    )
    cluster.wait("StatefulSet", "fit", lambda obj: obj.get("status", {}).get("readyReplicas") == 2)
    assert [name_of(pod) for pod in cluster.find("Pod")] == ["fit-0", "fit-1"]
    for index in range(2):
        cluster.kill_pod(f"fit-{index}")  # its restart policy is Always
        cluster.wait(
            "Pod",
            f"fit-{index}",
            lambda pod: pod["status"]["containerStatuses"][0]["restartCount"] == 1,
        )
        written = cluster.claim_folder(f"cache-fit-{index}") / "rank"
        wait_until(written.read_text)  # the new container empties the file before it writes
        assert written.read_text() == f"{index}\n"


# -- JobSet
def test_a_jobset_names_its_pods_and_completes(cluster: Cluster) -> None:
    cluster.apply(CLAIM, jobset("fit", meeting_spec(SHOW), {"maxRestarts": 0}))
    done = cluster.wait_condition("JobSet", "fit", "Completed")
    assert done["status"]["terminalState"] == "Completed"
    assert sorted(file.name for file in cluster.claim_folder("shared").iterdir()) == [
        "fit-node-0-0",
        "fit-node-0-1",
    ]


def test_a_jobset_restarts_the_gang_and_gives_up(cluster: Cluster) -> None:
    script = "test $JOB_COMPLETION_INDEX = 1 && exit 145; exec sleep 600"
    cluster.apply(
        jobset("fit", pod_spec(script, terminationGracePeriodSeconds=0), {"maxRestarts": 1})
    )
    failed = cluster.wait_condition("JobSet", "fit", "Failed")
    assert condition(failed, "Failed")["reason"] == "ReachedMaxRestarts"
    assert failed["status"]["restarts"] == 1


@pytest.mark.parametrize(
    ("code", "reason", "restarts"),
    [(2, "FailJobSetFailurePolicyAction", 0), (1, "ReachedMaxRestarts", 1)],
)
def test_a_jobset_rule_fails_it_without_restart(
    cluster: Cluster, code: int, reason: str, restarts: int
) -> None:
    rule = {"name": "user", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    rule["onJobFailureMessagePatterns"] = [".*exit code (2|4) .*"]
    policy = {"podFailurePolicy": {"rules": [fail_on(2, 4)]}}
    cluster.apply(
        jobset("fit", pod_spec(f"exit {code}"), {"maxRestarts": 1, "rules": [rule]}, **policy)
    )
    failed = cluster.wait_condition("JobSet", "fit", "Failed")
    assert (condition(failed, "Failed")["reason"], failed["status"]["restarts"]) == (
        reason,
        restarts,
    )


# -- PyTorchJob
def pytorch_job(name: str, *argv: str) -> Object:
    template = {"spec": meeting_spec(*argv, name="pytorch")}
    roles = {"Master": {"replicas": 1}, "Worker": {"replicas": 1}}
    replicas = {
        role: {**count, "restartPolicy": "ExitCode", "template": template}
        for role, count in roles.items()
    }
    spec = {"nprocPerNode": "2", "runPolicy": {"backoffLimit": 3}, "pytorchReplicaSpecs": replicas}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": spec,
    }


def test_a_pytorch_job_sets_up_the_rendezvous(cluster: Cluster) -> None:
    cluster.apply(CLAIM, pytorch_job("fit", SHOW))
    cluster.wait_condition("PyTorchJob", "fit", "Succeeded")
    for role, rank in (("master", "0"), ("worker", "1")):
        assert shown(cluster, cluster.wait_phase(f"fit-{role}-0", "Succeeded")) == {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "2",
            "PET_NODE_RANK": rank,
            "PET_MASTER_ADDR": "fit-master-0",
            "PET_MASTER_PORT": "23456",
            "WORLD_SIZE": "4",
            "RANK": rank,
        }


def test_a_pytorch_job_retries_a_signal_but_not_an_error(cluster: Cluster) -> None:
    """Without a limit, unless that is 0."""
    cluster.apply(CLAIM, pytorch_job("fit", "exec sleep 600"))
    seen = set()

    def is_another(pod: Object) -> bool:
        return pod["metadata"]["uid"] not in seen and phase(pod) == "Running"

    for _ in range(5):
        seen.add(cluster.wait("Pod", "fit-worker-0", is_another)["metadata"]["uid"])
        cluster.kill_pod("fit-worker-0")
    once = pytorch_job("once", "exec sleep 600")
    once["spec"]["runPolicy"]["backoffLimit"] = 0
    cluster.apply(once)
    cluster.wait_phase("once-worker-0", "Running")
    cluster.kill_pod("once-worker-0")
    cluster.wait_condition("PyTorchJob", "once", "Failed")
    cluster.apply(pytorch_job("typo", "exit 2"))
    cluster.wait_condition("PyTorchJob", "typo", "Failed")


# -- TrainJob
def test_a_train_job_becomes_a_jobset_with_the_rendezvous(cluster: Cluster) -> None:
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    replicated = {
        "name": "node",
        "template": {
            "metadata": {"labels": label},
            "spec": {"backoffLimit": 0, "template": {"spec": meeting_spec("exit 9", name="node")}},
        },
    }
    api = {"apiVersion": "trainer.kubeflow.org/v1alpha1"}
    runtime_spec = {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {"spec": {"replicatedJobs": [replicated]}},
    }
    trainer = {"numNodes": 2, "numProcPerNode": 3, "command": ["sh", "-c"], "args": [SHOW]}
    trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": "3"}}
    spec = {"runtimeRef": {"kind": "TrainingRuntime", "name": "torch"}, "trainer": trainer}
    cluster.apply(
        CLAIM,
        {**api, "kind": "TrainingRuntime", "metadata": {"name": "torch"}, "spec": runtime_spec},
        {**api, "kind": "TrainJob", "metadata": {"name": "fit"}, "spec": spec},
    )
    cluster.wait_condition("TrainJob", "fit", "Complete")
    pods = pods_by(cluster, COMPLETION_INDEX)
    assert sorted(pods) == ["0", "1"]
    for rank, pod in pods.items():
        assert shown(cluster, pod) == {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "3",
            "PET_NODE_RANK": rank,
            "PET_MASTER_ADDR": "fit-node-0-0.fit",
            "PET_MASTER_PORT": "29500",
        }
