"""Rights: an identity without any for the pods, and the fewest that people who operate runs need."""

from __future__ import annotations

from kubetune.k8s.manifests.kinds.gang import POD_GROUP, gang
from kubetune.k8s.manifests.kinds.registry import kind_of
from kubetune.k8s.manifests.spec import Manifest, RunSpec

GROUP = "rbac.authorization.k8s.io"
OPERATE = ["get", "list", "watch", "create", "patch", "delete"]


def _rule(group: str, resources: list[str], verbs: list[str]) -> Manifest:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}


def service_account(spec: RunSpec) -> list[Manifest]:
    """The pods' identity. It has no rights and no token: nothing in a pod talks to the API server."""
    if spec.kubernetes.service_account:
        return []
    account = spec.manifest(
        "v1", "ServiceAccount", spec.name, "identity", automountServiceAccountToken=False
    )
    return [account]


def _rights_in_queue() -> list[Manifest]:
    """Return the rules for Kueue: by Workloads `stop` keeps a run from its queue, and `status` tells why it waits."""
    return [
        _rule("kueue.x-k8s.io", ["workloads"], ["get", "list", "patch"]),
        _rule("kueue.x-k8s.io", ["localqueues"], ["get", "list"]),
    ]


def operator_role(spec: RunSpec) -> list[Manifest]:
    """Role and RoleBinding of those the config names as operators; nothing when it names none.

    They are the rights of kubetune's own verbs for this kind of run. None of them reads Secrets, but that keeps none
    secret: a patch answers with the whole object, and whoever may create pods may mount any Secret of the namespace.
    """
    k = spec.kubernetes
    if not k.operators:
        return []
    name = f"{spec.name}-operator"
    kind = kind_of(k.kind)
    extras = kind.rbac(spec)
    extras += [("apps", ["deployments"])] if k.tensorboard or k.ui else []
    if gang(spec) == "volcano" and not kind.is_grouped_by_operator:
        extras.append((POD_GROUP.partition("/")[0], ["podgroups"]))
    if watched := spec.config.tracking.prometheus:
        kinds = ["podmonitors"] * watched.pod_monitor + ["prometheusrules"] * watched.alerts
        extras += [("monitoring.coreos.com", kinds)] if kinds else []
    rules = [
        *(_rule(group, resources, OPERATE) for group, resources in extras),
        _rule("", ["services", "persistentvolumeclaims", "configmaps", "serviceaccounts"], OPERATE),
        *(_rights_in_queue() if k.queue else ()),
        _rule("networking.k8s.io", ["networkpolicies"], OPERATE),
        _rule("", ["secrets"], ["create", "patch", "delete"]),
        _rule("", ["pods"], ["get", "list", "watch", "create", "patch", "delete"]),
        _rule("", ["pods/log", "events"], ["get", "list", "watch"]),
        _rule("", ["pods/exec", "pods/portforward"], ["get", "create"]),
    ]
    subjects = [
        {"kind": o.kind, "name": o.name, "namespace": k.namespace}
        if o.kind == "ServiceAccount"
        else {"kind": o.kind, "apiGroup": GROUP, "name": o.name}
        for o in k.operators
    ]
    reference = {"apiGroup": GROUP, "kind": "Role", "name": name}
    return [
        spec.manifest(f"{GROUP}/v1", "Role", name, "identity", rules=rules),
        spec.manifest(
            f"{GROUP}/v1", "RoleBinding", name, "identity", roleRef=reference, subjects=subjects
        ),
    ]
