"""`kubetune serve --render`: manifests that serve what was trained with vLLM. Asks no cluster and no hub for anything.

`kubetune serve --ollama` makes a GGUF export known to the Ollama of this machine instead.

A target is a run directory, an id of the hub, or an absolute path in the pod, each with `NAME=` in front if it is to be
asked for by that name. Several adapters are served on one base; whole weights are served alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kubetune.base.files import require_plain
from kubetune.base.humanize import shell_word
from kubetune.base.registry.address import SCHEME, cached_digest, parse
from kubetune.cli.remote.render import MARK, write_folder
from kubetune.config import consent
from kubetune.config.data_files import is_hub_id
from kubetune.config.load import read_config
from kubetune.config.naming import OF_TRACKERS, RESOLVED
from kubetune.config.schema import Config, LoraConfig
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.config.vllm import LORA_RANKS
from kubetune.data.text.tokenizer_files import read_json
from kubetune.errors import OK, ConfigError
from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.manifests import dump
from kubetune.k8s.manifests.spec import RunSpec
from kubetune.k8s.run_names import CACHE, OUTPUTS, run_name
from kubetune.plan.plan import make_plan
from kubetune.plugins.serving import kserve
from kubetune.plugins.serving.manifests import (
    IMAGE,
    IMAGES,
    WAITING,
    ServedAdapter,
    ServedImage,
    Serving,
    serve,
    trial,
)
from kubetune.result.forms.programs import is_known_to_vllm
from kubetune.rundir.metrics import IDENTITY

# Rank of an adapter that is not on this machine to be read. vLLM takes any rank up to this maximum.
DEFAULT_RANK = 64
CACHE_SIZE = "200Gi"
_HEADER = f"{MARK}serve; change its options and call it again.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "targets",
        nargs="+",
        metavar="[NAME=]RUN_DIR|ORG/NAME|oci://…|/PATH",
        help="what to serve; several adapters on one base",
    )
    by = parser.add_mutually_exclusive_group(required=True)
    by.add_argument(
        "--render",
        action="store_true",
        help="print the manifests; nothing is applied",
    )
    by.add_argument(
        "--ollama",
        action="store_true",
        help="add the GGUF export of a run to the Ollama of this machine",
    )
    parser.add_argument(
        "--kserve",
        choices=kserve.KINDS,
        help="an object of KServe in place of a Deployment: one address of weights, or a base with adapters",
    )
    _add_model_options(parser)
    _add_pod_options(parser)
    parser.add_argument(
        "-o", "--to", default="-", metavar="DIR", help="one file per object; - prints them all"
    )


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide which weights are served, and how."""
    parser.add_argument(
        "--base",
        metavar="MODEL",
        help="hub id, path or image (oci://…) of the base; targets that are not runs are then adapters on it",
    )
    parser.add_argument(
        "--merged",
        action="store_true",
        help="serve the merged export of a LoRA run instead of base and adapter",
    )
    parser.add_argument(
        "--trust-code",
        metavar="DIGEST",
        help="allow the code in a run's folder from now on; the refusal names the digest",
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help=f"highest rank of adapters that are not from a run (default {DEFAULT_RANK})",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest prompt and answer together; left out: the model's",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="dtype of the served weights",
    )


def _add_pod_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide about the objects in the cluster."""
    parser.add_argument(
        "--name", help="name of the objects; left out: RUN-serve, or from the model"
    )
    parser.add_argument("-n", "--namespace", help="left out: the run's")
    parser.add_argument(
        "--fetch-image",
        metavar="IMAGE",
        help="image with kubetune, which fetches oci:// targets before the server starts; left out: Kubernetes (1.36) "
        "mounts them",
    )
    parser.add_argument(
        "--image", help=f"vLLM image (default {IMAGE}; with --kserve, that of KServe)"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="GPUs of a pod; the model is split over them (default 1)",
    )
    parser.add_argument(
        "--cpu", type=int, default=8, metavar="N", help="CPU cores of a pod (default 8)"
    )
    parser.add_argument("--memory", default="64Gi", help="memory of a pod (default 64Gi)")
    parser.add_argument(
        "--cache-size",
        default=CACHE_SIZE,
        metavar="SIZE",
        help=f"claim for downloaded models (default {CACHE_SIZE})",
    )
    parser.add_argument(
        "--storage-class",
        metavar="CLASS",
        help="storage class of that claim (default: the cluster's)",
    )
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="pods (default 1)")
    parser.add_argument(
        "--max-replicas",
        type=int,
        metavar="N",
        help=f"most pods, started while requests wait (needs the metric {WAITING})",
    )
    parser.add_argument(
        "--api-key-secret",
        metavar="SECRET",
        help="Secret whose key VLLM_API_KEY requests must carry",
    )


# What to call each kind of export.
KINDS = {"adapter": "adapter", "merged": "merged weights", "model": "weights"}

# A name that requests ask for.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Target:
    """A model or an adapter to serve."""

    name: str  # what requests ask for
    path: str  # a hub id, or a path in the pod
    rank: int = DEFAULT_RANK  # of an adapter
    base: str | None = None  # the model that an adapter belongs to; None for whole weights
    run: Config | None = None  # config of the run that it comes from; None where it is no run
    # What provenance.json says about the base of an exported adapter.
    known: Mapping[str, Any] = field(default_factory=dict)


def run(args: argparse.Namespace) -> int:
    """Render, check, print, and say how to try it. Raise ConfigError before anything is written."""
    if args.ollama:
        _require_for_ollama(args)
        return _by_ollama(args.targets)
    targets = [_target(word, args) for word in args.targets]
    serving = _serving(targets, args)
    _require_effect(targets, serving, args)
    spec = _spec(targets, args)
    if args.kserve:
        _require_for_kserve(args)
        objects = kserve.serve(spec, serving, args.kserve)
    else:
        objects = serve(spec, serving)
    problems = [finding.text for finding in check_objects(objects) if finding.fatal]
    if serving.uses_outputs and serving.most_replicas > 1:
        problems += _outputs_on_one_node(spec)
    if problems:
        raise ConfigError([*problems, "Nothing was written."])

    # Manifests go to standard output, everything for people to standard error.
    if args.to == "-":
        sys.stdout.write(_HEADER + dump(objects))
    else:
        names = write_folder(Path(args.to), objects, [], _HEADER)
        print(
            f"kubetune: wrote {len(names)} files to {args.to}; apply: kubectl apply --server-side -k {args.to}"
        )
    if args.kserve:
        notes = kserve.notes(spec, serving, args.kserve)
    else:
        notes = _notes(spec, serving)
        text = f"\nkubetune: once it is applied, try it:\n{trial(spec, serving)}"
        print(text, file=sys.stderr, end="")
    for note in notes:
        print(f"kubetune: {note}", file=sys.stderr)
    return OK


def _require_for_kserve(args: argparse.Namespace) -> None:
    """Raise ConfigError for options about objects that KServe makes itself."""
    options = {
        "--fetch-image": args.fetch_image,
        "--storage-class": args.storage_class,
        "--api-key-secret": args.api_key_secret,
        "--cache-size": args.cache_size != CACHE_SIZE,
    }
    for option, setting in options.items():
        if setting:
            raise ConfigError(
                f"{option}: means nothing with --kserve, which makes pods and volumes itself; leave it out. Nothing was "
                "written."
            )


def _require_for_ollama(args: argparse.Namespace) -> None:
    """Raise ConfigError for options about servers in a cluster, which are all others."""
    without_others = vars(args.parser.parse_args(["any-run", "--ollama"]))
    for name, usual in without_others.items():
        if name == "targets" or getattr(args, name) == usual:
            continue
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"{option}: means nothing with --ollama, which serves on this machine; leave it out (NAME=RUN_DIR names "
            "the model)"
        )


def _require_effect(targets: Sequence[Target], serving: Serving, args: argparse.Namespace) -> None:
    """Raise ConfigError for options that these targets would leave without effect."""
    problem = None
    if args.base and all(target.run for target in targets):
        problem = "--base: the targets are runs, which know their base; to serve an adapter on another one, push it"
    if args.rank and not any(target.base and target.run is None for target in targets):
        problem = "--rank: no target is an adapter whose rank is unknown here"
    if args.fetch_image and not serving.images and not args.kserve:
        problem = "--fetch-image: no target and no base is an image (oci://…)"
    if problem:
        raise ConfigError(f"{problem}; leave it out. Nothing was written.")


def _by_ollama(words: Sequence[str]) -> int:
    """Make exports known to Ollama, each under its name or the run's."""
    from kubetune.result.publishing import ollama

    ollama.require()
    for word in words:
        name, equals, path = word.partition("=")
        if not equals:
            name = ""
            path = word
        folder = ollama.find_export(Path(path))
        # Ollama's names have small letters alone.
        name = (name or Path(path).absolute().name).lower()
        ollama.create(folder, name)
        print(f"kubetune: {folder} is {name} in Ollama; try it: ollama run {name}")
    return OK


def _target(word: str, args: argparse.Namespace) -> Target:
    """Return what a word of the command line names. Raise ConfigError where it names nothing that can be served."""
    name, equals, path = word.partition("=")
    if not equals:
        name = ""
        path = word
    if (Path(path) / RESOLVED).is_file():
        return _of_run(name, Path(path), merged=args.merged, trust_code=args.trust_code)
    if args.merged:
        raise ConfigError(
            f"--merged: {path} is no run directory, and only runs have merged exports; leave it out"
        )
    _require_no_folder(path)
    addresses: tuple[str, ...] = ("/", SCHEME)
    if args.kserve:
        addresses += (*kserve.ADDRESSES, kserve.NATIVE_IMAGE)
    if not (path.startswith(addresses) or is_hub_id(path)):
        raise ConfigError(
            f"{path}: expected a run directory (`kubetune runs` lists them), a model of the hub (ORG/NAME), an image "
            "(oci://registry/name:tag) or an absolute path in the pod; it is none of them"
        )
    name = name or _last_name(path)
    return Target(name, path, args.rank or DEFAULT_RANK, args.base)


def _last_name(path: str) -> str:
    """Return the last part of a path, a hub id, or the address of an image without its tag."""
    if path.startswith(SCHEME):
        path = parse(path).name
    last = path.rstrip("/").rsplit("/", 1)[-1]
    if "://" in path:
        # A revision or a tag is no part of the name.
        last = re.split("[@:]", last)[0]
    return last


def _require_no_folder(path: str) -> None:
    """Raise ConfigError for a path that looks like a run directory of this machine, but is not one."""
    folder = Path(path)
    is_below_a_folder = folder.parent.is_dir() and len(folder.parts) > 1
    if path.startswith("/") or "://" in path or not (folder.is_dir() or is_below_a_folder):
        return
    mistake = "no such folder"
    if folder.is_dir():
        mistake = "a folder, but no run directory: it has no resolved.json"
    raise ConfigError(
        f"{path}: {mistake}; expected a run directory (`kubetune runs` lists them). To serve the model of the hub with "
        f"this name, run the command where there is no folder {folder.parts[0]}. Nothing was written."
    )


def _of_run(name: str, run_dir: Path, *, merged: bool, trust_code: str | None) -> Target:
    """Return the newest export of a run, as the pods see it on the outputs volume."""
    config = read_config(run_dir)
    require_plain(run_dir, but=OF_TRACKERS)
    consent.require(consent.effects_of(config, [consent.REMOTE_CODE]), run_dir, trust_code)
    name_of_run = run_name(config.name, config.model.path)
    name = name or name_of_run
    if merged and not config.lora:
        raise ConfigError(
            f"{run_dir} trained every weight, so it has no merged export; leave --merged out"
        )
    if config.classifies and config.task != "reward_model":
        raise ConfigError(
            f"{run_dir} is a classifier, which vLLM does not serve; use kubetune.classify or kubetune generate"
        )
    # Whole weights, which need no base.
    if merged or not config.lora:
        export = _newest_export(run_dir, "merged" if merged else "model")
        return Target(name, _path_in_pod(name_of_run, export), run=config)

    # An adapter, of which vLLM has to know every part, on a base that the pods can load.
    unsupported = _beyond_vllm(config.lora, classifies=config.classifies)
    if unsupported:
        raise ConfigError(
            f"{run_dir}: vLLM loads no adapters with {unsupported}; serve its merged weights: "
            f"kubetune export {shell_word(run_dir)} --merge, then --merged"
        )
    export = _newest_export(run_dir, "adapter")
    base = _base_path(run_dir, config.model.path)
    if not (base.startswith(("/", SCHEME)) or is_hub_id(base)):
        raise ConfigError(
            f"{run_dir}: its base {base} is a path of this machine; serve its merged export with --merged"
        )
    known = _base_of(run_dir, export)
    path = _path_in_pod(name_of_run, export)
    return Target(name, path, config.lora.r, base, config, known)


def _base_path(run_dir: Path, path: str) -> str:
    """Return the path of a run's base; of an image, by the digest that the run began with, though its tag may move."""
    if not path.startswith(SCHEME):
        return path
    part = read_json(run_dir / IDENTITY).get("parts", {}).get("model", {})
    digest = cached_digest(str(part.get("path")), path)
    if digest is None:
        return path
    address = parse(path)
    return str(replace(address, reference=digest))


def _newest_export(run_dir: Path, kind: str) -> Path:
    """Return the provenance.json of the newest export. Raise ConfigError where the run has none of this kind."""
    # Steps have six digits in names of folders, so the last name is that of the newest step.
    exports = sorted((run_dir / "exports").glob(f"step-*-{kind}/provenance.json"))
    if exports:
        return exports[-1]
    flag = " --merge" if kind == "merged" else ""
    raise ConfigError(
        f"{run_dir} has no export of its {KINDS[kind]}; make one first, where its volume is mounted: "
        f"kubetune export {shell_word(run_dir)}{flag}"
    )


def _path_in_pod(name: str, export: Path) -> str:
    """Return where the pods see an export. `export`: its provenance.json on this machine."""
    return f"{OUTPUTS}/{name}/exports/{export.parent.name}"


def _base_of(run_dir: Path, provenance: Path) -> dict[str, Any]:
    """Return what is known of an adapter's base. Raise ConfigError where vLLM may ignore the adapter in silence."""
    # On some kinds of models vLLM takes an adapter and leaves parts of it out, without an error.
    base: dict[str, Any] = read_json(provenance).get("base", {})
    if not is_known_to_vllm(base):
        kind = base.get("experts_of") or base["text_of"]
        raise ConfigError(
            f"{run_dir}: vLLM is not known to load adapters on {kind}, and may ignore parts of one in silence; serve its "
            f"merged weights: kubetune export {shell_word(run_dir)} --merge, then --merged. Nothing was written."
        )
    return base


def _beyond_vllm(lora: LoraConfig, *, classifies: bool) -> str:
    """Return the parts of an adapter that vLLM refuses (its peft_helper.py); empty where it loads all of it."""
    parts = []
    if lora.use_dora:
        parts.append("lora.use_dora")
    if lora.modules_to_save:
        parts.append("lora.modules_to_save")
    if classifies:
        parts.append("its own head")
    return " and ".join(parts)


def _require_servable(targets: Sequence[Target]) -> None:
    """Raise ConfigError for targets that cannot share a server, or that vLLM cannot serve."""
    # vLLM tells models apart by the names that requests ask for.
    names = {target.name for target in targets}
    if len(names) < len(targets):
        raise ConfigError("two targets have the same name; put NAME= in front of one")
    bases = {target.base for target in targets}
    if None in bases and len(targets) > 1:
        raise ConfigError(
            "whole weights are served alone; several targets are adapters on one base: give --base MODEL"
        )
    if len(bases) > 1:
        raise ConfigError(
            f"adapters of different bases cannot share a server: {', '.join(sorted(map(str, bases)))}"
        )
    for target in targets:
        if not NAME.fullmatch(target.name):
            raise ConfigError(f"{target.name}: expected a name of letters, digits, -, _ and .")
        if target.base and target.rank > LORA_RANKS[-1]:
            raise ConfigError(
                f"{target.name}: rank {target.rank}; vLLM serves at most {LORA_RANKS[-1]}; use --merged"
            )


def _serving(targets: Sequence[Target], args: argparse.Namespace) -> Serving:
    """Return the settings of the server. Raise ConfigError for targets and options that do not go together."""
    _require_servable(targets)
    if args.gpus < 1 or args.replicas < 1 or (args.max_replicas or args.replicas) < args.replicas:
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
        served_name = _last_name(base)
        for target in targets:
            path = _in_pod(target.path, target.name, images, mounts=not args.kserve)
            adapters.append(ServedAdapter(target.name, path, target.rank, target.known))
        if model is not None:
            revision = model.revision
    if served_name in {adapter.name for adapter in adapters}:
        raise ConfigError(
            f"{served_name} is the name of the base; put another NAME= in front of the adapter"
        )
    whole = _in_pod(base or first.path, served_name, images, mounts=not args.kserve)
    return Serving(
        model=whole,
        names=(served_name,),
        revision=revision,
        adapters=tuple(adapters),
        images=tuple(images),
        fetch_image=args.fetch_image,
        image=args.image,
        scores=bool(first.run and first.run.task == "reward_model"),
        trust_remote_code=bool(model and model.trust_remote_code),
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        gpus=args.gpus,
        cpu=args.cpu,
        memory=args.memory,
        cache_size=args.cache_size,
        storage_class=args.storage_class,
        replicas=args.replicas,
        max_replicas=args.max_replicas,
        api_key_secret=args.api_key_secret,
    )


def _in_pod(path: str, name: str, images: list[ServedImage], *, mounts: bool) -> str:
    """Return a path as the pods see it. An image is added to `images`, and is a folder in the pods that we make."""
    if not path.startswith(SCHEME) or not mounts:
        return path
    images.append(ServedImage(name, parse(path)))
    return f"{IMAGES}/{name}"


def _spec(targets: Sequence[Target], args: argparse.Namespace) -> RunSpec:
    """Return name, namespace and pod settings: those of the first target that is a run, else plain ones."""
    run = None
    for target in targets:
        run = run or target.run
    kubernetes = run.kubernetes if run else None
    image = args.image or IMAGE
    if kubernetes is None:
        kubernetes = KubernetesConfig(image=image)
    changes: dict[str, Any] = {"image": image, "queue": None, "profile": "restricted"}
    if args.namespace:
        changes["namespace"] = args.namespace
    kubernetes = kubernetes.model_copy(update=changes)

    if run is None:
        # A plan needs a config; of this one nothing but the name of the model is used.
        fields = {"model": {"path": targets[0].path}, "data": {"train": "none.jsonl"}}
        config = Config.model_validate(fields)
        name = re.sub(r"[^a-z0-9]+", "-", targets[0].name.lower()).strip("-")
    else:
        config = run
        name = f"{run_name(run.name, run.model.path)}-serve"
    config = config.model_copy(update={"kubernetes": kubernetes})
    spec = RunSpec.of(config, make_plan(config))
    spec = replace(spec, name=args.name or name, gpus=args.gpus)
    if run and not kubernetes.storage.outputs.size:
        return spec

    # The claim is named after the run, not after what serves it.
    claim = f"{run_name(config.name, config.model.path)}-outputs"
    storage = {"outputs": {"claim": claim}}
    settings = kubernetes.model_dump(by_alias=True) | {"storage": storage}
    return replace(spec, kubernetes=KubernetesConfig.model_validate(settings))


def _outputs_on_one_node(spec: RunSpec) -> list[str]:
    """Return the problem of several pods that read a claim which only one node can mount."""
    # The access of a claim that the user made is what the run file says of it.
    kubernetes = spec.config.kubernetes
    if kubernetes is None or kubernetes.storage.outputs.access != "ReadWriteOnce":
        return []
    claim = spec.kubernetes.storage.outputs.claim
    return [
        f"claim {claim} is attached to one node at a time, so that only one pod can serve from it; push the export"
    ]


def _notes(spec: RunSpec, serving: Serving) -> list[str]:
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
