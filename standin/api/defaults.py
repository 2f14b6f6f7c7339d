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


def fill_defaults(obj: Object) -> None:
    """Complete an object in place, as admission does before it is stored."""
    spec, kind = obj.get("spec"), obj["kind"]
    if kind == "Job" and spec:
        if spec.get("completions") is None and spec.get("parallelism") is None:
            spec["completions"] = 1
        if spec.get("backoffLimitPerIndex") is not None:
            spec.setdefault("backoffLimit", 2**31 - 1)
        spec.setdefault(
            "podReplacementPolicy",
            "Failed" if spec.get("podFailurePolicy") else "TerminatingOrFailed",
        )
    if spec is not None:
        for key, value in _DEFAULTS.get(kind, {}).items():
            spec.setdefault(key, value)
    if kind in ("Pod", "Job", "StatefulSet", "Deployment"):
        for _, template in pod_templates(obj):
            pod_spec = template.setdefault("spec", {})
            for key, value in _POD_DEFAULTS.items():
                pod_spec.setdefault(key, value)
            if kind != "Job":
                pod_spec.setdefault("restartPolicy", "Always")
    if kind == "Secret" and "stringData" in obj:
        encoded = {
            key: base64.b64encode(text.encode()).decode()
            for key, text in obj.pop("stringData").items()
        }
        obj["data"] = obj.get("data", {}) | encoded
