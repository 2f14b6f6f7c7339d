"""Path at the API server of each kind of object that a run is made of, and what to install where one is missing."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from kubetune.k8s.manifests.kinds.registry import KINDS as WORKLOAD_NAMES
from kubetune.k8s.manifests.kinds.registry import kind_of

VOLCANO_RELEASE = "install Volcano, or choose another kubernetes.scheduling.gang"
MONITORING = (
    "install the Prometheus operator, or leave out tracking.prometheus.pod_monitor and alerts"
)


@dataclass(frozen=True)
class Kind:
    """One kind in one API version. `install` says how a cluster gets it; None: every cluster has it."""

    name: str
    api_version: str
    plural: str
    install: str | None = None
    is_namespaced: bool = True

    @property
    def group(self) -> str:
        """API group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """URL path of all objects of a namespace, of one of them, or of a part of one."""
        root = "apis" if self.group else "api"
        space = ("namespaces", namespace) if self.is_namespaced else ()
        parts = [root, *self.api_version.split("/"), *space, self.plural, name, subresource]
        return "/" + "/".join(quote(part, safe="") for part in parts if part)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("Namespace", "v1", "namespaces", is_namespaced=False),
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

WORKLOADS_OF_KUEUE = {
    f"Workload.{version}": Kind("Workload", f"kueue.x-k8s.io/{version}", "workloads")
    for version in ("v1beta2", "v1beta1")
}
"""Kueue's own record of what it holds back and lets go, in the versions that it has served; newest first."""

QUEUES_OF_KUEUE = {
    f"LocalQueue.{version}": Kind("LocalQueue", f"kueue.x-k8s.io/{version}", "localqueues")
    for version in ("v1beta2", "v1beta1")
}
"""What `kubernetes.queue` names, in the same versions."""

KINDS.update({**WORKLOADS_OF_KUEUE, **QUEUES_OF_KUEUE})


WORKLOADS: dict[str, Kind] = {}
"""Kinds that run the pods, by the `kind` of the config."""

for _name in WORKLOAD_NAMES:
    _workload = kind_of(_name)
    for _resource in (_workload.resource, *_workload.others):
        KINDS[_resource.name] = Kind(*_resource, _workload.install)
    WORKLOADS[_name] = KINDS[_workload.name]
