"""JobSet's restart in place: after a failure the containers of all pods start again, and no pod leaves its node.

An agent beside each trainer, JobSet's own, tells the controller which start its pod is at and holds the trainer back
until all pods are at the same one. It needs a token, which is mounted into the agent alone. To the run it is a kill
like any other: it goes on from its newest checkpoint.
Source: KEP-467 of kubernetes-sigs/jobset and its example of the sidecar mode; KEP-5532 of Kubernetes.
"""

from __future__ import annotations

from kubetune.errors import FINAL, OK
from kubetune.manifests.pod import limited, restricted
from kubetune.manifests.rbac import GROUP
from kubetune.manifests.spec import TRAINER, Manifest, RunSpec

AGENT = "in-place-restart-agent"
TOKEN = "agent-token"
ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
UNLIMITED = 2**31 - 1
"""The back-off limit that JobSet demands: a pod that failed is replaced, and never fails its Job."""
_BARRIER_SECONDS = 3600


def restarts_in_place(spec: RunSpec) -> bool:
    """A run whose containers start again within their pods."""
    return spec.kubernetes.kind == "jobset" and spec.kubernetes.jobset.restart == "in_place"


def with_agent(spec: RunSpec, template: Manifest) -> Manifest:
    """The trainer's pod template with the agent, and with rules by which ends that may pass start the pod's containers
    again."""
    pod = template["spec"]
    (trainer,) = pod["containers"]
    # Ends that another start would only repeat match no rule: they end the pod, and by the Job's policy the run.
    rules = [
        {
            "action": "RestartAllContainers",
            "exitCodes": {"operator": "NotIn", "values": sorted((OK, *FINAL))},
        }
    ]
    changed = {
        "initContainers": [_agent(spec), *pod.get("initContainers", ())],
        "containers": [{**trainer, "restartPolicy": "Never", "restartPolicyRules": rules}],
        "volumes": [*pod["volumes"], _token()],
    }
    return {**template, "spec": {**pod, **changed}}


def _agent(spec: RunSpec) -> Manifest:
    variables = {
        "JOBSET_NAME": "metadata.annotations['jobset.sigs.k8s.io/jobset-name']",
        "POD_NAME": "metadata.name",
    }
    amounts = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
    return {
        "name": AGENT,
        "image": spec.kubernetes.jobset.agent,
        "restartPolicy": "Always",
        "restartPolicyRules": [
            {"action": "RestartAllContainers", "exitCodes": {"operator": "NotIn", "values": [OK]}},
        ],
        # It answers once all pods are at the same start: until then the trainer is not begun.
        "startupProbe": {
            "httpGet": {"path": "/barrier-is-down", "port": 8081},
            "periodSeconds": 1,
            "failureThreshold": _BARRIER_SECONDS,
        },
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in variables.items()
        ],
        "resources": limited(spec, amounts),
        "volumeMounts": [{"name": TOKEN, "mountPath": ACCOUNT_FOLDER, "readOnly": True}],
        "securityContext": restricted(),
    }


def _token() -> Manifest:
    """The volume that Kubernetes mounts into every container by itself, unless it is told not to."""
    sources: list[Manifest] = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {
            "downwardAPI": {
                "items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]
            }
        },
    ]
    return {"name": TOKEN, "projected": {"sources": sources}}


def job_policy() -> Manifest:
    """Fields of the trainer's Job: only ends of the trainer that are final fail it, not those of the agent."""
    final = {"containerName": TRAINER, "operator": "In", "values": list(FINAL)}
    rules = [{"action": "FailJob", "onExitCodes": final}]
    return {
        "backoffLimit": UNLIMITED,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
    }


def failure_policy(policy: Manifest) -> Manifest:
    """A JobSet's failure policy with restarts in place: its Job fails for good reasons only."""
    rules = [rule for rule in policy["rules"] if rule["action"] == "FailJobSet"]
    return {**policy, "restartStrategy": "InPlaceRestart", "rules": rules}


def agent_role(spec: RunSpec) -> list[Manifest]:
    """Role and RoleBinding of the agent: it notes its start on its own pod and watches the JobSet. Else nothing."""
    if not restarts_in_place(spec):
        return []
    name = f"{spec.name}-{AGENT}"
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
        {
            "apiGroups": ["jobset.x-k8s.io"],
            "resources": ["jobsets"],
            "resourceNames": [spec.name],
            "verbs": ["get", "list", "watch"],
        },
    ]
    subject = {
        "kind": "ServiceAccount",
        "name": spec.service_account,
        "namespace": spec.kubernetes.namespace,
    }
    reference = {"apiGroup": GROUP, "kind": "Role", "name": name}
    return [
        spec.manifest(f"{GROUP}/v1", "Role", name, "identity", rules=rules),
        spec.manifest(
            f"{GROUP}/v1", "RoleBinding", name, "identity", roleRef=reference, subjects=[subject]
        ),
    ]
