"""Mistakes in a config and its manifests that schema validation cannot see, before a cluster is asked.

Each finding names the key of the config that caused it, so that the command line can show its line. Nothing is
changed here, and nothing is read but the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from posixpath import normpath
from typing import TYPE_CHECKING

from kubetune.base.registry.address import MOUNTED
from kubetune.base.secrets import is_secret, names_secret, seems_random
from kubetune.config.data_files import is_hub_id
from kubetune.config.schema import Config
from kubetune.config.schema.model import BUILT_IN_TEMPLATE
from kubetune.config.schema.quantities import quantity_bytes
from kubetune.config.schema.tracking import MODULES
from kubetune.extras import EXTRA_OF
from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.lint.pod_security import beyond_restricted
from kubetune.k8s.manifests.configmap import MAX_CARRIED_BYTES
from kubetune.k8s.manifests.environment import RESERVED
from kubetune.k8s.manifests.kinds.gang import gang
from kubetune.k8s.manifests.kinds.registry import KINDS, kind_of
from kubetune.k8s.manifests.mistakes import Mistake, advice, error
from kubetune.k8s.manifests.pod_templates import pod_templates
from kubetune.k8s.manifests.spec import (
    MANAGED_BY,
    QUEUE_NAME,
    QUEUE_PRIORITY,
    Manifest,
    RunSpec,
    source_paths,
)
from kubetune.k8s.manifests.storage import shm_size
from kubetune.k8s.run_names import (
    CACHE,
    CONFIG_FOLDER,
    DATA_FOLDER,
    DOCKER_FOLDER,
    OUTPUTS,
    on_volume,
)

if TYPE_CHECKING:
    from kubetune.plan.plan import Plan

TAKEN = (
    *(OUTPUTS, CACHE, CONFIG_FOLDER, DATA_FOLDER, DOCKER_FOLDER, MOUNTED),
    *("/tmp", "/dev/shm"),
)
HTTP_PORTS = ("80", "5000")


def lint(
    config: Config, plan: Plan, objects: Sequence[Manifest], files: Mapping[str, str] | None = None
) -> list[Mistake]:
    """Return everything wrong with, or unwise about, a run on a cluster.

    `objects` are what `render` made, with these `files`. Raise ConfigError when the config has no `kubernetes` section.
    """
    spec = RunSpec.of(config, plan, files)

    # Each of these looks at the config alone.
    checks = (
        _size,
        _claims,
        _image,
        _trackers,
        _variables,
        _volumes,
        _paths,
        _base_image,
        _profile,
        _kind,
        _gang,
        _jobset,
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
    compute = spec.config.compute
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
            "compute.cpu", "left out, so pods ask for no CPU and may be put where none is free"
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


def _image(spec: RunSpec) -> Iterator[Mistake]:
    k = spec.kubernetes
    tools = {"kubernetes.image": k.image, "kubernetes.tools_image": k.tools_image}
    for key, image in tools.items():
        if image is not None:
            yield from _image_name(spec, key, image)

    # What starts from `tools_image`, as the message names it. JupyterLab may have an image of its own.
    servers = []
    if k.tensorboard:
        servers.append("TensorBoard")
    if k.ui:
        servers.append("the page")
    if k.jupyter is not None and k.jupyter.image is None:
        servers.append("JupyterLab")
    if servers and k.tools_image is None:
        yield advice(
            "kubernetes.tools_image",
            f"left out, so {' and '.join(servers)} would start from the run's image, which has the extras for that "
            "only where it was built with them; scripts/image tools builds one that has",
        )


def _trackers(spec: RunSpec) -> Iterator[Mistake]:
    # Nothing here can look into the image, so this is advice.
    tracking = spec.config.tracking
    for name, module in MODULES.items():
        if getattr(tracking, name):
            extra = EXTRA_OF[module]
            yield advice(
                f"tracking.{name}",
                f"the run's image has this only where it was built with the extra {extra}, such as EXTRAS=hub,vision,"
                f"s3,{extra} scripts/image cuda; without it the pods end with exit code 2 before they train",
            )

    benchmarks = spec.config.evaluation.benchmarks
    if benchmarks is not None:
        text = (
            "the run's image has the harness only where it was built with the extra benchmarks, such as EXTRAS=hub,"
            "vision,s3,benchmarks scripts/image cuda; without it the pods end with exit code 2 before they train"
        )
        if not benchmarks.tasks_folder:
            text += "; at the end the pod of node 0 fetches their data from the hub"
        yield advice("evaluation.benchmarks", text)


def _image_name(spec: RunSpec, key: str, image: str) -> Iterator[Mistake]:
    scheme, separator, _ = image.partition("://")
    if separator:
        yield error(
            key, f"found {scheme}:// in front; nodes pull over HTTPS and expect registry/name:tag"
        )
        return

    if re.search(r"[\s]|^[-/]|/$", image):
        yield error(
            key, f"found {image!r}; expected registry/name:tag or registry/name@sha256:digest"
        )
        return

    yield from _registry(key, image, spec.kubernetes.image_pull_policy)

    # The tag is behind the last slash, since a registry may have a port:
    #     registry:5000/team/kubetune:1.2   →   1.2
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in image and tag in ("", "latest"):
        yield advice(
            key, "without a version it may be another image tomorrow; pin a tag or a digest"
        )


def _registry(key: str, image: str, pull_policy: str | None) -> Iterator[Mistake]:
    """Yield a finding for an image from a registry that nodes cannot pull from."""
    registry, slash, _ = image.partition("/")
    host, _, port = registry.partition(":")
    # A name without a slash is of Docker Hub.
    is_local = host in ("localhost", "127.0.0.1")
    if not slash or not (is_local or port in HTTP_PORTS):
        return

    if pull_policy not in ("Never", "IfNotPresent"):
        yield error(
            key,
            f"{registry} is a registry over plain HTTP, or one of this machine; nodes refuse it. If the image was "
            "loaded into the nodes, set kubernetes.image_pull_policy: IfNotPresent",
        )
    elif registry != "localhost":
        # localhost/… is how podman and buildah name an image of this machine, which was then loaded into the nodes.
        yield advice(
            key,
            f"{registry} is no registry that a node can pull from; with image_pull_policy {pull_policy} the run works "
            "where each node holds the image already, such as after kind load, minikube image load or k3d image "
            "import",
        )


def _variables(spec: RunSpec) -> Iterator[Mistake]:
    k = spec.kubernetes
    for section, names in (("env", k.env), ("secrets", k.secrets)):
        for name in names:
            if name in RESERVED or name.startswith(("PET_", "TORCHELASTIC_", "KUBETUNE_")):
                yield error(
                    f"kubernetes.{section}.{name}",
                    "is set by kubetune, torchrun or the operator; another value would break the rendezvous. Remove it",
                )

    # Values of variables are part of the pod's spec, which many may read who may not read Secrets.
    for name, text in k.env.items():
        key = f"kubernetes.env.{name}"
        path = ("kubernetes", "env", name)
        holds_secret = text and (names_secret(name) or is_secret(path, text, known=True))
        if name in k.secrets:
            yield error(key, "given under kubernetes.secrets too; keep one")
        elif holds_secret:
            yield error(
                key,
                "a secret value in an environment variable is readable in every manifest; put it into a Secret "
                f"and write kubernetes.secrets.{name}: {{secret: NAME}} instead",
            )
        elif seems_random(text):
            yield advice(
                key,
                "looks like a random token; if it opens anything, put it into a Secret and write "
                f"kubernetes.secrets.{name}: {{secret: NAME}} instead, as manifests are readable",
            )


def _volumes(spec: RunSpec) -> Iterator[Mistake]:
    """Yield mounts over a folder that has a user already: they would hide its files."""
    of_image = ("/", "/etc", "/usr", "/proc", "/sys", "/dev")
    users: dict[str, str] = dict.fromkeys(TAKEN, "kubetune's own volumes")
    users.update(dict.fromkeys(of_image, "the image itself"))

    for index, mount in enumerate(spec.kubernetes.mounts):
        # As the kernel reads it: `//outputs` and `/data/../outputs` are /outputs.
        path = "/" + normpath(mount.path).lstrip("/")
        if path in users:
            yield error(
                f"kubernetes.mounts.{index}.path",
                f"{path} is taken by {users[path]}; choose another folder",
            )
        users.setdefault(path, f"mounts[{index}]")


def _paths(spec: RunSpec) -> Iterator[Mistake]:
    """Yield paths of the user's machine that no pod will see."""
    config = spec.config
    model = config.model
    paths: dict[str, str | None] = dict(source_paths(config.sources))
    paths["model.path"] = model.path
    paths["model.tokenizer"] = model.tokenizer

    # Chat templates, and Python code, are files even where their names could be hub ids.
    files: dict[str, str | None] = {}
    if model.chat_template != BUILT_IN_TEMPLATE:
        files["model.chat_template"] = model.chat_template
    if config.evaluation.metrics is not None:
        files["evaluation.metrics.file"] = config.evaluation.metrics.file
    for index, reward in enumerate(config.rewards):
        files[f"rewards.{index}.file"] = reward.file
        paths[f"rewards.{index}.reward_model"] = reward.reward_model
        paths[f"rewards.{index}.teacher"] = reward.teacher
    if config.evaluation.benchmarks is not None:
        files["evaluation.benchmarks.tasks_folder"] = config.evaluation.benchmarks.tasks_folder

    for key, path in (paths | files).items():
        if not path or "://" in path:
            continue
        # A pod fetches hub ids itself.
        if is_hub_id(path) and key not in files:
            continue
        if path not in spec.files and not on_volume(spec.kubernetes, path):
            yield error(
                key,
                f"{path} is not in the pods; put it on a volume, mount that with kubernetes.mounts, and give the path "
                f"there, or use a hub id. Text files travel along up to {MAX_CARRIED_BYTES >> 10} KiB in all",
            )

    # The image's file system is read-only.
    report = config.logging.report_json
    if report and report.startswith("/") and not on_volume(spec.kubernetes, report):
        yield error(
            "logging.report_json",
            f"{report} cannot be written: only {OUTPUTS}, {CACHE} and /tmp can",
        )


def _base_image(spec: RunSpec) -> Iterator[Mistake]:
    """Yield what does not go with a base that is, or is not, an image of a registry."""
    key = "kubernetes.image_volumes"
    image = spec.base_image
    if image is None:
        if spec.kubernetes.image_volumes:
            yield advice(key, "mounts nothing, since the model is no image (oci://…)")
        return
    if spec.kubernetes.image_volumes and not image.has_digest:
        yield error(
            key,
            f"{image} names its image by a tag, which may move between two starts of the run; name it by its digest, "
            f"oci://{image.host}/{image.name}@sha256:…, which kubetune push prints",
        )
    elif spec.kubernetes.samplers is not None and not spec.mounted_base:
        yield error(
            "kubernetes.samplers",
            f"vLLM loads no {image}; set kubernetes.image_volumes, by which its pods have the image as a folder",
        )


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
            "describe node shows it, such as rdma/hca); where there is no device plugin, kubernetes.rdma."
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
            f"nothing starts the {spec.pods} pods together: where the cluster has no room for all, some hold their "
            "nodes and wait. Give kubernetes.queue (Kueue) or volcano here; none if that is all right",
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
