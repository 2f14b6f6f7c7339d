"""`kubetune serve --render`: manifests that serve what was trained with vLLM. Asks no cluster and no hub for anything.

`kubetune serve --ollama` makes a GGUF export known to the Ollama of this machine instead, and `kubetune serve --check`
asks a server whether it is the model.

`plugins/serving` knows what can be served, and how.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from kubetune.cli.json_answers import add_json
from kubetune.cli.last_run import LAST
from kubetune.cli.remote.render import MARK, write_folder
from kubetune.cli.result import serve_check
from kubetune.errors import OK, ConfigError
from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.manifests import dump
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec
from kubetune.plugins.serving import kserve
from kubetune.plugins.serving.checking import checking_job
from kubetune.plugins.serving.manifests import (
    IMAGE,
    WAITING,
    ServerSettings,
    Serving,
    serve,
    trial,
)
from kubetune.plugins.serving.served_targets import (
    DEFAULT_RANK,
    ServedTarget,
    TargetOptions,
    split_name,
    target_of,
)
from kubetune.plugins.serving.setup import notes_on, problems_of_volume, serving_of, spec_of

CACHE_SIZE = ServerSettings.cache_size
_HEADER = f"{MARK}serve; change its options and call it again.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "targets",
        nargs="*",
        default=[LAST],
        metavar="[NAME=]RUN_DIR|ORG/NAME|oci://…|/PATH",
        help="what to serve; several adapters on one base; left out: the newest run",
    )
    by = parser.add_mutually_exclusive_group(required=True)
    by.add_argument(
        "--render",
        action="store_true",
        help="print the manifests; nothing is applied",
    )
    by.add_argument(
        "--check",
        metavar="URL",
        help="ask the server at an address whether it is the model of a run or an export",
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
    serve_check.add_arguments(parser)
    add_json(parser, "with --check: its points as JSON")
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
        "--check-image",
        metavar="IMAGE",
        help="image with kubetune: add a Job that fails unless the server is the model of the run",
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


def run(args: argparse.Namespace) -> int:
    """Render, check, print, and say how to try it. Raise ConfigError before anything is written."""
    if args.ollama:
        _require_only(
            args, ["--ollama"], "which serves on this machine (NAME=RUN_DIR names the model)"
        )
        return _by_ollama(args.targets)
    if args.check:
        _require_only(
            args,
            ["--check", args.check],
            "which asks a server",
            (*serve_check.OPTIONS, "trust_code"),
        )
        return serve_check.run(args)
    _require_none(args, serve_check.OPTIONS)
    options = TargetOptions(
        args.base, args.rank, args.merged, args.trust_code, by_kserve=bool(args.kserve)
    )
    targets = [target_of(word, options) for word in args.targets]
    settings = _settings(args)
    serving = serving_of(targets, settings, mounts=not args.kserve)
    _require_effect(targets, serving, args)
    spec = spec_of(targets, settings, args.name, args.namespace)
    if args.kserve:
        _require_for_kserve(args)
        objects = kserve.serve(spec, serving, args.kserve)
    else:
        objects = serve(spec, serving)
    if args.check_image:
        objects.append(checking_job(spec, settings, targets, args.check_image, args.kserve))
    problems = [finding.text for finding in check_objects(objects) if finding.fatal]
    problems += problems_of_volume(spec, serving)
    if problems:
        raise ConfigError([*problems, "Nothing was written."])

    _write(objects, args.to)
    _say_how_to_try(spec, serving, args.kserve)
    return OK


def _write(objects: Sequence[Manifest], to: str) -> None:
    """Write the manifests to standard output (`-`) or to a folder."""
    if to == "-":
        sys.stdout.write(_HEADER + dump(objects))
        return
    names = write_folder(Path(to), objects, [], _HEADER)
    print(f"kubetune: wrote {len(names)} files to {to}; apply: kubectl apply --server-side -k {to}")


def _say_how_to_try(spec: RunSpec, serving: Serving, by_kserve: str | None) -> None:
    """Print to standard error, since manifests may go to standard output, how to try what is served, and notes."""
    if by_kserve:
        notes = kserve.notes(spec, serving, by_kserve)
    else:
        notes = notes_on(spec, serving)
        text = f"\nkubetune: once it is applied, try it:\n{trial(spec, serving)}"
        print(text, file=sys.stderr, end="")
    for note in notes:
        print(f"kubetune: {note}", file=sys.stderr)


def _settings(args: argparse.Namespace) -> ServerSettings:
    """Return the settings that have an option."""
    options = vars(args)
    names = [setting.name for setting in fields(ServerSettings) if setting.name in options]
    return ServerSettings(**{name: options[name] for name in names})


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


def _require_only(
    args: argparse.Namespace, words: Sequence[str], reason: str, allowed: Sequence[str] = ()
) -> None:
    """Raise ConfigError for options that mean nothing with the first word. `allowed`: names of those that do."""
    usual = vars(args.parser.parse_args(["any-run", *words]))
    for name in _changed(args, usual):
        if name not in allowed:
            raise ConfigError(
                f"--{name.replace('_', '-')}: means nothing with {words[0]}, {reason}; leave it out"
            )


def _require_none(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ConfigError for options that mean something only with --check."""
    usual = vars(args.parser.parse_args(["any-run", "--render"]))
    for name in _changed(args, usual):
        if name in names:
            raise ConfigError(f"--{name}: means something only with --check; leave it out")


def _changed(args: argparse.Namespace, usual: dict[str, object]) -> Iterator[str]:
    """Yield the names of options that were given."""
    for name, value in usual.items():
        if name != "targets" and getattr(args, name) != value:
            yield name


def _require_effect(
    targets: Sequence[ServedTarget], serving: Serving, args: argparse.Namespace
) -> None:
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
        name, path = split_name(word)
        folder = ollama.find_export(Path(path))
        # Ollama's names have only small letters.
        name = (name or Path(path).absolute().name).lower()
        ollama.create(folder, name)
        print(f"kubetune: {folder} is {name} in Ollama; try it: ollama run {name}")
    return OK
