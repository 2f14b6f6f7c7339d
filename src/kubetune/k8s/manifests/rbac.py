"""Rights: an identity without any for the pods, and the fewest that people who operate runs need."""

from __future__ import annotations

from kubetune.k8s.manifests.kinds.gang_scheduling import POD_GROUP, gang
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec

GROUP = "rbac.authorization.k8s.io"
OPERATE = ["get", "list", "watch", "create", "patch", "delete"]
READ = ["get", "list", "watch"]


def service_account(spec: RunSpec) -> list[Manifest]:
    """Return the pods' identity. It has no rights and no token: nothing in a pod talks to the API server."""
    if spec.kubernetes.service_account:
        return []
    account = spec.manifest(
        "v1", "ServiceAccount", spec.name, "identity", automountServiceAccountToken=False
    )
    return [account]


def _extra_resources(spec: RunSpec) -> list[tuple[str, list[str]]]:
    """Return the API groups and resources that only some runs have."""
    k = spec.kubernetes
    kind = kind_of(k.kind)
    resources = kind.rbac(spec)
    # Beside those of the kind: extras, the group of pods, and monitoring.
    if k.tensorboard or k.ui:
        resources.append(("apps", ["deployments"]))
    if gang(spec) == "volcano" and not kind.is_grouped_by_operator:
        resources.append((POD_GROUP.partition("/")[0], ["podgroups"]))

    prometheus = spec.config.tracking.prometheus
    if prometheus:
        monitors = []
        if prometheus.pod_monitor:
            monitors.append("podmonitors")
        if prometheus.alerts:
            monitors.append("prometheusrules")
        if monitors:
            resources.append(("monitoring.coreos.com", monitors))
    return resources


def operator_role(spec: RunSpec) -> list[Manifest]:
    """Return Role and RoleBinding of those the config names as operators; nothing when it names none.

    The rights are those that kubetune's own verbs need for this kind of run. None of them reads Secrets, but that does
    not protect Secrets: a patch answers with the whole object, and whoever may create pods may mount any Secret of the
    namespace.
    """
    k = spec.kubernetes
    if not k.operators:
        return []
    # Each right: the API group, empty for the core, its resources, and what may be done with them.
    rights = []
    for group, resources in _extra_resources(spec):
        rights.append((group, resources, OPERATE))

    core = ["services", "persistentvolumeclaims", "configmaps", "serviceaccounts"]
    rights.append(("", core, OPERATE))

    if k.queue:
        # By Workloads `stop` keeps a run from its queue, and `status` shows why it waits.
        rights.append(("kueue.x-k8s.io", ["workloads"], ["get", "list", "patch"]))
        rights.append(("kueue.x-k8s.io", ["localqueues"], ["get", "list"]))

    rights += [
        ("networking.k8s.io", ["networkpolicies"], OPERATE),
        ("", ["secrets"], ["create", "patch", "delete"]),
        ("", ["pods"], OPERATE),
        ("", ["pods/log", "events"], READ),
        # By POST, and by GET where a websocket asks.
        ("", ["pods/exec", "pods/portforward"], ["get", "create"]),
    ]

    rules = []
    for group, resources, verbs in rights:
        rules.append({"apiGroups": [group], "resources": resources, "verbs": verbs})

    subjects = []
    for operator in k.operators:
        # An account belongs to a namespace; users and groups to none.
        if operator.kind == "ServiceAccount":
            subject = {"kind": operator.kind, "name": operator.name, "namespace": k.namespace}
        else:
            subject = {"kind": operator.kind, "apiGroup": GROUP, "name": operator.name}
        subjects.append(subject)

    name = f"{spec.name}-operator"
    role = spec.manifest(f"{GROUP}/v1", "Role", name, "identity", rules=rules)
    binding = spec.manifest(
        f"{GROUP}/v1",
        "RoleBinding",
        name,
        "identity",
        roleRef={"apiGroup": GROUP, "kind": "Role", "name": name},
        subjects=subjects,
    )
    return [role, binding]
