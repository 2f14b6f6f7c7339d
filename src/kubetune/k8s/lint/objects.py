"""Manifests that contradict themselves or each other, whoever made them: names, labels, volumes, time limits.

Schemas check each field alone. A Service whose selector matches no pod is valid for them, and the run then hangs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from kubetune.base.secrets import is_secret, names_secret
from kubetune.config.schema.quantities import DNS_LABEL, DNS_NAME, LABEL_KEY, LABEL_VALUE
from kubetune.k8s.manifests.kinds.gang_scheduling import GROUP_NAME
from kubetune.k8s.manifests.mistakes import Mistake, error
from kubetune.k8s.manifests.pod_templates import pod_templates, sized_templates
from kubetune.k8s.manifests.run_spec import MARGIN_SECONDS, Manifest, kind_and_name

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


def check_objects(objects: Sequence[Manifest]) -> Iterator[Mistake]:
    """Yield findings about rendered or hand-changed objects; keys are those of the config that set such fields."""
    counts: Counter[tuple[str, str | None, str]] = Counter()
    for obj in objects:
        metadata = obj["metadata"]
        counts[obj["kind"], metadata.get("namespace"), metadata["name"]] += 1
    for (kind, _, name), times in counts.items():
        if times > 1:
            yield error(
                "name",
                f"{times} objects are called {kind}/{name}; a later one would replace the earlier ones",
            )

    for obj in objects:
        yield from _metadata(obj)
        yield from _selector(obj, objects)
        for title, template in pod_templates(obj):
            yield from _pod(title, template, obj)
        yield from _fewer_pods(obj)

    # These need all objects at once: who mounts a claim, and who belongs to a group.
    yield from _single_node_claims(objects)
    yield from _groups(objects)


def _metadata(obj: Manifest) -> Iterator[Mistake]:
    name = obj["metadata"]["name"]
    allowed = DNS_NAME if obj["kind"] in LONG_NAMES else DNS_LABEL
    if not re.fullmatch(allowed, name) or len(name) > 253:
        most = 253 if allowed == DNS_NAME else 63
        yield error(
            "name",
            f"{obj['kind']} {name!r}: expected at most {most} of a-z, 0-9 and -, not at either end",
        )

    labels = obj["metadata"].get("labels") or {}
    for key, text in labels.items():
        is_label = re.fullmatch(LABEL_KEY, key) and re.fullmatch(LABEL_VALUE, text)
        if not is_label:
            yield error(
                "kubernetes.labels",
                f"{key}: {text!r} is no label; expected at most 63 of A-Z, a-z, 0-9, -_.",
            )


def _labels(template: Manifest) -> Manifest:
    labels: Manifest = (template.get("metadata") or {}).get("labels") or {}
    return labels


def _selector(obj: Manifest, objects: Sequence[Manifest]) -> Iterator[Mistake]:
    """Yield a selector that matches no pod: a Service leads nowhere, and the API server refuses a controller."""
    spec = obj.get("spec") or {}
    templates = []
    for other in objects:
        templates += [template for _, template in pod_templates(other)]

    # A controller must match the pods that it makes itself. Others may match any pod of the run.
    if obj["kind"] in ("StatefulSet", "Deployment"):
        selector = spec["selector"]["matchLabels"]
        templates = [spec["template"]]
    elif obj["kind"] == "Service":
        selector = spec.get("selector")
    elif obj["kind"] == "NetworkPolicy":
        selector = spec["podSelector"].get("matchLabels")
    else:
        return

    # An empty selector matches every pod of the namespace.
    if not selector:
        return
    for template in templates:
        if selector.items() <= _labels(template).items():
            return
    title = kind_and_name(obj)
    yield error(
        "kubernetes.labels", f"{title}: its selector {selector} matches no pod that is made here"
    )


def _pod(title: str, template: Manifest, owner: Manifest) -> Iterator[Mistake]:
    pod = template["spec"]
    spec = owner.get("spec") or {}
    if "podFailurePolicy" in spec and pod.get("restartPolicy") != "Never":
        yield error(
            "kubernetes.kind", f"{title}: podFailurePolicy works with restartPolicy Never only"
        )

    # A StatefulSet and a JobSet give pods volumes for the claims that they make.
    claims = list(spec.get("volumeClaimTemplates", ()))
    for policy in spec.get("volumeClaimPolicies", ()):
        claims += policy["templates"]
    volumes = {claim["metadata"]["name"] for claim in claims}
    volumes.update(volume["name"] for volume in pod.get("volumes", ()))

    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        name = f"{title} container {container['name']}"
        yield from _mounts(name, container.get("volumeMounts", ()), volumes)
        yield from _quantities(name, container.get("resources") or {})
        yield from _variables(name, container.get("env", ()), pod)


def _mounts(title: str, mounts: Sequence[Manifest], volumes: set[str]) -> Iterator[Mistake]:
    key = "kubernetes.mounts"
    mounted = {mount["name"] for mount in mounts}
    for missing in sorted(mounted - volumes):
        yield error(key, f"{title}: mounts {missing}, but the pod has no such volume")

    # The API server refuses a pod with two volumes at one path.
    paths = Counter(mount["mountPath"] for mount in mounts)
    for path, times in paths.items():
        if times > 1:
            yield error(key, f"{title}: {times} volumes are mounted at {path}")


def _quantities(title: str, resources: Manifest) -> Iterator[Mistake]:
    for amounts in (resources.get("requests") or {}, resources.get("limits") or {}):
        for name, amount in amounts.items():
            if not QUANTITY.fullmatch(str(amount)):
                # Other resources than these two are devices, such as nvidia.com/gpu.
                key = "kubernetes.gpu_resource"
                if name in ("cpu", "memory"):
                    key = f"compute.{name}"
                yield error(
                    key,
                    f"{title}: {name} is {amount!r}; expected a quantity such as 8, 500m or 32Gi",
                )


def _variables(title: str, env: Sequence[Manifest], pod: Manifest) -> Iterator[Mistake]:
    names = Counter(entry["name"] for entry in env)
    for name, times in names.items():
        if times > 1:
            yield error(
                f"kubernetes.env.{name}",
                f"{title}: set {times} times; the last one would win silently",
            )

    for entry in env:
        name = entry["name"]
        # An entry without a value refers to a Secret or a field of the pod.
        text = entry.get("value", "")
        if text and (names_secret(name) or is_secret(("env", name), text, known=True)):
            yield error(
                f"kubernetes.env.{name}",
                f"{title}: holds a secret's value; refer to a Secret instead",
            )

        # torchrun waits this long for its workers, and the agent then writes the exit status.
        if name == "PET_SHUTDOWN_TIMEOUT":
            grace = pod.get("terminationGracePeriodSeconds", 30)
            least = int(text) + MARGIN_SECONDS
            if grace < least:
                yield error(
                    "kubernetes.grace_seconds",
                    f"{title}: the pod is killed {grace} s after SIGTERM, but saving may take {text} s; expected at "
                    f"least {least} s",
                )


def _fewer_pods(obj: Manifest) -> Iterator[Mistake]:
    """Yield a Job that Kueue may start with fewer pods than it has ranks: its pods would wait for the others."""
    annotations = obj["metadata"].get("annotations") or {}
    least = annotations.get(MIN_PARALLELISM)
    if obj["kind"] != "Job" or least is None:
        return
    if least != str(obj["spec"].get("parallelism", 1)):
        yield error(
            "kubernetes.annotations",
            f"{kind_and_name(obj)}: {MIN_PARALLELISM} {least} lets Kueue start fewer pods, but each of them "
            "waits for all that compute.nodes says, and the global batch is divided among those; remove it. For fewer "
            "nodes change compute.nodes: the global batch stays as it is, and a run goes on from its checkpoint",
        )


def _groups(objects: Sequence[Manifest]) -> Iterator[Mistake]:
    """Yield PodGroups that never have enough members, and groups that nothing makes: such pods stay pending."""
    key = "kubernetes.scheduling.gang"

    # Count the pods that name each group in an annotation.
    members: Counter[str] = Counter()
    for obj in objects:
        for entry in sized_templates(obj):
            metadata = entry.template.get("metadata") or {}
            annotations = metadata.get("annotations") or {}
            if GROUP_NAME in annotations:
                members[annotations[GROUP_NAME]] += entry.pods

    groups = {}
    for obj in objects:
        if obj["kind"] == "PodGroup":
            groups[obj["metadata"]["name"]] = obj["spec"]
    for name, spec in groups.items():
        least = spec.get("minMember", 1)
        if members[name] < least:
            yield error(key, f"PodGroup/{name}: waits for {least} pods, but has {members[name]}")

    for name in members.keys() - groups.keys():
        yield error(key, f"PodGroup/{name}: pods belong to it, but it is not made here")


def _single_node_claims(objects: Sequence[Manifest]) -> Iterator[Mistake]:
    """Yield claims of one node that more than one pod mounts: all but the first pod stay pending."""
    # How many pods mount each claim. A pod may mount one claim twice, as two volumes.
    mounting_pods: Counter[str] = Counter()
    for obj in objects:
        for entry in sized_templates(obj):
            claims = set()
            for volume in entry.template["spec"].get("volumes", ()):
                if "persistentVolumeClaim" in volume:
                    claims.add(volume["persistentVolumeClaim"]["claimName"])
            for claim in claims:
                mounting_pods[claim] += entry.pods

    for obj in objects:
        if obj["kind"] != "PersistentVolumeClaim":
            continue
        name = obj["metadata"]["name"]
        modes = obj["spec"]["accessModes"]
        if mounting_pods[name] > 1 and "ReadWriteMany" not in modes:
            volume_key = "outputs"
            if name.endswith("-cache"):
                volume_key = "cache"
            yield error(
                f"kubernetes.storage.{volume_key}.access",
                f"{kind_and_name(obj)}: {mounting_pods[name]} pods mount it, but {', '.join(modes)} is attached to "
                "one node at a time; set ReadWriteMany and a class that can do it, such as a shared file system",
            )
