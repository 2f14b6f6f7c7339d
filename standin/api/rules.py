"""Validation that schemas cannot say: names, enumerations, immutable fields, operators' webhooks, Pod Security.

A copy of the rules that matter to training workloads, not of everything a real server checks.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator

from standin.state.errors import FORBIDDEN, NOT_FOUND, REQUIRED, Cause, forbidden, unsupported
from standin.state.objects import Object, containers_of, labels_of, namespace_of, pod_templates
from standin.state.store import Store

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
# As the server's message has it.
_QUANTITY_TEXT = "^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$"
_ENUMS = {
    "completionMode": ("Indexed", "NonIndexed"),
    "podReplacementPolicy": ("Failed", "TerminatingOrFailed"),
    "podManagementPolicy": ("OrderedReady", "Parallel"),
}
_BEGIN_WITH_A_LETTER = ("Service", "JobSet", "TrainJob", "PyTorchJob")
_SHORT_NAMES = ("Service", "Namespace", "StatefulSet", "JobSet", "TrainJob", "PyTorchJob")
_RESTART_POLICIES = {
    "Job": ("Never", "OnFailure"),
    "StatefulSet": ("Always",),
    "Deployment": ("Always",),
}
_TRAINER_ENV = {
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
}
_GPU = "nvidia.com/gpu"
_FIXED_IN_JOBSETS = (
    "failurePolicy",
    "managedBy",
    "network",
    "startupPolicy",
    "successPolicy",
    "volumeClaimPolicies",
)
_FIXED_IN_TRAIN_JOBS = (
    "activeDeadlineSeconds",
    "initializer",
    "managedBy",
    "runtimeRef",
    "trainer",
)
# Of pods: what a queue may write.
_PLACEMENT = ("annotations", "labels", "nodeSelector", "schedulingGates", "tolerations")


def broken_rules(obj: Object, old: Object | None) -> Iterator[Cause]:
    """Yield every rule the object breaks; `old` is what it would replace."""
    spec = obj.get("spec") or {}
    kind = obj["kind"]
    yield from _metadata(obj)
    for key in sorted(_ENUMS.keys() & spec.keys()):
        if spec[key] not in _ENUMS[key]:
            yield unsupported(f"spec.{key}", spec[key], _ENUMS[key])
    for path, template in pod_templates(obj):
        yield from _pod(path, template.get("spec") or {}, obj)
    if kind in _KIND_RULES:
        yield from _KIND_RULES[kind](spec, old)
    if kind == "RoleBinding":
        yield from _subjects(obj)


def _metadata(obj: Object) -> Iterator[Cause]:
    kind = obj["kind"]
    name = obj["metadata"].get("name", "x")
    limit = 63 if kind in _SHORT_NAMES else 253
    is_name = _NAME.fullmatch(name) is not None and len(name) <= limit
    if not is_name or (kind in _BEGIN_WITH_A_LETTER and name[0].isdigit()):
        message = f'"{name}": must be a lowercase RFC 1123 name of at most {limit} characters'
        yield Cause("metadata.name", message)
    for value in labels_of(obj).values():
        if not _LABEL.fullmatch(str(value)):
            allowed = "an empty string or consist of alphanumeric characters, '-', '_' or '.' (at most 63)"
            yield Cause("metadata.labels", f'"{value}": a valid label must be {allowed}')


def _pod(path: str, pod: Object, obj: Object) -> Iterator[Cause]:
    if not pod.get("containers"):
        yield Cause(f"{path}.containers", "Required value", REQUIRED)
    allowed = _RESTART_POLICIES.get(obj["kind"])
    policy = pod.get("restartPolicy", "Always")
    if allowed and policy not in allowed:
        yield unsupported(f"{path}.restartPolicy", policy, allowed)
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for claim in _claims_of_kind(obj):
        volumes.add(claim["metadata"]["name"])
    for field in ("initContainers", "containers"):
        for i, container in enumerate(pod.get(field, [])):
            yield from _container(f"{path}.{field}[{i}]", container, volumes)


def _claims_of_kind(obj: Object) -> Iterator[Object]:
    """Yield the claims that a workload makes for its pods, which mount them like volumes of theirs."""
    if obj["kind"] == "StatefulSet":
        yield from obj["spec"].get("volumeClaimTemplates", [])
    if obj["kind"] == "JobSet":
        for policy in obj["spec"].get("volumeClaimPolicies", []):
            yield from policy.get("templates", [])


def _container(path: str, container: Object, volumes: set[str]) -> Iterator[Cause]:
    if not container.get("image"):
        yield Cause(f"{path}.image", "Required value", REQUIRED)
    for i, mount in enumerate(container.get("volumeMounts", [])):
        if mount["name"] not in volumes:
            yield Cause(
                f"{path}.volumeMounts[{i}].name", f'Not found: "{mount["name"]}"', NOT_FOUND
            )
    resources = container.get("resources", {})
    for field in ("requests", "limits"):
        for name, amount in resources.get(field, {}).items():
            if not _QUANTITY.fullmatch(str(amount)):
                message = (
                    f"\"{amount}\": quantities must match the regular expression '{_QUANTITY_TEXT}'"
                )
                yield Cause(f"{path}.resources.{field}[{name}]", message)
    requested = resources.get("requests", {}).get(_GPU)
    if requested is not None and resources.get("limits", {}).get(_GPU) != requested:
        message = f'"{requested}": must be equal to {_GPU} limit'
        yield Cause(f"{path}.resources.requests", message)


def _job(spec: Object, old: Object | None) -> Iterator[Cause]:
    restart_policy = (spec["template"].get("spec") or {}).get("restartPolicy")
    if spec.get("podFailurePolicy") and restart_policy != "Never":
        message = (
            'only "Never" is supported for the pod template\'s restartPolicy with podFailurePolicy'
        )
        yield Cause("spec.podFailurePolicy", message)
    if spec.get("completionMode") == "Indexed" and spec.get("completions") is None:
        yield Cause("spec.completions", "Required value: when completion mode is Indexed", REQUIRED)
    yield from _backoff_by_index(spec)
    frozen: tuple[str, ...] = ("completionMode", "selector", "backoffLimitPerIndex")
    if old and not old["spec"].get("suspend"):
        frozen += ("template", "podFailurePolicy")
    yield from _immutable(spec, old, frozen)


def _backoff_by_index(spec: Object) -> Iterator[Cause]:
    limit = spec.get("backoffLimitPerIndex")
    most = spec.get("maxFailedIndexes")
    if limit is not None:
        if spec.get("completionMode") != "Indexed":
            yield Cause("spec.backoffLimitPerIndex", "requires indexed completion mode")
        if (spec["template"].get("spec") or {}).get("restartPolicy") != "Never":
            message = 'only "Never" is supported when `backoffLimitPerIndex` is specified'
            yield Cause("spec.template.spec.restartPolicy", message)
        if most is not None and most > spec.get("completions", 1):
            yield Cause("spec.maxFailedIndexes", "must be less than or equal to completions")
        return
    if most is not None:
        yield Cause(
            "spec.backoffLimitPerIndex",
            "Required value: when maxFailedIndexes is specified",
            REQUIRED,
        )


def _immutable(spec: Object, old: Object | None, fields: tuple[str, ...]) -> Iterator[Cause]:
    for field in fields:
        if old and field in old["spec"] and old["spec"][field] != spec.get(field):
            yield Cause(f"spec.{field}", "field is immutable")


def _selector(spec: Object, old: Object | None) -> Iterator[Cause]:
    wanted = spec.get("selector", {}).get("matchLabels", {})
    labels = spec.get("template", {}).get("metadata", {}).get("labels", {})
    if not wanted.items() <= labels.items():
        message = f"{json.dumps(labels)}: `selector` does not match template `labels`"
        yield Cause("spec.template.metadata.labels", message)


def _stateful_set(spec: Object, old: Object | None) -> Iterator[Cause]:
    yield from _selector(spec, old)
    frozen = ("serviceName", "selector", "volumeClaimTemplates", "podManagementPolicy")
    if old and any(old["spec"].get(field) != spec.get(field) for field in frozen):
        message = (
            "Forbidden: updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', "
            "'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' "
            "are forbidden"
        )
        yield Cause("spec", message, FORBIDDEN)


def _claim(spec: Object, old: Object | None) -> Iterator[Cause]:
    yield from _immutable(spec, old, ("accessModes", "storageClassName", "volumeName"))


def _subjects(binding: Object) -> Iterator[Cause]:
    """Yield service accounts without a namespace: that of the binding does not count."""
    for i, subject in enumerate(binding.get("subjects") or []):
        if subject["kind"] == "ServiceAccount" and not subject.get("namespace"):
            yield Cause(f"subjects[{i}].namespace", "Required value", REQUIRED)


def _job_set(spec: Object, old: Object | None) -> Iterator[Cause]:
    yield from _immutable(spec, old, _FIXED_IN_JOBSETS)
    if old:
        is_suspended = spec.get("suspend") or old["spec"].get("suspend")
        before, now = (_fixed(jobs["replicatedJobs"], is_suspended) for jobs in (old["spec"], spec))
        if before != now:
            yield Cause("spec.replicatedJobs", "field is immutable")
    seen: set[str] = set()
    for i, replicated in enumerate(spec.get("replicatedJobs", [])):
        for wanted in replicated.get("dependsOn", []):
            if wanted["name"] not in seen:
                message = f"replicatedJob: {replicated['name']} cannot depend on replicatedJob: {wanted['name']}"
                yield Cause(f"spec.replicatedJobs[{i}].dependsOn", message)
        seen.add(replicated["name"])


def _fixed(replicated_jobs: list[Object], is_suspended: bool) -> list[Object]:
    """Return what of a JobSet's Jobs cannot change; of one that is suspended queues place the pods."""
    jobs = copy.deepcopy(replicated_jobs)
    if is_suspended:
        for job in jobs:
            template = job["template"]["spec"]["template"]
            for section in (template.get("metadata", {}), template["spec"]):
                for field in _PLACEMENT:
                    section.pop(field, None)
    return jobs


def _pytorch_job(spec: Object, old: Object | None) -> Iterator[Cause]:
    for role, replica in spec.get("pytorchReplicaSpecs", {}).items():
        containers = replica["template"]["spec"].get("containers", [])
        if not any(container["name"] == "pytorch" for container in containers):
            yield Cause(
                f"spec.pytorchReplicaSpecs[{role}]",
                "must have at least one container with name pytorch",
            )
        if role == "Master" and replica.get("replicas", 1) != 1:
            yield Cause("spec.pytorchReplicaSpecs[Master].replicas", "must be 1")


def _train_job(spec: Object, old: Object | None) -> Iterator[Cause]:
    yield from _immutable(spec, old, _FIXED_IN_TRAIN_JOBS)
    names = {entry["name"] for entry in (spec.get("trainer") or {}).get("env", [])}
    taken = sorted(_TRAINER_ENV & names)
    if taken:
        message = f"must not have reserved envs, invalid envs configured: {taken}"
        yield Cause("spec.trainer.env", message)


_KIND_RULES = {
    "Job": _job,
    "StatefulSet": _stateful_set,
    "Deployment": _selector,
    "PersistentVolumeClaim": _claim,
    "JobSet": _job_set,
    "PyTorchJob": _pytorch_job,
    "TrainJob": _train_job,
}


# -- Pod Security
def pod_security_violations(pod: Object) -> list[str]:
    """Return the violations of the standard "restricted" in a pod spec, in the admission controller's words."""
    violations: list[str] = []
    for container in containers_of(pod):
        violations += _container_violations(container, pod.get("securityContext") or {})
    if pod.get("hostNetwork") or pod.get("hostPID") or pod.get("hostIPC"):
        violations.append("host namespaces (hostNetwork, hostPID or hostIPC is set)")
    if any("hostPath" in volume for volume in pod.get("volumes", [])):
        violations.append("restricted volume types (hostPath)")
    return violations


def _container_violations(container: Object, of_pod: Object) -> Iterator[str]:
    """Yield the violations of a container, whose pod has the security context `of_pod`."""
    name = container["name"]
    context = container.get("securityContext") or {}
    if context.get("privileged"):
        yield f'privileged (container "{name}" must not set securityContext.privileged=true)'
    if context.get("allowPrivilegeEscalation") is not False:
        setting = "securityContext.allowPrivilegeEscalation=false"
        yield f'allowPrivilegeEscalation != false (container "{name}" must set {setting})'
    if "ALL" not in (context.get("capabilities") or {}).get("drop", []):
        setting = 'securityContext.capabilities.drop=["ALL"]'
        yield f'unrestricted capabilities (container "{name}" must set {setting})'
    if not (context.get("runAsNonRoot") or of_pod.get("runAsNonRoot")):
        setting = "securityContext.runAsNonRoot=true"
        yield f'runAsNonRoot != true (pod or container "{name}" must set {setting})'
    profile = context.get("seccompProfile") or of_pod.get("seccompProfile") or {}
    if profile.get("type") not in ("RuntimeDefault", "Localhost"):
        setting = 'securityContext.seccompProfile.type to "RuntimeDefault" or "Localhost"'
        yield f'seccompProfile (pod or container "{name}" must set {setting})'


def restricted(store: Store, namespace: str) -> bool:
    """True if a namespace enforces the Pod Security standard "restricted"."""
    obj = store.get("Namespace", "", namespace)
    if obj is None:
        return False
    return labels_of(obj).get("pod-security.kubernetes.io/enforce") == "restricted"


def admit_pod(store: Store, pod: Object) -> None:
    """Raise ApiError 403 for a pod that breaks Pod Security or names a missing service account."""
    namespace = namespace_of(pod)
    meta = pod["metadata"]
    name = meta.get("name") or meta.get("generateName", "") + "xxxxx"
    violations = []
    if restricted(store, namespace):
        violations = pod_security_violations(pod["spec"])
    if violations:
        listed = ", ".join(violations)
        raise forbidden(
            f'pods "{name}" is forbidden: violates PodSecurity "restricted:latest": {listed}'
        )
    account = pod["spec"].get("serviceAccountName", "default")
    if account != "default" and not store.get("ServiceAccount", namespace, account):
        where = f"{namespace}/{account}: serviceaccount"
        raise forbidden(
            f'pods "{name}" is forbidden: error looking up service account {where} "{account}" not found'
        )
