"""A run's smoke test as manifests: the same pods on the same nodes, but they test themselves and train nothing.

`kubetune smoke` runs in each pod as a node of the run: it tests ranks, links, devices, and the two volumes.
"""

from __future__ import annotations

from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.pod_templates import pod_templates
from kubetune.k8s.manifests.run_spec import COMPONENT, TRAINER, Manifest
from kubetune.k8s.run_names import CACHE, OUTPUTS, name_beside, run_name
from kubetune.plan.plan import Plan

SUFFIX = "-smoke"
# The first pod waits this long for the last one, whose node may have to pull the image first.
TIMEOUT_SECONDS = 900


def smoke_config(config: Config) -> Config:
    """Return the config of the smoke test, which is tried once. Raise ConfigError without a `kubernetes` section."""
    if config.kubernetes is None:
        raise ConfigError(
            "kubernetes: the section is missing; add at least `kubernetes: {image: …}`"
        )
    k = config.kubernetes
    changes = {
        # A kind that never ends would start the ended test again.
        "kind": "job" if kind_of(k.kind).never_ends else k.kind,
        "max_restarts": 0,
        "preprocess": None,
        "initialisers": (),
        "tensorboard": False,
        "ui": False,
        "jupyter": None,
        # They would never end: no run says that it has.
        "samplers": None,
    }
    grpo = config.grpo
    if k.samplers is not None:
        grpo = grpo.model_copy(update={"servers": None})
    kubernetes = k.model_copy(update=changes)
    name = name_beside(run_name(config.name, config.model.path), SUFFIX)
    return config.model_copy(update={"name": name, "kubernetes": kubernetes, "grpo": grpo})


def testing(objects: list[Manifest], plan: Plan) -> list[Manifest]:
    """Return the same objects, whose trainers run the smoke test."""
    command = [
        *("python", "-P", "-m", "kubetune", "smoke"),
        f"--nodes={plan.nodes}",
        f"--processes={plan.processes_per_node}",
        f"--volume={CACHE}",
        f"--volume={OUTPUTS}",
        f"--timeout={TIMEOUT_SECONDS}",
    ]
    for obj in objects:
        for _, template in pod_templates(obj):
            if template["metadata"]["labels"][COMPONENT] == TRAINER:
                template["spec"]["containers"][0]["command"] = command
    return objects
