"""From targets and settings to what is rendered: the server, the pods' settings, and what a person must know."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kubetune.base.registry.address import SCHEME, parse
from kubetune.config.schema import Config
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.errors import ConfigError
from kubetune.k8s.manifests.run_spec import RunSpec
from kubetune.k8s.run_names import CACHE, OUTPUTS, run_name
from kubetune.plan.plan import make_plan
from kubetune.plugins.serving.manifests import (
    IMAGE,
    IMAGES,
    WAITING,
    ServedAdapter,
    ServedImage,
    ServerSettings,
    Serving,
)
from kubetune.plugins.serving.served_targets import ServedTarget, last_name, require_servable


def serving_of(
    targets: Sequence[ServedTarget], settings: ServerSettings, *, mounts: bool
) -> Serving:
    """Return the server of these targets. `mounts`: the pods are ours, which have images as folders.

    Raise ConfigError for targets and settings that do not go together.
    """
    require_servable(targets)
    least = settings.replicas
    if settings.gpus < 1 or least < 1 or (settings.max_replicas or least) < least:
        raise ConfigError(
            "--gpus and --replicas: expected at least 1; --max-replicas: at least --replicas"
        )

    # All targets have the same base, or there is a single one.
    first = targets[0]
    model = first.run.model if first.run else None
    base = first.base
    served_name = first.name
    adapters = []
    revision = None
    images: list[ServedImage] = []
    if base:
        served_name = last_name(base)
        for target in targets:
            path = _in_pod(target.path, target.name, images, mounts=mounts)
            adapters.append(ServedAdapter(target.name, path, target.rank, target.known))
        if model is not None:
            revision = model.revision
    if served_name in {adapter.name for adapter in adapters}:
        raise ConfigError(
            f"{served_name} is the name of the base; put another NAME= in front of the adapter"
        )
    whole = _in_pod(base or first.path, served_name, images, mounts=mounts)
    return Serving(
        **vars(settings),
        model=whole,
        names=(served_name,),
        revision=revision,
        adapters=tuple(adapters),
        images=tuple(images),
        scores=bool(first.run and first.run.task == "reward_model"),
        trust_remote_code=bool(model and model.trust_remote_code),
    )


def _in_pod(path: str, name: str, images: list[ServedImage], *, mounts: bool) -> str:
    """Return a path as the pods see it. An image is added to `images`, and is a folder in the pods that we make."""
    if not path.startswith(SCHEME) or not mounts:
        return path
    images.append(ServedImage(name, parse(path)))
    return f"{IMAGES}/{name}"


def spec_of(
    targets: Sequence[ServedTarget],
    settings: ServerSettings,
    name: str | None,
    namespace: str | None,
) -> RunSpec:
    """Return name, namespace and pod settings: those of the first target that is a run, else plain ones."""
    run = None
    for target in targets:
        run = run or target.run
    kubernetes = run.kubernetes if run else None
    image = settings.image or IMAGE
    if kubernetes is None:
        kubernetes = KubernetesConfig(image=image)
    changes: dict[str, Any] = {"image": image, "queue": None, "profile": "restricted"}
    if namespace:
        changes["namespace"] = namespace
    kubernetes = kubernetes.model_copy(update=changes)

    if run is None:
        # A plan needs a config, of which only the name of the model is used here.
        fields = {"model": {"path": targets[0].path}, "data": {"train": "none.jsonl"}}
        config = Config.model_validate(fields)
        usual_name = re.sub(r"[^a-z0-9]+", "-", targets[0].name.lower()).strip("-")
    else:
        config = run
        usual_name = f"{run_name(run.name, run.model.path)}-serve"
    config = config.model_copy(update={"kubernetes": kubernetes})
    spec = RunSpec.of(config, make_plan(config))
    spec = replace(spec, name=name or usual_name, gpus=settings.gpus)
    if run and not kubernetes.storage.outputs.size:
        return spec

    # The claim is named after the run, not after what serves it.
    claim = f"{run_name(config.name, config.model.path)}-outputs"
    storage = {"outputs": {"claim": claim}}
    changed = kubernetes.model_dump(by_alias=True) | {"storage": storage}
    return replace(spec, kubernetes=KubernetesConfig.model_validate(changed))


def problems_of_volume(spec: RunSpec, serving: Serving) -> list[str]:
    """Return the problem of several pods that read a claim which only one node can mount."""
    if not serving.uses_outputs or serving.most_replicas == 1:
        return []
    # The access of a claim that the user made is what the run file says of it.
    kubernetes = spec.config.kubernetes
    if kubernetes is None or kubernetes.storage.outputs.access != "ReadWriteOnce":
        return []
    claim = spec.kubernetes.storage.outputs.claim
    return [
        f"claim {claim} is attached to one node at a time, so that only one pod can serve from it; push the export"
    ]


def notes_on(spec: RunSpec, serving: Serving) -> list[str]:
    """Return what a person must know or do before the manifests work."""
    notes = []
    # Settings whose effect is another one than in training.
    quantization = spec.config.quantization
    if serving.adapters and quantization not in ("none", "auto"):
        notes.append(
            f"the adapter was trained on a {quantization} base and is served on the original one; the merged export "
            "(--merged) holds the weights that it was trained on"
        )
    if serving.uses_outputs:
        notes.append(
            f"the exports are read from claim {spec.kubernetes.storage.outputs.claim or 'of the run'}: they must be on "
            "that volume, not only on this machine (`kubetune push` and ORG/NAME need no volume)"
        )

    # Where the pods find the weights.
    in_image = []
    for path in (serving.model, *(adapter.path for adapter in serving.adapters)):
        on_volume = path.startswith((f"{OUTPUTS}/", f"{CACHE}/"))
        on_volume = on_volume or path in {f"{IMAGES}/{image.name}" for image in serving.images}
        if path.startswith("/") and not on_volume:
            in_image.append(path)
    if in_image:
        notes.append(
            f"no volume of the pods holds {', '.join(in_image)}: --image must contain it. Volumes are mounted at "
            f"{OUTPUTS} (exports of runs) and {CACHE} (downloads)"
        )

    # What the cluster has to have.
    if serving.images and not serving.fetch_image:
        notes.append(
            "the images are mounted by Kubernetes 1.36 (1.33 with the gate ImageVolume) with containerd 2.1 or CRI-O 1.31; "
            "elsewhere --fetch-image IMAGE names an image with kubetune, which fetches them before the server starts"
        )
    if serving.max_replicas:
        notes.append(
            f"the autoscaler needs the metric {WAITING} in the custom metrics API (prometheus-adapter)"
        )
    if serving.api_key_secret:
        notes.append(
            f"Secret {serving.api_key_secret} needs the key VLLM_API_KEY; for the curl, set it in this shell too"
        )
    else:
        notes.append(
            "everybody who reaches the Service may use it; --api-key-secret asks for a key"
        )
    return notes
