"""Path at the API server of each kind of object that a run is made of, and what to install where one is missing."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from kubetune.k8s.manifests.kinds.registry import KINDS as WORKLOAD_NAMES
from kubetune.k8s.manifests.kinds.registry import kind_of

KUEUE_RELEASE = "install Kueue, or leave out kubernetes.queue"
VOLCANO_RELEASE = "install Volcano, or choose another kubernetes.scheduling.gang"
MONITORING = (
    "install the Prometheus operator, or leave out tracking.prometheus.pod_monitor and alerts"
)


@dataclass(frozen=True)
class Kind:
    """One kind in one API version."""

    name: str
    api_version: str  # with its group: apps/v1
    plural: str  # in paths
    install: str | None = None  # how a cluster gets it; None: every cluster has it
    is_namespaced: bool = True

    @property
    def is_built_in(self) -> bool:
        """True if every cluster has it."""
        return self.install is None

    @property
    def group(self) -> str:
        """Return the API group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Return the URL path of all objects of a namespace, of one of them, or of a part of one.

        /apis/apps/v1/namespaces/team/deployments, …/deployments/web, …/deployments/web/scale
        """
        parts = ["apis" if self.group else "api", *self.api_version.split("/")]
        if self.is_namespaced:
            parts += ["namespaces", namespace]
        parts += [self.plural, name, subresource]
        return "/" + "/".join(quote(part, safe="") for part in parts if part)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("Namespace", "v1", "namespaces", is_namespaced=False),
        Kind("Node", "v1", "nodes", is_namespaced=False),
        Kind("ServiceAccount", "v1", "serviceaccounts"),
        Kind("Role", "rbac.authorization.k8s.io/v1", "roles"),
        Kind("RoleBinding", "rbac.authorization.k8s.io/v1", "rolebindings"),
        Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
        Kind("ConfigMap", "v1", "configmaps"),
        Kind("Secret", "v1", "secrets"),
        Kind("PersistentVolumeClaim", "v1", "persistentvolumeclaims"),
        Kind("Service", "v1", "services"),
        Kind("Pod", "v1", "pods"),
        Kind("Event", "v1", "events"),
        Kind(
            "SelfSubjectAccessReview",
            "authorization.k8s.io/v1",
            "selfsubjectaccessreviews",
            is_namespaced=False,
        ),
        Kind("Deployment", "apps/v1", "deployments"),
        Kind("PodGroup", "scheduling.volcano.sh/v1beta1", "podgroups", VOLCANO_RELEASE),
        Kind("PodMonitor", "monitoring.coreos.com/v1", "podmonitors", MONITORING),
        Kind("PrometheusRule", "monitoring.coreos.com/v1", "prometheusrules", MONITORING),
    )
}

# In the versions that Kueue has served, newest first. A Workload is its own record of what it holds back and lets go; a
# LocalQueue is what `kubernetes.queue` names.
WORKLOADS_OF_KUEUE: dict[str, Kind] = {}
QUEUES_OF_KUEUE: dict[str, Kind] = {}

for _version in ("v1beta2", "v1beta1"):
    _group = f"kueue.x-k8s.io/{_version}"
    WORKLOADS_OF_KUEUE[f"Workload.{_version}"] = Kind(
        "Workload", _group, "workloads", KUEUE_RELEASE
    )
    QUEUES_OF_KUEUE[f"LocalQueue.{_version}"] = Kind(
        "LocalQueue", _group, "localqueues", KUEUE_RELEASE
    )

KINDS.update(WORKLOADS_OF_KUEUE)
KINDS.update(QUEUES_OF_KUEUE)

# Kinds that run the pods, by the `kind` of the config.
WORKLOADS: dict[str, Kind] = {}

for _name in WORKLOAD_NAMES:
    _workload = kind_of(_name)
    for _resource in (_workload.resource, *_workload.others):
        KINDS[_resource.name] = Kind(*_resource, _workload.install)
    WORKLOADS[_name] = KINDS[_workload.name]
