"""Runs of a namespace by their name: the ConfigMap of a run holds its config, so every verb needs no more."""

from __future__ import annotations

import io
import re

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kubetune.config.resolved import load_resolved
from kubetune.config.schema import Config
from kubetune.config.schema.quantities import DNS_NAME
from kubetune.errors import ConfigError
from kubetune.k8s.api.client import Cluster
from kubetune.k8s.api.kinds import WORKLOADS
from kubetune.k8s.cluster import pods
from kubetune.k8s.manifests.run_spec import (
    COMPONENT,
    MANAGED_BY,
    TRAINER,
    RunSpec,
    spec_of,
)

CONFIG_KEY = "run.yaml"


def workload_kind(spec: RunSpec) -> str:
    """Return the Kubernetes kind that runs the pods."""
    return WORKLOADS[spec.kubernetes.kind].name


def list_runs(cluster: Cluster) -> list[str]:
    """Return the names of the runs in the namespace."""
    names = []
    for config_map in cluster.list("ConfigMap", {MANAGED_BY: "kubetune", COMPONENT: TRAINER}):
        # The ConfigMap of a run's data has the same labels, and no config.
        if CONFIG_KEY in (config_map.get("data") or {}):
            names.append(pods.name_of(config_map))
    return sorted(names)


def find_run(cluster: Cluster, name: str) -> RunSpec:
    """Return the run of that name. Raise ConfigError, with the names that exist, where there is none."""
    spec = read_run(cluster, name)
    if spec is None:
        cluster.require_namespace()
        names = ", ".join(list_runs(cluster)) or "none"
        raise ConfigError(
            f"there is no run {name or repr(name)} in namespace {cluster.namespace}; runs there: {names}. "
            "-n names another namespace"
        )
    return spec


def read_run(cluster: Cluster, name: str) -> RunSpec | None:
    """Return the run of that name with the files that travel with it, by their name in the ConfigMap; or None."""
    # Names that no object can have, such as none or two dots, would ask for something else.
    if not re.fullmatch(DNS_NAME, name):
        return None
    config_map = cluster.get("ConfigMap", name)
    if config_map is None:
        return None
    text = (config_map.get("data") or {}).get(CONFIG_KEY)
    if text is None or pods.labels_of(config_map).get(MANAGED_BY) != "kubetune":
        raise ConfigError(
            f"ConfigMap {name} in namespace {cluster.namespace} is none of kubetune's; use another name"
        )

    # The ConfigMap holds everything that the run's manifests are made from.
    config = _config_of(text, f"ConfigMap {name} in namespace {cluster.namespace}, {CONFIG_KEY}")
    carried = cluster.get("ConfigMap", f"{name}-data") or {}
    spec = spec_of(config, carried.get("data")).in_namespace(cluster.namespace)
    # An overlay of kustomize may have moved it, or put something before its name.
    if spec.name != name:
        spec = spec.renamed(name)
    return spec


def _config_of(text: str, where: str) -> Config:
    """Return the config in a run's ConfigMap. Raise ConfigError where somebody, or a newer kubetune, changed it."""
    try:
        tree = YAML(typ="safe", pure=True).load(io.StringIO(text))
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: no YAML ({' '.join(str(error).split())[:200]}); put back what was there"
        ) from None
    return load_resolved(tree, where)
