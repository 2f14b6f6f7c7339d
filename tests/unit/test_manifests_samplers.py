"""Pods with vLLM beside the trainer's: one JobSet that starts, stops and ends both."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from kubetune.config.schema import Config
from kubetune.k8s.manifests import render
from kubetune.plan.plan import make_plan
from standin.schemas import NEWEST, OLDEST, problems
from tests.golden.made import the, variables


def config_of(**changes: Any) -> Config:
    kubernetes = {
        "kind": "jobset",
        "image": "registry.example.com/kubetune:1",
        "namespace": "ml",
        "samplers": {"replicas": 2, "gpus": 4},
        **changes.pop("kubernetes", {}),
    }
    section: dict[str, Any] = {
        "name": "sums",
        "task": "grpo",
        "model": {"path": "org/model", "revision": "main", "dtype": "bfloat16"},
        "data": {"train": "org/prompts", "max_length": 512},
        "lora": {"r": 24},
        "rewards": ["exact_match"],
        "grpo": {"servers": {"lag": 1}, "max_completion_length": 256, "temperature": 0.8},
        "compute": {"nodes": 2, "gpus_per_node": 1, "cpu": 8, "memory": "64Gi"},
        "kubernetes": kubernetes,
        **changes,
    }
    return Config.model_validate(section)


def objects_of(**changes: Any) -> list[dict[str, Any]]:
    config = config_of(**changes)
    return render(config, make_plan(config))


def jobs_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    jobset = the(objects, "JobSet", "sums")
    return {entry["name"]: entry for entry in jobset["spec"]["replicatedJobs"]}


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_strict_servers_accept_it(version: str) -> None:
    for obj in objects_of():
        assert not problems(obj, version)


def test_servers_take_what_the_run_sends_them() -> None:
    job = jobs_of(objects_of())["sampler"]
    assert job["template"]["spec"]["completions"] == 2
    (server,) = pod_of(job)["containers"]
    assert server["command"][:3] == ["vllm", "serve", "org/model"]
    for word in (
        "--enable-lora", "--max-lora-rank=32", "--max-loras=2", "--max-model-len=768", "--revision=main",
        "--dtype=bfloat16", "--tensor-parallel-size=4", "--logprobs-mode=processed_logprobs",
    ):  # fmt: skip
        assert word in server["command"]
    assert variables(server)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "4"
    plain = jobs_of(objects_of(grpo={"servers": {}}))["sampler"]
    assert not any("logprobs-mode" in word for word in pod_of(plain)["containers"][0]["command"])


def test_the_trainer_knows_their_addresses_by_the_name_of_the_run() -> None:
    objects = objects_of()
    (trainer,) = pod_of(jobs_of(objects)["node"])["containers"]
    names = [entry["name"] for entry in trainer["env"]]
    # Kubernetes fills in variables that come before.
    assert names.index("KUBETUNE_RUN") < names.index("KUBETUNE_SAMPLERS")
    run = "$(KUBETUNE_RUN)"
    assert variables(trainer)["KUBETUNE_SAMPLERS"].split() == [
        f"http://{run}-sampler-0-0.{run}:8000",
        f"http://{run}-sampler-0-1.{run}:8000",
    ]


def test_both_groups_see_the_adapters_at_one_path() -> None:
    objects = objects_of()
    jobs = jobs_of(objects)
    claims = []
    for name in ("node", "sampler"):
        pod = pod_of(jobs[name])
        (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "outputs")
        assert mount["mountPath"] == "/outputs"
        claims += [volume for volume in pod["volumes"] if volume["name"] == "outputs"]
    assert claims[0] == claims[1]
    claim = the(objects, "PersistentVolumeClaim", "sums-outputs")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_run_ends_when_the_trainer_does() -> None:
    spec = the(objects_of(), "JobSet", "sums")["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["node"]}
    jobs = jobs_of(objects_of(kubernetes={"initialisers": ["model"]}))
    assert list(jobs) == ["preprocess", "node", "sampler"]
    # Neither holds a GPU while the model is fetched, and the trainer does not wait for the servers to end.
    for name in ("node", "sampler"):
        assert [before["name"] for before in jobs[name]["dependsOn"]] == ["preprocess"]
    without = objects_of(kubernetes={"samplers": None}, grpo={"servers": "http://10.0.0.7:8000"})
    assert "successPolicy" not in the(without, "JobSet", "sums")["spec"]
    assert "sampler" not in jobs_of(without)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kubernetes": {"kind": "job"}}, "expected jobset"),
        ({"grpo": {}}, "grpo.servers: {}"),
        ({"task": "causal_lm", "rewards": [], "grpo": {}}, "kubernetes.samplers: draw for"),
        ({"grpo": {"servers": "http://10.0.0.7:8000"}}, "leave one of both out"),
        ({"kubernetes": {"samplers": None}}, "grpo.servers.urls: missing"),
    ],
)
def test_pods_that_nobody_would_ask_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        config_of(**changes)
