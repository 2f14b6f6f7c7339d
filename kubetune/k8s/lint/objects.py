"""Manifests that do not agree with themselves or each other, whoever made them: names, labels, volumes, time limits.

Schemas check each field alone; a Service whose selector matches no pod is valid for them, and the run then hangs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kubetune.base.secrets import is_secret, names_secret
from kubetune.config.schema.cluster import DNS_LABEL, DNS_NAME, LABEL_KEY, LABEL_VALUE
from kubetune.k8s.lint.finding import Finding, error
from kubetune.k8s.manifests.kinds.gang import GROUP_NAME
from kubetune.k8s.manifests.pod_templates import pod_templates, pods_of
from kubetune.k8s.manifests.spec import MARGIN_SECONDS, Manifest, kind_and_name

MIN_PARALLELISM = "kueue.x-k8s.io/job-min-parallelism"
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
# Custom kinds make pods and Services named after themselves, so they too are held to a label's 63 characters.
LONG_NAMES = {
    "ConfigMap",
    "PersistentVolumeClaim",
    "Pod",
    "Role",
    "RoleBinding",
    "Secret",
    "ServiceAccount",
    "Deployment",
}


def check_objects(objects: Sequence[Manifest]) -> Iterator[Finding]:
    """Findings about rendered or hand-changed objects; keys are those of the config that set such things."""
    twice = Counter(
        (o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects
    )
    for (kind, _, name), times in twice.items():
        if times > 1:
            yield error(
                "name",
                f"{times} objects are called {kind}/{name}; a later one would replace the earlier ones",
            )
    for obj in objects:
        yield from _metadata(obj)
        yield from _selector(obj, objects)
        for where, template in pod_templates(obj):
            yield from _pod(where, template, obj)
        yield from _fewer_pods(obj)
    yield from _single_node_claims(objects)
    yield from _groups(objects)


def _metadata(obj: Manifest) -> Iterator[Finding]:
    name = obj["metadata"]["name"]
    allowed = DNS_NAME if obj["kind"] in LONG_NAMES else DNS_LABEL
    if not re.fullmatch(allowed, name) or len(name) > 253:
        most = 253 if allowed == DNS_NAME else 63
        yield error(
            "name",
            f"{obj['kind']} {name!r}: expected at most {most} of a-z, 0-9 and -, not at either end",
        )
    for key, text in (obj["metadata"].get("labels") or {}).items():
        if not re.fullmatch(LABEL_KEY, key) or not re.fullmatch(LABEL_VALUE, text):
            yield error(
                "kubernetes.labels",
                f"{key}: {text!r} is no label; expected at most 63 of A-Z, a-z, 0-9, -_.",
            )


def _selector(obj: Manifest, objects: Sequence[Manifest]) -> Iterator[Finding]:
    spec, title = obj.get("spec") or {}, kind_and_name(obj)
    if obj["kind"] in ("StatefulSet", "Deployment"):
        wanted = spec["selector"]["matchLabels"]
        candidates: Iterable[Manifest] = [spec["template"]]
    elif obj["kind"] in ("Service", "NetworkPolicy"):
        own = (
            spec.get("selector")
            if obj["kind"] == "Service"
            else spec["podSelector"].get("matchLabels")
        )
        wanted = own or {}
        candidates = (template for other in objects for _, template in pod_templates(other))
    else:
        return
    labels = [(template.get("metadata") or {}).get("labels") or {} for template in candidates]
    if wanted and not any(wanted.items() <= own.items() for own in labels):
        yield error(
            "kubernetes.labels", f"{title}: its selector {wanted} matches no pod that is made here"
        )


def _pod(where: str, template: Manifest, owner: Manifest) -> Iterator[Finding]:
    pod = template["spec"]
    spec = owner.get("spec") or {}
    policies = [
        template
        for policy in spec.get("volumeClaimPolicies", ())
        for template in policy["templates"]
    ]
    claimed = [c["metadata"]["name"] for c in (*spec.get("volumeClaimTemplates", ()), *policies)]
    volumes = {volume["name"] for volume in pod.get("volumes", ())} | set(claimed)
    if "podFailurePolicy" in spec and pod.get("restartPolicy") != "Never":
        yield error(
            "kubernetes.kind", f"{where}: podFailurePolicy works with restartPolicy Never only"
        )
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        title = f"{where} container {container['name']}"
        mounts = container.get("volumeMounts", ())
        for missing in sorted({mount["name"] for mount in mounts} - volumes):
            yield error(
                "kubernetes.mounts", f"{title}: mounts {missing}, but the pod has no such volume"
            )
        for path, times in Counter(mount["mountPath"] for mount in mounts).items():
            if times > 1:
                yield error("kubernetes.mounts", f"{title}: {times} volumes are mounted at {path}")
        yield from _quantities(title, container.get("resources") or {})
        yield from _variables(title, container.get("env", ()), pod)


def _quantities(title: str, resources: Manifest) -> Iterator[Finding]:
    for amounts in (resources.get("requests") or {}, resources.get("limits") or {}):
        for name, amount in amounts.items():
            if not QUANTITY.fullmatch(str(amount)):
                key = f"compute.{name}" if name in ("cpu", "memory") else "kubernetes.gpu_resource"
                yield error(
                    key,
                    f"{title}: {name} is {amount!r}; expected a quantity such as 8, 500m or 32Gi",
                )


def _variables(title: str, env: Iterable[Manifest], pod: Manifest) -> Iterator[Finding]:
    env = list(env)
    for name, times in Counter(entry["name"] for entry in env).items():
        if times > 1:
            yield error(
                f"kubernetes.env.{name}",
                f"{title}: set {times} times; the last one would win silently",
            )
    for entry in env:
        name, text = entry["name"], entry.get("value", "")
        if text and (names_secret(name) or is_secret(("env", name), text, known=True)):
            yield error(
                f"kubernetes.env.{name}",
                f"{title}: holds a secret's value; refer to a Secret instead",
            )
        if name == "PET_SHUTDOWN_TIMEOUT":
            grace = pod.get("terminationGracePeriodSeconds", 30)
            if grace < int(text) + MARGIN_SECONDS:
                yield error(
                    "kubernetes.grace_seconds",
                    f"{title}: the pod is killed {grace} s after SIGTERM, but saving may take {text} s; expected at "
                    f"least {int(text) + MARGIN_SECONDS} s",
                )


def _fewer_pods(obj: Manifest) -> Iterator[Finding]:
    """A Job that Kueue may start with fewer pods than its ranks know of: those there would wait for the others."""
    least = (obj["metadata"].get("annotations") or {}).get(MIN_PARALLELISM)
    if (
        obj["kind"] == "Job"
        and least is not None
        and least != str(obj["spec"].get("parallelism", 1))
    ):
        yield error(
            "kubernetes.annotations",
            f"Job/{obj['metadata']['name']}: {MIN_PARALLELISM} {least} lets Kueue start fewer pods, but each of them "
            "waits for all that compute.nodes says, and the global batch is divided among those; remove it. For fewer "
            "nodes change compute.nodes: the global batch stays as it is, and a run goes on from its checkpoint",
        )


def _group_of(template: Manifest) -> str | None:
    """The PodGroup that a pod of a template belongs to."""
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    name: str | None = annotations.get(GROUP_NAME)
    return name


def _groups(objects: Sequence[Manifest]) -> Iterator[Finding]:
    """PodGroups that never have enough members, and members of a group that is not there: such pods stay pending."""
    key = "kubernetes.scheduling.gang"
    members: Counter[str] = Counter()
    for obj in objects:
        for (_, template), count in zip(pod_templates(obj), pods_of(obj), strict=True):
            if name := _group_of(template):
                members[name] += count
    groups = {obj["metadata"]["name"]: obj["spec"] for obj in objects if obj["kind"] == "PodGroup"}
    for name, spec in groups.items():
        least = spec.get("minMember", 1)
        if members[name] < least:
            yield error(key, f"PodGroup/{name}: waits for {least} pods, but has {members[name]}")
    for name in members.keys() - groups.keys():
        yield error(key, f"PodGroup/{name}: pods belong to it, but it is not made here")


def _single_node_claims(objects: Sequence[Manifest]) -> Iterator[Finding]:
    """Claims of one node that more than one pod mounts: all but the first pod stay pending."""
    users: Counter[str] = Counter()
    for obj in objects:
        claims = {
            volume["persistentVolumeClaim"]["claimName"]
            for _, template in pod_templates(obj)
            for volume in template["spec"].get("volumes", ())
            if "persistentVolumeClaim" in volume
        }
        users.update(dict.fromkeys(claims, sum(pods_of(obj))))
    for obj in objects:
        name = obj["metadata"]["name"]
        if obj["kind"] == "PersistentVolumeClaim" and users[name] > 1:
            modes = obj["spec"]["accessModes"]
            if "ReadWriteMany" not in modes:
                volume = "cache" if name.endswith("-cache") else "outputs"
                yield error(
                    f"kubernetes.storage.{volume}.access",
                    f"PersistentVolumeClaim/{name}: {users[name]} pods mount it, but {', '.join(modes)} is attached to "
                    "one node at a time; set ReadWriteMany and a class that can do it, such as a shared file system",
                )
