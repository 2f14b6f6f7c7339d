"""What may be wrong with the images of a run for a cluster, and with what must be in them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kubetune.config.schema.tracking import MODULES
from kubetune.extras import EXTRA_OF
from kubetune.k8s.manifests.mistakes import Mistake, advice, error
from kubetune.k8s.manifests.run_spec import (
    RunSpec,
)

HTTP_PORTS = ("80", "5000")


def check_images(spec: RunSpec) -> Iterator[Mistake]:
    """Yield what is wrong with the run's image and that of its servers."""
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
            "only if it was built with them; scripts/image tools builds one that has",
        )


def check_trackers(spec: RunSpec) -> Iterator[Mistake]:
    """Yield what the run's image must have been built with."""
    # Nothing here can look into the image, so this is advice.
    tracking = spec.config.tracking
    for name, module in MODULES.items():
        if getattr(tracking, name):
            extra = EXTRA_OF[module]
            yield advice(
                f"tracking.{name}",
                f"the run's image has this only if it was built with the extra {extra}, such as EXTRAS=hub,vision,"
                f"s3,{extra} scripts/image cuda; without it the pods end with exit code 2 before they train",
            )

    benchmarks = spec.config.evaluation.benchmarks
    if benchmarks is not None:
        text = (
            "the run's image has the harness only if it was built with the extra benchmarks, such as EXTRAS=hub,"
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

    # The tag is after the last slash, since a registry may have a port:
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


def check_base_image(spec: RunSpec) -> Iterator[Mistake]:
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
    elif spec.config.grpo.servers and spec.kubernetes.samplers and not spec.mounted_base:
        yield error(
            "kubernetes.samplers",
            f"vLLM loads no {image}; set kubernetes.image_volumes, by which its pods have the image as a folder",
        )
