"""What the trainer's pods have by default that people forget, and what they have only when asked for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kubetune.k8s.manifests import KINDS
from kubetune.k8s.manifests.pod_templates import pod_templates
from kubetune.k8s.manifests.trainer import LISTENS
from tests.golden.made import made, the, trainer_pods, variables


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_forgotten_by_hand_is_there(kind: str) -> None:
    """Shared memory, GPUs by the name the cluster knows, interfaces, caches that can be written, a hook for ends."""
    pods = list(
        trainer_pods(
            made(kind, "kubernetes.gpu_resource=amd.com/gpu", "kubernetes.network_interface=ib0")
        )
    )
    assert pods
    for pod in pods:
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"] == {
            "medium": "Memory",
            "sizeLimit": f"{800 * 1024 // 4}Mi",
        }
        assert container["resources"] == {
            "requests": {"cpu": "64", "memory": "800Gi", "amd.com/gpu": "8"},
            "limits": {"memory": "800Gi", "amd.com/gpu": "8"},
        }
        assert {"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod[
            "tolerations"
        ]
        environ = variables(container)
        assert environ["NCCL_SOCKET_IFNAME"] == environ["GLOO_SOCKET_IFNAME"] == "ib0"
        assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
        assert (environ["HF_HUB_OFFLINE"], environ["HF_DATASETS_OFFLINE"]) == ("1", "1")
        assert (environ["HF_HOME"], environ["XDG_CACHE_HOME"]) == ("/outputs/.cache/hf", "/cache")
        assert (environ["HOME"], environ["OMP_NUM_THREADS"]) == ("/tmp", "8")
        assert container["lifecycle"]["preStop"]["exec"]["command"][-1] == LISTENS
        one_each = pod["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert [term["topologyKey"] for term in one_each] == ["kubernetes.io/hostname"]


@pytest.mark.parametrize(
    ("mask", "listens"),
    [
        ("0000000000004002", True),
        ("0000000180014a03", True),
        ("0000000000000000", False),
        ("fffffffe3bfaba07", False),
    ],
)
def test_the_hook_knows_a_process_that_listens(mask: str, listens: bool, tmp_path: Path) -> None:
    """By the bit of SIGTERM in the masks of what it blocks or catches; what it ignores does not count."""
    status = tmp_path / "status"
    status.write_text(f"SigIgn:\t0000000000004000\nSigBlk:\t{'0' * 16}\nSigCgt:\t{mask}\n")
    once = LISTENS.replace("until", "").partition(";")[0].replace("/proc/1/status", str(status))
    assert (subprocess.run(["sh", "-c", once]).returncode == 0) == listens


@pytest.mark.parametrize("resource", [None, "rdma/hca"])
def test_rdma_has_to_be_asked_for(resource: str | None) -> None:
    how = f"resource={resource}" if resource else "privileged=true"
    wanted = ["kubernetes.profile=rdma", f"kubernetes.rdma.{how}"]
    for pod in trainer_pods(made("job", *wanted)):
        (container,) = pod["containers"]
        assert variables(container)["NCCL_IB_HCA"] == "mlx5"
        folders = [volume.get("hostPath", {}).get("path") for volume in pod["volumes"]]
        assert ("/dev/infiniband" in folders) == (resource is None)
        assert container["securityContext"].get("privileged", False) == (resource is None)
        if resource:
            assert container["resources"]["limits"][resource] == "1"
            assert container["securityContext"]["capabilities"] == {
                "drop": ["ALL"],
                "add": ["IPC_LOCK"],
            }
    for pod in trainer_pods(made("job")):
        assert "NCCL_IB_HCA" not in variables(pod["containers"][0])


def test_a_queue_and_priorities_are_where_kueue_and_the_scheduler_look() -> None:
    """On the object that is held back; a preferred domain for its pods, a priority class and pull secrets on them."""
    kinds = {"job": "Job", "statefulset": "StatefulSet", "jobset": "JobSet", "trainjob": "TrainJob"}
    for kind, owner in {**kinds, "pytorchjob": "PyTorchJob"}.items():
        objects = made(kind)
        labels = the(objects, owner)["metadata"]["labels"]
        assert labels["kueue.x-k8s.io/queue-name"] == "gpu"
        assert labels["kueue.x-k8s.io/priority-class"] == "nightly"
        held = [
            o["kind"] for o in objects if "kueue.x-k8s.io/queue-name" in o["metadata"]["labels"]
        ]
        assert held == [owner]
        for obj in objects:
            for _, template in pod_templates(obj):
                if template["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer":
                    domain = template["metadata"]["annotations"][
                        "kueue.x-k8s.io/podset-preferred-topology"
                    ]
                    assert domain == "topology.kubernetes.io/zone"
        for pod in trainer_pods(objects):
            assert pod["priorityClassName"] == "training"
            assert pod["imagePullSecrets"] == [{"name": "registry"}]
            assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "gpu-8x"}
            assert {t.get("key"): t["effect"] for t in pod["tolerations"]}[
                "dedicated"
            ] == "NoSchedule"


def test_a_toleration_may_end_after_some_seconds() -> None:
    from pydantic import ValidationError

    from kubetune.config.schema.placement import TolerationConfig

    lost = {
        "key": "node.kubernetes.io/unreachable",
        "effect": "NoExecute",
        "tolerationSeconds": 600,
    }
    assert TolerationConfig.model_validate(lost).model_dump(exclude_none=True) == {
        **lost,
        "operator": "Exists",
    }
    with pytest.raises(ValidationError, match="tolerationSeconds needs effect NoExecute"):
        TolerationConfig.model_validate({**lost, "effect": "NoSchedule"})
