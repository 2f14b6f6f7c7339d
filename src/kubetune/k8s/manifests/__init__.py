"""Kubernetes manifests of a run: a pure function from config and plan to plain dicts, and dicts to YAML.

Nothing here talks to a cluster or reads a clock, and only `local_files` reads files: the same config gives the same
bytes on any machine. Not for applying them (cluster). Read `run_spec` first, then `trainer`.
A new kind of workload is one module of `kinds` and its name in the config's `KindName`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kubetune.base.yaml_text import dump
from kubetune.k8s.manifests.configmap import config_maps, local_files, sent_from_outside
from kubetune.k8s.manifests.extra_objects import (
    jupyter,
    tensorboard,
    token_secret,
    token_servers,
    ui,
)
from kubetune.k8s.manifests.initialisers import preprocess_job
from kubetune.k8s.manifests.kinds.registry import KINDS, kind_of
from kubetune.k8s.manifests.monitoring import monitoring
from kubetune.k8s.manifests.network import network_policy
from kubetune.k8s.manifests.rbac import operator_role, service_account
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec
from kubetune.k8s.manifests.storage import claims
from kubetune.k8s.manifests.user_patches import patched
from kubetune.k8s.manifests.waves import in_waves

if TYPE_CHECKING:
    from kubetune.config.schema import Config
    from kubetune.plan.plan import Plan

__all__ = ["KINDS", "dump", "local_files", "render", "secret_templates", "sent_from_outside"]


def render(config: Config, plan: Plan, files: Mapping[str, str] | None = None) -> list[Manifest]:
    """Return all objects of a run, in the order in which they are to be applied.

    `files` is the result of `local_files`: small data files that travel in a ConfigMap.
    Secrets are not among the objects: pods refer to them by name, and `secret_templates` returns which must exist.
    Raise ConfigError when the config has no `kubernetes` section, or for patches that do not fit.
    """
    spec = RunSpec.of(config, plan, files)
    kind = kind_of(spec.kubernetes.kind)

    # A JobSet and a TrainJob hold the preparing Job themselves.
    preparation = []
    if not kind.starts_in_order:
        preparation = preprocess_job(spec)

    # What pods refer to comes before the pods, so that none waits for an account, a file or a volume.
    objects = [
        *service_account(spec),
        *operator_role(spec),
        *network_policy(spec),
        *config_maps(spec),
        *claims(spec),
        *preparation,
        *kind.render(spec),
        *monitoring(spec),
        *tensorboard(spec),
        *ui(spec),
        *jupyter(spec),
    ]

    # Patches come last, so that a user may change the waves too.
    if spec.kubernetes.argocd:
        objects = in_waves(objects)
    return patched(objects, spec.kubernetes.patches)


def secret_templates(spec: RunSpec) -> list[Manifest]:
    """Return the Secrets that the objects of `render` refer to. Their values are empty, for the user to fill in."""
    # Two variables may come from one Secret:
    #     HF_TOKEN: {secret: keys}, WANDB_API_KEY: {secret: keys}   →   keys: {HF_TOKEN: "", WANDB_API_KEY: ""}
    keys: dict[str, dict[str, str]] = {}
    for variable, ref in spec.kubernetes.secrets.items():
        keys.setdefault(ref.secret, {})[ref.key or variable] = ""
    for server in token_servers(spec):
        name, key = token_secret(spec, server)
        keys.setdefault(name, {})[key] = ""

    templates = []
    for name, values in keys.items():
        secret = spec.manifest(
            "v1",
            "Secret",
            name,
            "secret",
            type="Opaque",
            stringData=values,
        )
        templates.append(secret)
    return templates
