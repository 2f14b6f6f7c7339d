"""Mistakes in a config and its manifests that schema validation cannot see, before a cluster is asked.

Each finding names the key of the config that caused it, so that the command line can show its line. Nothing is
changed here, and nothing is read but the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kubetune.config.schema.quantities import quantity_bytes
from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.lint.pod_files import (
    check_mirror,
    check_paths,
    check_push,
    check_variables,
    check_volumes,
)
from kubetune.k8s.lint.pod_images import check_base_image, check_images, check_trackers
from kubetune.k8s.lint.pod_security import beyond_restricted
from kubetune.k8s.manifests.kinds.gang_scheduling import gang
from kubetune.k8s.manifests.kinds.registry import KINDS, kind_of
from kubetune.k8s.manifests.mistakes import Mistake, advice, error
from kubetune.k8s.manifests.pod_templates import pod_templates
from kubetune.k8s.manifests.run_spec import (
    MANAGED_BY,
    QUEUE_NAME,
    QUEUE_PRIORITY,
    Manifest,
    RunSpec,
)
from kubetune.k8s.manifests.storage import shm_size


def lint(spec: RunSpec, objects: Sequence[Manifest]) -> list[Mistake]:
    """Return everything wrong with, or unwise about, a run on a cluster. `objects` are what `render` made of it."""
    # Each of these looks at the config alone.
    checks = (
        _size,
        _claims,
        check_images,
        check_trackers,
        check_variables,
        check_push,
        check_mirror,
        check_volumes,
        check_paths,
        check_base_image,
        _profile,
        _kind,
        _gang,
        _jobset,
        _restarts,
        _names,
    )

    findings: list[Mistake] = []
    for check in checks:
        findings += check(spec)

    # A mistake in the config often shows in each object made from it. It is reported once, where it was made.
    keys = {finding.key for finding in findings}
    for finding in check_objects(objects):
        if not any(key.startswith(finding.key) for key in keys):
            findings.append(finding)

    # Several objects may lead to the same finding.
    findings += _patched(spec, objects)
    return list(dict.fromkeys(findings))


def _size(spec: RunSpec) -> Iterator[Mistake]:
    # A pod's size, which the user's machine cannot tell: what a laptop detects, a pod must ask for.
    compute = spec.compute
    if compute.gpus_per_node is None:
        yield error(
            "compute.gpus_per_node",
            "left out, but a pod must ask for a number of GPUs; give it, 0 for CPU",
        )

    if compute.memory is None:
        yield error(
            "compute.memory",
            "left out, so pods would have no limit, and one that leaks takes its node's other pods along; give it, "
            "such as 64Gi",
        )

    # A limit of CPU is a quota: without the number there is nothing to set. A mere request is only missed.
    k = spec.kubernetes
    if compute.cpu is None and k.cpu_limits:
        yield error(
            "kubernetes.cpu_limits", "the limit is compute.cpu, and that is left out; give it"
        )
    elif compute.cpu is None:
        yield advice(
            "compute.cpu",
            "left out, so pods ask for no CPU and may be put on a node where none is free",
        )

    # A full /dev/shm of that size would get the container killed for memory.
    shm = shm_size(spec)
    if compute.memory and quantity_bytes(shm) >= quantity_bytes(compute.memory):
        yield error(
            "kubernetes.shm_size",
            f"{shm} is not below compute.memory {compute.memory}, and shared memory counts as memory",
        )


def _claims(spec: RunSpec) -> Iterator[Mistake]:
    claims = spec.kubernetes.resource_claims
    names = [claim.name for claim in claims]
    for index, claim in enumerate(claims):
        key = f"kubernetes.resource_claims.{index}"
        if claim.name in names[:index]:
            yield error(
                f"{key}.name",
                f"{claim.name} is given twice; each claim of a pod has a name of its own",
            )

        # A template makes one claim for each pod. A claim that exists is one for all.
        if claim.claim and spec.nodes > 1:
            yield advice(
                f"{key}.claim",
                f"all {spec.nodes} pods share {claim.claim}, and most devices belong to one node; give a template, so "
                "that each pod has a claim of its own",
            )

        if claim.gpus and not spec.gpus:
            yield error(f"{key}.gpus", "the claim holds GPUs, but compute.gpus_per_node is 0")


def _profile(spec: RunSpec) -> Iterator[Mistake]:
    if spec.kubernetes.profile == "restricted":
        yield from _restricted_profile(spec)
        return
    if spec.gpus == 0:
        yield advice(
            "kubernetes.profile", "rdma serves NCCL between GPUs, and this run asks for none"
        )

    rdma = spec.kubernetes.rdma
    if rdma.resource is None and not rdma.privileged:
        yield error(
            "kubernetes.profile",
            "rdma: a pod gets no adapter without kubernetes.rdma.resource, the device plugin's resource (kubectl "
            "describe node shows it, such as rdma/hca); if there is no device plugin, kubernetes.rdma."
            "privileged: true takes the node's devices into a privileged container",
        )


def _restricted_profile(spec: RunSpec) -> Iterator[Mistake]:
    k = spec.kubernetes
    if k.run_as_user == 0:
        yield error(
            "kubernetes.run_as_user",
            "0 is root, which the restricted profile forbids; leave it out",
        )

    # The standard allows no folders of the node.
    folders = {
        "kubernetes.storage.cache.host_path": k.storage.cache.host_path,
        "kubernetes.storage.outputs.host_path": k.storage.outputs.host_path,
    }
    for index, mount in enumerate(k.mounts):
        folders[f"kubernetes.mounts.{index}.host_path"] = mount.host_path

    for key, path in folders.items():
        if path:
            yield advice(
                key,
                f"{path} of the node: a namespace that enforces the restricted standard refuses such pods; use a claim",
            )


def _patched(spec: RunSpec, objects: Sequence[Manifest]) -> Iterator[Mistake]:
    """Yield pods that ask, after patches, for more than the profile promises."""
    if spec.kubernetes.profile != "restricted" or not spec.kubernetes.patches:
        return
    for obj in objects:
        for title, template in pod_templates(obj):
            fields = "; ".join(beyond_restricted(template["spec"]))
            if fields:
                yield advice(
                    "kubernetes.patches",
                    f"{title}: {fields}: a namespace that enforces the restricted standard refuses such pods, "
                    "and the run would wait for them",
                )


def _kind(spec: RunSpec) -> Iterator[Mistake]:
    k = spec.kubernetes
    if k.argocd and k.ttl_seconds is not None:
        yield advice(
            "kubernetes.ttl_seconds",
            f"{k.ttl_seconds}: a finished run's objects are removed after this time, and Argo CD, which finds them "
            "missing, starts it again; give null",
        )
    yield from kind_of(k.kind).findings(spec)


def _gang(spec: RunSpec) -> Iterator[Mistake]:
    k = spec.kubernetes
    who = gang(spec)
    key = "kubernetes.scheduling.gang"

    # Kueue and Volcano each start a gang. Only one of them may.
    if not k.queue:
        text = "Kueue looks at runs that name a queue only; give kubernetes.queue"
        if who == "kueue":
            yield error(key, text)
        if k.queue_priority is not None:
            yield error("kubernetes.queue_priority", text)
    elif who == "volcano":
        yield advice(
            key,
            "volcano beside kubernetes.queue: each has queues and quotas of its own, and Volcano keeps room for the "
            "run's PodGroup while Kueue still holds its pods back; set kueue here, or leave kubernetes.queue out",
        )

    if k.scheduling.queue is not None and who != "volcano":
        yield error(
            "kubernetes.scheduling.queue",
            f"volcano only knows this, and gang is {who}; Kueue's is kubernetes.queue",
        )
    yield from _topology(spec)

    # With `gang: none` the user has chosen this.
    if spec.pods > 1 and who == "none" and k.scheduling.gang == "auto":
        yield advice(
            key,
            f"nothing starts the {spec.pods} pods together: if the cluster has no room for all, some hold their "
            "nodes and wait. Set kubernetes.queue (Kueue) or volcano here, or none to accept that",
        )


def _topology(spec: RunSpec) -> Iterator[Mistake]:
    k = spec.kubernetes
    topology = k.scheduling.topology
    key = "kubernetes.scheduling.topology"
    if topology is None:
        return
    if not k.queue:
        yield error(key, "Kueue looks at runs that name a queue only; give kubernetes.queue")

    if topology.slice_nodes is not None and spec.nodes % topology.slice_nodes:
        yield error(
            f"{key}.slice_nodes",
            f"{topology.slice_nodes} does not divide the {spec.nodes} pods into whole slices",
        )


def _jobset(spec: RunSpec) -> Iterator[Mistake]:
    """Yield keys of `kubernetes.jobset` that the kind does not have. Their default asks for nothing, so it may stay."""
    k = spec.kubernetes
    unknown = k.jobset.model_fields_set - kind_of(k.kind).jobset_keys
    for key in sorted(unknown):
        if getattr(k.jobset, key) not in ("all", False, None):
            kinds = [name for name in KINDS if key in kind_of(name).jobset_keys]
            yield error(
                f"kubernetes.jobset.{key}",
                f"only kind {' and '.join(kinds)} can do this, and kind is {k.kind}",
            )


def _restarts(spec: RunSpec) -> Iterator[Mistake]:
    """Yield advice about a number of restarts that the kind does not keep to. The default asks for nothing."""
    k = spec.kubernetes
    kind = kind_of(k.kind)
    default = type(k).model_fields["max_restarts"].default
    if not kind.counts_restarts and k.max_restarts not in (0, default):
        yield advice(
            "kubernetes.max_restarts",
            f"a {kind.name} starts again however often it fails; {k.max_restarts} is for the other kinds",
        )


def _names(spec: RunSpec) -> Iterator[Mistake]:
    kind = kind_of(spec.kubernetes.kind)
    longest = kind.longest_name(spec)
    if len(spec.name) > longest:
        prepared = " with initialisers" if spec.prepares else ""
        yield error(
            "name",
            f"{spec.name}: {len(spec.name)} characters; a {kind.name}{prepared} may have {longest}",
        )

    # A Service's name is a DNS label of RFC 1035, which is stricter than that of a pod.
    if not spec.name[0].isalpha():
        yield error(
            "name", f"{spec.name} begins with a digit, but names of Services begin with a letter"
        )

    # Selectors, Kueue and `kubetune status` rely on these.
    ours = (*spec.selector(""), MANAGED_BY, QUEUE_NAME, QUEUE_PRIORITY)
    for key in spec.kubernetes.labels:
        if key in ours:
            yield error(f"kubernetes.labels.{key}", "is one of kubetune's own labels; remove it")
    for key in spec.kubernetes.annotations:
        if key.startswith("kubetune/"):
            yield error(
                f"kubernetes.annotations.{key}", "is one of kubetune's own annotations; remove it"
            )
