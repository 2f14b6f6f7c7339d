"""The server-side defaults that clients and controllers look at (`kubectl rollout`, `diff`, status lines)."""

from __future__ import annotations

import base64

from standin.state.objects import Object, pod_templates

_POD_DEFAULTS = {
    "terminationGracePeriodSeconds": 30,
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "securityContext": {},
}
_DEFAULTS: dict[str, Object] = {
    "Job": {"parallelism": 1, "backoffLimit": 6, "completionMode": "NonIndexed", "suspend": False},
    "StatefulSet": {
        "replicas": 1,
        "podManagementPolicy": "OrderedReady",
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
    },
    "Deployment": {"replicas": 1, "strategy": {"type": "RollingUpdate"}},
    "Service": {"type": "ClusterIP"},
}
_WITH_PODS = ("Pod", "Job", "StatefulSet", "Deployment")
# Without a limit of its own a Job whose indexes have one fails by them alone.
_NO_LIMIT = 2**31 - 1


def fill_defaults(obj: Object) -> None:
    """Complete an object in place, as admission does before it is stored."""
    kind = obj["kind"]
    spec = obj.get("spec")
    if kind == "Namespace":
        labels = obj["metadata"].setdefault("labels", {})
        labels["kubernetes.io/metadata.name"] = obj["metadata"].get("name", "")
    if kind == "Job" and spec:
        _fill_job(spec)
    if spec is not None:
        for key, value in _DEFAULTS.get(kind, {}).items():
            spec.setdefault(key, value)
    if kind in _WITH_PODS:
        for _, template in pod_templates(obj):
            pod_spec = template.setdefault("spec", {})
            for key, value in _POD_DEFAULTS.items():
                pod_spec.setdefault(key, value)
            # A Job has to name its policy.
            if kind != "Job":
                pod_spec.setdefault("restartPolicy", "Always")
    if kind == "Secret" and "stringData" in obj:
        data = dict(obj.get("data", {}))
        for key, text in obj.pop("stringData").items():
            data[key] = base64.b64encode(text.encode()).decode()
        obj["data"] = data


def _fill_job(spec: Object) -> None:
    """Fill in the defaults of a Job that depend on other fields."""
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = 1
    if spec.get("backoffLimitPerIndex") is not None:
        spec.setdefault("backoffLimit", _NO_LIMIT)
    replacement = "TerminatingOrFailed"
    if spec.get("podFailurePolicy"):
        replacement = "Failed"
    spec.setdefault("podReplacementPolicy", replacement)
