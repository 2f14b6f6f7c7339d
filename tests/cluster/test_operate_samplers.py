"""Pods that draw answers beside a trainer's: they start, stop and end with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kubetune.config.load import load_config
from kubetune.k8s.api.client import Cluster as Client
from kubetune.k8s.cluster.submit import submit
from kubetune.k8s.manifests import local_files
from standin.state.objects import name_of
from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk, _templates
from tests.cluster.test_operate_training import furnish, model

__all__ = ["model"]

ROOT = Path(__file__).parents[2]

TRAINERS = "app.kubernetes.io/component=trainer"
SAMPLERS = "app.kubernetes.io/component=sampler"

BOTH = """
trap 'echo saved step 7; exit 143' TERM
case $HOSTNAME in *-sampler-*) echo serves; while :; do sleep 0.02; done;; esac
echo "asks $KUBETUNE_SAMPLERS"
until test -e /outputs/go; do sleep 0.02; done
"""


def test_both_groups_of_pods_start_stop_and_end_together(desk: Desk) -> None:
    desk.submit_script(
        BOTH,
        task="grpo",
        rewards=["exact_match"],
        grpo={"servers": {}},
        kubernetes__kind="jobset",
        kubernetes__samplers={
            "replicas": 2, "gpus": 0, "cpu": 1, "memory": "1Gi", "image": "registry.example/kubetune:1.0",
        },
    )  # fmt: skip
    for labels in (TRAINERS, SAMPLERS):
        for pod in desk.cluster.wait_pods(labels, 2):
            desk.cluster.wait_phase(name_of(pod), "Running")
    (first, _) = sorted(desk.cluster.find("Pod", TRAINERS), key=name_of)
    desk.cluster.wait_log(name_of(first), "asks http://fit-sampler-0-0.fit:8000 http://fit-sampler")
    assert "running" in desk.quick("status", "fit").stdout.splitlines()[0]

    assert "node 0: saved step 7" in desk.quick("stop", "fit").stdout
    desk.cluster.wait_pods(SAMPLERS, 0)
    assert desk.cluster.find("Pod", TRAINERS) == []
    assert ", stopped" in desk.quick("status", "fit").stdout

    desk.quick("resume", "fit")
    desk.cluster.wait_pods(SAMPLERS, 2)
    desk.cluster.wait_pods(TRAINERS, 2)
    (desk.cluster.claim_folder("fit-outputs") / "go").touch()
    desk.cluster.wait_condition("JobSet", "fit", "Completed")
    # Nobody pays for servers that nobody asks any more.
    desk.cluster.wait_pods(SAMPLERS, 0)
    assert "done" in desk.quick("status", "fit").stdout.splitlines()[0]


@pytest.mark.slow
def test_a_run_learns_from_what_its_pods_draw(
    cluster: Cluster, tmp_path: Path, model: Path
) -> None:
    """The trainer is the real one, and the servers speak vLLM's protocol."""
    samplers = {
        "replicas": 2, "gpus": 0, "cpu": 1, "memory": "1Gi", "image": "registry.example/kubetune:1.0",
    }  # fmt: skip
    changes = {
        "task": "grpo",
        "rewards": [{"name": "length", "settings": {"target": 4}}],
        "grpo": {
            "servers": {"lag": 1, "timeout_seconds": 120},
            "num_generations": 4,
            "max_completion_length": 8,
        },
        "data": {"train": "train.jsonl", "max_length": 64},
        "training": {"global_batch_size": 4, "max_steps": 4, "save_steps": 2, "compile": False},
        "kubernetes.kind": "jobset",
        "kubernetes.samplers": samplers,
        "kubernetes.env": {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    }
    desk = furnish(cluster, tmp_path, model, **changes)

    def with_servers(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for template in _templates(objects):
            (container,) = template["spec"]["containers"]
            if container["name"] == "sampler":
                program = f"mkdir -p /tmp/served && exec python -m tests.vllm_server {model} /tmp/served 8000"
                container["command"] = ["sh", "-c", program]
                del container["readinessProbe"]
        return objects

    with desk.at():
        config = load_config(tmp_path / "run.yaml", environ={})
        files = local_files(config)
        submit(Client(), config, files, confirm=lambda question: True, change=with_servers)
    cluster.wait_condition("JobSet", "fit", "Completed", seconds=240)
    run_dir = desk.run_folder()
    assert len(list((run_dir / "rollouts").glob("step-*.jsonl"))) == 4
    assert "done" in desk.quick("status", "fit").stdout.splitlines()[0]
