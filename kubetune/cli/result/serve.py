"""`kubetune serve --render`: manifests that serve what was trained with vLLM. Asks no cluster and no hub for anything.

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
from kubetune.cli.remote.render import HEADER, write_folder
from kubetune.config import consent
from kubetune.config.load import read_config
from kubetune.config.naming import OF_TRACKERS, RESOLVED
from kubetune.config.schema import Config
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.data.text.tokenizer_files import read_json
from kubetune.errors import OK, ConfigError
from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.manifests import dump
from kubetune.k8s.manifests.spec import RunSpec, on_hub
from kubetune.k8s.run_names import CACHE, OUTPUTS, run_name
from kubetune.plan.plan import make_plan
from kubetune.plugins.serving.manifests import (
    IMAGE,
    LORA_RANKS,
    WAITING,
    Adapter,
    Serving,
    serve,
    trial,
)
from kubetune.result.publishing.serving import is_known_to_vllm

DEFAULT_RANK = 64
"""Of an adapter that is not here to be asked; vLLM takes any rank up to the one it was told."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add = parser.add_argument
    add(
        "targets",
        nargs="+",
        metavar="[NAME=]RUN_DIR|ORG/NAME|/PATH",
        help="what to serve; several adapters on one base",
    )
    add(
        "--render",
        action="store_true",
        required=True,
        help="print the manifests; nothing is applied",
    )
    add(
        "--base",
        metavar="MODEL",
        help="hub id or path of the base: targets that are no run are then adapters on it",
    )
    add(
        "--merged",
        action="store_true",
        help="serve the merged export of a LoRA run instead of base and adapter",
    )
    add(
        "--trust-code",
        metavar="DIGEST",
        help="allow code that a run brings, from now on: the digest that its refusal names",
    )
    add(
        "--rank",
        type=int,
        metavar="R",
        help=f"highest rank of adapters that are no run (default {DEFAULT_RANK})",
    )
    add("--name", help="name of the objects; left out: RUN-serve, or from the model")
    add("-n", "--namespace", help="left out: the run's")
    add("--image", default=IMAGE, help=f"vLLM image (default {IMAGE})")
    add(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="GPUs of a pod; the model is split over them (default 1)",
    )
    add("--cpu", type=int, default=8, metavar="N", help="CPU cores of a pod (default 8)")
    add("--memory", default="64Gi", help="memory of a pod (default 64Gi)")
    add(
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest prompt and answer together; left out: the model's",
    )
    add(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="of the weights served",
    )
    add(
        "--cache-size",
        default="200Gi",
        metavar="SIZE",
        help="claim for downloaded models (default 200Gi)",
    )
    add("--storage-class", metavar="CLASS", help="of that claim; left out: the cluster's default")
    add("--replicas", type=int, default=1, metavar="N", help="pods (default 1)")
    add(
        "--max-replicas",
        type=int,
        metavar="N",
        help=f"more pods while requests wait (needs the metric {WAITING})",
    )
    add(
        "--api-key-secret",
        metavar="SECRET",
        help="Secret whose key VLLM_API_KEY requests must carry",
    )
    add("-o", "--to", default="-", metavar="DIR", help="one file per object; - prints them all")


_KINDS = {"adapter": "adapter", "merged": "merged weights", "model": "weights"}


@dataclass(frozen=True)
class Target:
    """One thing to serve. `run`: the config of the run it comes from; `base`: it is an adapter on that model, of which
    provenance.json says what is `known`."""

    name: str
    path: str
    rank: int = DEFAULT_RANK
    base: str | None = None
    run: Config | None = None
    known: Mapping[str, Any] = field(default_factory=dict)


def run(args: argparse.Namespace) -> int:
    """Render, check, print, and say how to try it. Raises ConfigError before anything is written."""
    targets = [_target(word, args) for word in args.targets]
    serving = _serving(targets, args)
    spec = _spec(targets, args)
    objects = serve(spec, serving)
    problems = [finding.text for finding in check_objects(objects) if finding.fatal]
    if serving.uses_outputs and serving.most_replicas > 1:
        problems += _outputs_on_one_node(spec)
    if problems:
        raise ConfigError([*problems, "Nothing was written."])
    if args.to == "-":
        sys.stdout.write(HEADER + dump(objects))
    else:
        names = write_folder(Path(args.to), objects, [])
        print(
            f"kubetune: wrote {len(names)} files to {args.to}; apply: kubectl apply --server-side -k {args.to}"
        )
    print(
        f"\nkubetune: once it is applied, try it:\n{trial(spec, serving)}", file=sys.stderr, end=""
    )
    for note in _notes(spec, serving):
        print(f"kubetune: {note}", file=sys.stderr)
    return OK


def _target(word: str, args: argparse.Namespace) -> Target:
    name, equals, path = word.partition("=")
    name, path = (name, path) if equals else ("", word)
    if (Path(path) / RESOLVED).is_file():
        return _of_run(name, Path(path), merged=args.merged, trust_code=args.trust_code)
    if args.merged:
        raise ConfigError(
            f"{path} is no run directory, so --merged says nothing about it; leave it out"
        )
    folder = Path(path)
    if not path.startswith("/") and (
        folder.is_dir() or (folder.parent.is_dir() and len(folder.parts) > 1)
    ):
        found = (
            "a folder, but no run directory: it has no resolved.json"
            if folder.is_dir()
            else "no such folder"
        )
        raise ConfigError(
            f"{path}: {found}; expected a run directory (`kubetune runs` lists them). A model of the hub is taken by "
            f"its name, ORG/NAME, where no folder {folder.parts[0]} is in the way. Nothing was written."
        )
    if not (path.startswith("/") or on_hub(path)):
        raise ConfigError(
            f"{path}: expected a run directory (`kubetune runs` lists them), a model of the hub (ORG/NAME) or an "
            "absolute path in the pod; it is none of them"
        )
    name = name or path.rstrip("/").rsplit("/", 1)[-1]
    return Target(name, path, args.rank or DEFAULT_RANK, args.base)


def _of_run(name: str, run_dir: Path, *, merged: bool, trust_code: str | None) -> Target:
    """The export of a run, as the pods see it on the outputs volume."""
    config = read_config(run_dir)
    require_plain(run_dir, but=OF_TRACKERS)
    consent.require(consent.code_of(config, [consent.REMOTE_CODE]), run_dir, trust_code)
    kind = "merged" if merged else "adapter" if config.lora else "model"
    if merged and not config.lora:
        raise ConfigError(
            f"{run_dir} trained every weight, so there is nothing merged; leave --merged out"
        )
    if config.classifies and config.task != "reward_model":
        raise ConfigError(
            f"{run_dir} is a classifier, which is not served; kubetune.classify and generate ask it"
        )
    if kind == "adapter" and (unknown := _beyond_vllm(config)):
        raise ConfigError(
            f"{run_dir}: vLLM loads no adapters with {unknown}; serve its merged weights: "
            f"kubetune export {shell_word(run_dir)} --merge, then --merged"
        )
    exports = sorted((run_dir / "exports").glob(f"step-*-{kind}/provenance.json"))
    if not exports:
        flag = " --merge" if merged else ""
        raise ConfigError(
            f"{run_dir} has no export of its {_KINDS[kind]}; make one first, where its volume is mounted: "
            f"kubetune export {shell_word(run_dir)}{flag}"
        )
    path = f"{OUTPUTS}/{run_name(config)}/exports/{exports[-1].parent.name}"
    rank = config.lora.r if config.lora else DEFAULT_RANK
    base = config.model.path if kind == "adapter" else None
    if base is not None and not (base.startswith("/") or on_hub(base)):
        raise ConfigError(
            f"{run_dir}: its base {base} is a path of this machine; serve its merged export with --merged"
        )
    known = _base_of(run_dir, exports[-1]) if kind == "adapter" else {}
    return Target(name or run_name(config), path, rank, base, config, known)


def _base_of(run_dir: Path, provenance: Path) -> dict[str, Any]:
    """Facts of an exported adapter's base. Raises ConfigError where vLLM may leave the adapter out."""
    base: dict[str, Any] = read_json(provenance).get("base", {})
    if not is_known_to_vllm(base):
        kind = base.get("experts_of") or base["text_of"]
        raise ConfigError(
            f"{run_dir}: vLLM is not known to load adapters on {kind}, and leaves some out unsaid; serve its merged "
            f"weights: kubetune export {shell_word(run_dir)} --merge, then --merged. Nothing was written."
        )
    return base


def _beyond_vllm(config: Config) -> str:
    """Parts of an adapter that vLLM refuses to load (its peft_helper.py); empty where it takes it."""
    lora = config.lora
    found = {
        "lora.use_dora": lora and lora.use_dora,
        "lora.modules_to_save": lora and lora.modules_to_save,
        "a head of their own": config.classifies,
    }
    return " and ".join(name for name, is_set in found.items() if is_set)


def _serving(targets: Sequence[Target], args: argparse.Namespace) -> Serving:
    bases = {target.base for target in targets}
    if len({target.name for target in targets}) < len(targets):
        raise ConfigError("two targets have the same name; put NAME= in front of one")
    if None in bases and len(targets) > 1:
        raise ConfigError(
            "whole weights are served alone; several targets are adapters on one base: give --base MODEL"
        )
    if len(bases) > 1:
        raise ConfigError(
            f"adapters of different bases cannot share a server: {', '.join(sorted(map(str, bases)))}"
        )
    for target in targets:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", target.name):
            raise ConfigError(f"{target.name}: expected a name of letters, digits, -, _ and .")
        if target.base and target.rank > LORA_RANKS[-1]:
            raise ConfigError(
                f"{target.name}: rank {target.rank}; vLLM serves at most {LORA_RANKS[-1]}; use --merged"
            )
    if args.gpus < 1 or args.replicas < 1 or (args.max_replicas or args.replicas) < args.replicas:
        raise ConfigError(
            "--gpus and --replicas: expected at least 1; --max-replicas: at least --replicas"
        )
    (base,), first = bases, targets[0]
    own_name = base.strip("/").rsplit("/", 1)[-1] if base else first.name
    if base and own_name in {target.name for target in targets}:
        raise ConfigError(
            f"{own_name} is what the base is asked for by; put another NAME= in front of the adapter"
        )
    model = first.run.model if first.run else None
    return Serving(
        model=base or first.path,
        names=(own_name,),
        revision=model.revision if model and base else None,
        adapters=tuple(Adapter(t.name, t.path, t.rank, t.known) for t in targets) if base else (),
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


def _spec(targets: Sequence[Target], args: argparse.Namespace) -> RunSpec:
    """Name, namespace and pod settings: those of the first target that is a run, else plain ones."""
    known = next((target.run for target in targets if target.run is not None), None)
    kubernetes = known.kubernetes if known and known.kubernetes else None
    changes: dict[str, Any] = {"image": args.image, "queue": None, "profile": "restricted"}
    if args.namespace:
        changes["namespace"] = args.namespace
    kubernetes = (kubernetes or KubernetesConfig(image=args.image)).model_copy(update=changes)
    outputs_of = known or Config.model_validate(
        {"model": {"path": targets[0].path}, "data": {"train": "none.jsonl"}}
    )
    config = outputs_of.model_copy(update={"kubernetes": kubernetes})
    stem = (
        f"{run_name(config)}-serve"
        if known
        else re.sub(r"[^a-z0-9]+", "-", targets[0].name.lower()).strip("-")
    )
    spec = RunSpec.of(config, make_plan(config))
    if known and not kubernetes.storage.outputs.size:
        return replace(spec, name=args.name or stem, gpus=args.gpus)
    # The claim is named after the run, not after what serves it.
    claimed = KubernetesConfig.model_validate(
        kubernetes.model_dump(by_alias=True)
        | {"storage": {"outputs": {"claim": f"{run_name(config)}-outputs"}}}
    )
    return replace(spec, kubernetes=claimed, name=args.name or stem, gpus=args.gpus)


def _outputs_on_one_node(spec: RunSpec) -> list[str]:
    claim = spec.kubernetes.storage.outputs.claim
    if (
        spec.config.kubernetes is None
        or spec.config.kubernetes.storage.outputs.access != "ReadWriteOnce"
    ):
        return []
    return [
        f"claim {claim} is attached to one node at a time, so that only one pod can serve from it; push the export"
    ]


def _notes(spec: RunSpec, serving: Serving) -> list[str]:
    notes = []
    quantization = spec.config.quantization
    if serving.adapters and quantization not in ("none", "auto"):
        notes.append(
            f"the adapter was trained on a {quantization} base, and is put on the original one here; what it was "
            "trained on is in the merged export (--merged)"
        )
    if serving.uses_outputs:
        notes.append(
            f"the exports are read from claim {spec.kubernetes.storage.outputs.claim or 'of the run'}: they must be on "
            "that volume, not only on this machine (`kubetune push` and ORG/NAME need no volume)"
        )
    paths = (serving.model, *(adapter.path for adapter in serving.adapters))
    in_image = [
        path
        for path in paths
        if path.startswith("/") and not path.startswith((f"{OUTPUTS}/", f"{CACHE}/"))
    ]
    if in_image:
        notes.append(
            f"no volume of the pods holds {', '.join(in_image)}: --image must contain it. Volumes are mounted at "
            f"{OUTPUTS} (exports of runs) and {CACHE} (downloads)"
        )
    if serving.max_replicas:
        notes.append(
            f"the autoscaler needs the metric {WAITING} in the custom metrics API (prometheus-adapter)"
        )
    if serving.api_key_secret:
        notes.append(
            f"Secret {serving.api_key_secret} needs the key VLLM_API_KEY, in this shell too for the curl"
        )
    else:
        notes.append("whoever reaches the Service may use it; --api-key-secret asks for a key")
    return notes
