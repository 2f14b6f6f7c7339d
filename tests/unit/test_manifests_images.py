"""Base models that are images of a registry: mounted by Kubernetes, or fetched by the pods."""

from __future__ import annotations

from typing import Any

import pytest

from kubetune.k8s.lint.config import lint
from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.lint.pod_security import beyond_restricted
from kubetune.k8s.manifests import local_files, render
from kubetune.k8s.manifests.pod_templates import pod_templates
from kubetune.k8s.manifests.run_spec import RunSpec
from standin.schemas import NEWEST, problems
from tests.golden.made import MINIMAL, planned, trainer_pods, variables

DIGEST = f"sha256:{'1a' * 32}"
BY_DIGEST = f"model=oci://registry.example:5000/team/bot@{DIGEST}"
BY_TAG = "model=oci://registry.example:5000/team/bot:1"
VOLUMES = "kubernetes.image_volumes=true"
LOGIN = "kubernetes.image_pull_secrets=[regcred]"


def made_of(*overrides: str) -> list[dict[str, Any]]:
    config, plan = planned(*overrides, file=MINIMAL)
    return render(config, plan, local_files(config))


def told(*overrides: str) -> list[str]:
    """Return the keys of what lint says, errors with a mark."""
    config, plan = planned("compute.cpu=1", *overrides, file=MINIMAL)
    files = local_files(config)
    findings = lint(RunSpec.of(config, plan, files), render(config, plan, files))
    return [finding.key + "!" * finding.fatal for finding in findings]


def test_kubernetes_mounts_it_where_the_run_looks_for_it() -> None:
    objects = made_of(BY_DIGEST, VOLUMES, LOGIN, "name=fit")
    (pod,) = trainer_pods(objects)
    (volume,) = (v for v in pod["volumes"] if v["name"] == "base")
    assert volume["image"] == {"reference": f"registry.example:5000/team/bot@{DIGEST}"}
    (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "base")
    place = "/images/oci/registry.example+5000/team/bot/" + DIGEST.replace(":", "-")
    assert mount == {"name": "base", "mountPath": place, "readOnly": True}
    # Kubelet has the pod's secrets, so the pod itself needs none.
    assert "docker" not in [v["name"] for v in pod["volumes"]]
    assert list(beyond_restricted(pod)) == []
    for obj in objects:
        assert not problems(obj, NEWEST)
    assert not list(check_objects(objects))


def test_without_image_volumes_pods_fetch_it_with_the_secret_of_the_registry() -> None:
    (pod,) = trainer_pods(made_of(BY_TAG, LOGIN, "name=fit"))
    (volume,) = (v for v in pod["volumes"] if v["name"] == "docker")
    items = [{"key": ".dockerconfigjson", "path": "config.json"}]
    assert volume["secret"] == {"secretName": "regcred", "items": items}
    env = variables(pod["containers"][0])
    assert (env["DOCKER_CONFIG"], env["KUBETUNE_IMAGES"]) == (
        "/etc/kubetune-docker",
        "/cache/images",
    )


def test_what_is_fetched_first_lies_where_all_pods_see_it() -> None:
    objects = made_of(BY_TAG, "name=fit", "kubernetes.initialisers=[model]")
    places = set()
    for obj in objects:
        for _, template in pod_templates(obj):
            places.add(variables(template["spec"]["containers"][0])["KUBETUNE_IMAGES"])
    assert places == {"/outputs/.cache/images"}


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([BY_DIGEST, VOLUMES], []),
        ([BY_TAG], []),
        ([BY_TAG, VOLUMES], ["kubernetes.image_volumes!"]),
        ([VOLUMES], ["kubernetes.image_volumes"]),
    ],
)
def test_lint_knows_what_goes_together(overrides: list[str], keys: list[str]) -> None:
    assert told(*overrides) == keys


GRPO = (
    *("task=grpo", "lora={r: 16}", "rewards=[exact_match]", "grpo={servers: {}}"),
    *("kubernetes.samplers={replicas: 1}", "kubernetes.scheduling={gang: none}"),
)


def test_servers_that_draw_have_the_image_as_a_folder() -> None:
    assert told(*GRPO, BY_DIGEST) == ["kubernetes.samplers!"]
    assert told(*GRPO, BY_DIGEST, VOLUMES) == []
    for obj in made_of(*GRPO, BY_DIGEST, VOLUMES, "name=fit"):
        if obj["metadata"]["name"] == "fit-sampler" and obj["kind"] == "Job":
            server = obj["spec"]["template"]["spec"]["containers"][0]
            assert server["args"][2].startswith(
                "/images/oci/registry.example+5000/team/bot/sha256-"
            )
