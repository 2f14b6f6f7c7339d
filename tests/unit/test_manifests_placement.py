"""Where pods run and what they may use: runtime class, CPU limits, the node's disk, node affinity, claimed devices."""

from __future__ import annotations

from typing import Any

import pytest

from kubetune.config.load import load_config
from kubetune.errors import ConfigError
from kubetune.k8s.lint.config import lint
from kubetune.k8s.manifests import KINDS, local_files, render
from kubetune.k8s.manifests.pod_templates import pod_templates
from kubetune.k8s.manifests.run_spec import RunSpec
from tests.golden.made import FULL, MINIMAL, made, planned, trainer_pods


def every_pod(*overrides: str, kind: str = "job") -> dict[str, dict[str, Any]]:
    """Return one pod spec of each component."""
    templates = [template for obj in made(kind, *overrides) for _, template in pod_templates(obj)]
    return {t["metadata"]["labels"]["app.kubernetes.io/component"]: t["spec"] for t in templates}


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_runtime_class_goes_where_the_gpus_are(kind: str) -> None:
    pods = every_pod("kubernetes.runtime_class=nvidia", kind=kind)
    assert {name: pod.get("runtimeClassName") for name, pod in pods.items()} == {
        "trainer": "nvidia", "preprocess": None, "tensorboard": None, "jupyter": None,
    }  # fmt: skip
    (pod,) = trainer_pods(made("job", "kubernetes.runtime_class=gvisor", file=MINIMAL))
    assert pod["runtimeClassName"] == "gvisor"


@pytest.mark.parametrize("kind", KINDS)
def test_quotas_on_every_container_are_met(kind: str) -> None:
    """A quota of CPU limits or of the node's disk refuses a pod if one of its containers says nothing."""
    for pod in every_pod(
        "kubernetes.cpu_limits=true", "kubernetes.ephemeral_storage=20Gi", kind=kind
    ).values():
        for container in containers(pod):
            resources = container["resources"]
            assert resources["limits"]["cpu"] == resources["requests"]["cpu"]
            assert (
                resources["limits"]["ephemeral-storage"]
                == resources["requests"]["ephemeral-storage"]
                == "20Gi"
            )
    for pod in every_pod(kind=kind).values():
        for container in containers(pod):
            assert "cpu" not in container["resources"]["limits"]
            assert "ephemeral-storage" not in str(container["resources"])


def test_node_affinity_is_beside_the_pods_own() -> None:
    """All that must be in one term, since terms are alternatives; a pod without GPUs stays off those nodes."""
    must = "{key: model, values: [a, b]}, {key: gen, operator: Gt, values: ['8']}"
    wanted = f"[{must}, {{key: z, operator: Exists, weight: 7}}]"
    pods = every_pod(f"kubernetes.node_affinity={wanted}")
    affinity = pods["trainer"]["affinity"]
    assert affinity["nodeAffinity"] == {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {
                    "matchExpressions": [
                        {"key": "model", "operator": "In", "values": ["a", "b"]},
                        {"key": "gen", "operator": "Gt", "values": ["8"]},
                    ]
                }
            ]
        },
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 7, "preference": {"matchExpressions": [{"key": "z", "operator": "Exists"}]}}
        ],
    }
    assert "podAntiAffinity" in affinity
    assert not [name for name, pod in pods.items() if "affinity" in pod and name != "trainer"]
    (alone,) = trainer_pods(made("job", f"kubernetes.node_affinity={wanted}", file=MINIMAL))
    assert list(alone["affinity"]) == ["nodeAffinity"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{key: a}", "needs values"),
        ("{key: a, operator: Exists, values: [b]}", "takes no values"),
        ("{key: a, operator: Gt, values: [many]}", "one whole number"),
        ("{key: a, values: [b], weight: 101}", "weight"),
    ],
)
def test_an_affinity_that_kubernetes_would_refuse_is_refused(entry: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(FULL, overrides=[f"kubernetes.node_affinity=[{entry}]"])


@pytest.mark.parametrize("kind", KINDS)
def test_claimed_devices_take_the_place_of_the_gpu_resource(kind: str) -> None:
    claims = (
        "[{name: gpus, template: eight, gpus: true}, {name: nic, claim: fabric, request: port}]"
    )
    pods = every_pod(f"kubernetes.resource_claims={claims}", kind=kind)
    trainer = pods["trainer"]
    assert trainer["resourceClaims"] == [
        {"name": "gpus", "resourceClaimTemplateName": "eight"},
        {"name": "nic", "resourceClaimName": "fabric"},
    ]
    (container,) = trainer["containers"]
    assert container["resources"]["claims"] == [
        {"name": "gpus"},
        {"name": "nic", "request": "port"},
    ]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert not [name for name, pod in pods.items() if "resourceClaims" in pod and name != "trainer"]
    beside = every_pod("kubernetes.resource_claims=[{name: nic, template: a}]")["trainer"]
    assert beside["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.parametrize(
    ("override", "key", "fatal"),
    [
        (
            "kubernetes.resource_claims=[{name: a, claim: b}]",
            "kubernetes.resource_claims.0.claim",
            False,
        ),
        (
            "kubernetes.resource_claims=[{name: a, template: b}, {name: a, template: c}]",
            "kubernetes.resource_claims.1.name",
            True,
        ),
        ("kubernetes.cpu_limits=true", "kubernetes.cpu_limits", True),
    ],
)
def test_lint(override: str, key: str, fatal: bool) -> None:
    config, plan = planned(override, *(["compute.cpu=null"] if "cpu" in override else []))
    files = local_files(config)
    findings = lint(RunSpec.of(config, plan, files), render(config, plan, files))
    assert [(f.key, f.fatal) for f in findings] == [(key, fatal)]


def test_a_claim_of_gpus_needs_a_run_with_gpus() -> None:
    config, plan = planned(
        "kubernetes.resource_claims=[{name: a, template: b, gpus: true}]", file=MINIMAL
    )
    fatal = [f for f in lint(RunSpec.of(config, plan), render(config, plan)) if f.fatal]
    assert [f.key for f in fatal] == ["kubernetes.resource_claims.0.gpus"]
