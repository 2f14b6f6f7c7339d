"""The kinds this server knows, and how their URLs, short names and subresources are called."""

from __future__ import annotations

from dataclasses import dataclass

from standin.state.objects import Object


@dataclass(frozen=True)
class Resource:
    """One served kind in one API version."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def group_resource(self) -> str:
        """`jobs.batch`, as error messages name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def categories(self) -> list[str]:
        """Other names for it: `kubectl get all` asks for this category."""
        if self.kind in ("Pod", "Service", "Job", "StatefulSet", "Deployment"):
            return ["all"]
        return []

    @property
    def custom(self) -> bool:
        """Defined by a CustomResourceDefinition on a real cluster: no strategic merge patch."""
        return self.group in _CUSTOM_GROUPS


_CUSTOM_GROUPS = (
    *("jobset.x-k8s.io", "kubeflow.org", "trainer.kubeflow.org"),
    *("scheduling.volcano.sh", "kueue.x-k8s.io", "monitoring.coreos.com"),
)
_STATUS = ("status",)
RESOURCES = [
    Resource("", "v1", "Namespace", "namespaces", False, ("ns",), _STATUS),
    Resource("", "v1", "Node", "nodes", False, ("no",), _STATUS),
    Resource(
        "", "v1", "Pod", "pods", True, ("po",), ("status", "log", "exec", "portforward", "eviction")
    ),
    Resource("", "v1", "Service", "services", True, ("svc",), _STATUS),
    Resource("", "v1", "ConfigMap", "configmaps", True, ("cm",)),
    Resource("", "v1", "Secret", "secrets"),
    Resource("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims", True, ("pvc",), _STATUS),
    Resource("", "v1", "ServiceAccount", "serviceaccounts", True, ("sa",)),
    Resource("", "v1", "Event", "events", True, ("ev",)),
    Resource("batch", "v1", "Job", "jobs", True, (), _STATUS),
    Resource("apps", "v1", "StatefulSet", "statefulsets", True, ("sts",), _STATUS),
    Resource("apps", "v1", "Deployment", "deployments", True, ("deploy",), _STATUS),
    Resource("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", True, ("netpol",)),
    Resource("rbac.authorization.k8s.io", "v1", "Role", "roles"),
    Resource("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings"),
    Resource(
        "authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", False
    ),
    Resource("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", True, (), _STATUS),
    Resource("kubeflow.org", "v1", "PyTorchJob", "pytorchjobs", True, (), _STATUS),
    Resource("trainer.kubeflow.org", "v1alpha1", "TrainJob", "trainjobs", True, (), _STATUS),
    Resource("trainer.kubeflow.org", "v1alpha1", "TrainingRuntime", "trainingruntimes"),
    Resource(
        "trainer.kubeflow.org",
        "v1alpha1",
        "ClusterTrainingRuntime",
        "clustertrainingruntimes",
        False,
    ),
    Resource("kueue.x-k8s.io", "v1beta2", "ClusterQueue", "clusterqueues", False, ("cq",), _STATUS),
    Resource(
        "kueue.x-k8s.io", "v1beta2", "ResourceFlavor", "resourceflavors", False, ("flavor", "rf")
    ),
    Resource(
        "kueue.x-k8s.io", "v1beta2", "WorkloadPriorityClass", "workloadpriorityclasses", False
    ),
    Resource("kueue.x-k8s.io", "v1beta2", "LocalQueue", "localqueues", True, (), _STATUS),
    Resource("kueue.x-k8s.io", "v1beta2", "Workload", "workloads", True, ("wl",), _STATUS),
    Resource(
        "scheduling.volcano.sh",
        "v1beta1",
        "PodGroup",
        "podgroups",
        True,
        ("podgroup-v1beta1",),
        _STATUS,
    ),
    Resource("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors", True, ("pmon",)),
    Resource(
        "monitoring.coreos.com", "v1", "PrometheusRule", "prometheusrules", True, ("promrule",)
    ),
]
BY_KIND = {resource.kind: resource for resource in RESOURCES}
_BY_TYPE = {(resource.api_version, resource.kind): resource for resource in RESOURCES}
_BY_PATH = {(resource.group, resource.version, resource.plural): resource for resource in RESOURCES}


def resource_of(obj: Object) -> Resource:
    """Return the kind of an object. Its group counts too, since several groups may have a kind of the same name."""
    return _BY_TYPE[obj["apiVersion"], obj["kind"]]


def resource_at(group: str, version: str, plural: str) -> Resource | None:
    """Return the kind that URLs name so; None if there is none."""
    return _BY_PATH.get((group, version, plural))
