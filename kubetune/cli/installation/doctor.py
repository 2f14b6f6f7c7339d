"""`kubetune doctor`: what this installation has and lacks, in one table, with how to mend what is wrong.

Looks and asks only; changes nothing. Each check is a function that yields findings; adding one is a line in CHECKS.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from kubetune import errors
from kubetune.base.files import user_cache
from kubetune.base.gpus import GPU_QUERY, gpu_use
from kubetune.base.humanize import size, visible
from kubetune.base.logs import scrub
from kubetune.cli.json_answers import print_json
from kubetune.cli.remote.run_on_cluster import add_namespace
from kubetune.cli.tables import print_table
from kubetune.library.connection import open_cluster
from kubetune.plan.model_shapes import hub_home

Level = Literal["ok", "note", "wrong"]

_HUB_SECONDS, _TORCH_SECONDS, _CLUSTER_SECONDS = 5.0, 60.0, 5.0
_LITTLE_SPACE = 20 * 2**30
_LOOK_AT_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda, "cuda": cuda, "names": names}))
"""
_NEEDED: tuple[tuple[str, str, str], ...] = (
    ("create", "ConfigMap", ""),
    ("create", "PersistentVolumeClaim", ""),
    ("create", "Service", ""),
    ("create", "ServiceAccount", ""),
    ("list", "Pod", ""),
    ("get", "Pod", "log"),
    ("create", "Pod", "exec"),
    ("list", "Event", ""),
)
"""Permissions that `submit` and the verbs after it need of the API server, beside the workload itself."""


@dataclass(frozen=True)
class Finding:
    """One line of the table. `remedy` says how to mend what is `wrong`, or what a `note` would take to change."""

    level: Level
    what: str
    found: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument(
        "run_file", type=Path, nargs="?", metavar="RUN.YAML", help="look at what this run needs too"
    )
    add_namespace(parser)
    parser.add_argument(
        "--offline", action="store_true", help="ask neither the hub nor the cluster"
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 3 where something is wrong."""
    found = [finding for check in CHECKS for finding in check(args)]
    if args.json:
        print_json([asdict(finding) for finding in found])
    else:
        marks = {"ok": "ok", "note": "--", "wrong": "!!"}
        print_table(
            ("", "WHAT", "FOUND"),
            [(marks[one.level], one.what, visible(one.found)) for one in found],
        )
        for one in (one for one in found if one.remedy):
            print(f"{marks[one.level]} {one.what}: {visible(one.remedy)}")
    return errors.ENVIRONMENT if any(one.level == "wrong" for one in found) else errors.OK


def _libraries(_: argparse.Namespace) -> Iterator[Finding]:
    """Python, kubetune and the libraries it needs, in the versions it needs; its extras, whole or in part."""
    from packaging.requirements import Requirement

    yield Finding("ok", "Python", f"{sys.version.split()[0]} at {sys.executable}")
    own = importlib.metadata.distribution("kubetune")
    yield Finding("ok", "kubetune", f"{own.version} at {Path(__file__).parents[2]}")
    names, extras = own.metadata.get_all("Provides-Extra") or (), dict[str, list[str]]()
    for requirement in map(Requirement, own.requires or ()):
        extra = next((name for name in names if f'"{name}"' in str(requirement.marker)), "")
        if requirement.name == "kubetune" or extra in ("dev", "notebooks"):
            continue
        version = _version_of(requirement.name)
        if extra:
            extras.setdefault(extra, []).extend([] if version else [requirement.name])
        remedy = f"pip install '{requirement.name}{requirement.specifier}'"
        if version and not requirement.specifier.contains(version, prereleases=True):
            yield Finding(
                "wrong", requirement.name, f"{version}, needs {requirement.specifier}", remedy
            )
        elif version and not extra:
            yield Finding("ok", requirement.name, version)
        elif not extra:
            yield Finding("wrong", requirement.name, "missing", remedy)
    have = [extra for extra, missing in extras.items() if not missing]
    lack = [extra for extra, missing in extras.items() if missing]
    yield Finding("ok", "extras", ", ".join(have) or "none")
    if lack:
        remedy = f"where a run needs one: pip install 'kubetune[{lack[0]}]'"
        yield Finding("note", "extras not here", ", ".join(lack), remedy)


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(_: argparse.Namespace) -> Iterator[Finding]:
    """Cores, memory, GPUs with their driver, and whether PyTorch, asked in a process of its own, can use them."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding(
        "ok", "machine", f"{len(os.sched_getaffinity(0))} usable cores, {size(pages)} of memory"
    )
    there = gpu_use()
    for gpu in there:
        yield Finding("ok", f"GPU {gpu['index']}", f"{gpu['name']}, {gpu['memory_total_mib']} MiB")
    if shutil.which(GPU_QUERY[0]) and not there:
        yield Finding(
            "wrong",
            "NVIDIA driver",
            "nvidia-smi finds no GPU",
            "see what `nvidia-smi` says; load the driver",
        )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _LOOK_AT_TORCH],
            capture_output=True,
            text=True,
            timeout=_TORCH_SECONDS,
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            "wrong", "PyTorch", f"not imported within {_TORCH_SECONDS:.0f} s", "is its disk slow?"
        )
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        yield Finding(
            "wrong", "PyTorch", f"cannot be imported: {last}", "pip install --force-reinstall torch"
        )
        return
    torch = json.loads(done.stdout.splitlines()[-1])
    build = f"built for CUDA {torch['built_for']}" if torch["built_for"] else "built for the CPU"
    if there and not torch["cuda"]:
        remedy = "install the PyTorch that fits the driver: pytorch.org, Get started"
        yield Finding(
            "wrong",
            "PyTorch",
            f"{torch['version']}, {build}; sees none of {len(there)} GPUs",
            remedy,
        )
    else:
        seen = f"sees {', '.join(torch['names'])}" if torch["names"] else "trains on the CPU here"
        yield Finding("ok", "PyTorch", f"{torch['version']}, {build}; {seen}")


def _disk(_: argparse.Namespace) -> Iterator[Finding]:
    """Free space where runs and caches go, and how large the caches are."""
    own = user_cache(os.environ) / "kubetune"
    places = {
        "run directories": Path("outputs"),
        "models and data sets": hub_home(os.environ),
        "prepared data": own,
    }
    for what, place in places.items():
        place = place.absolute()
        existing = next(parent for parent in (place, *place.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        used = f", {size(_used(place))} used" if place.is_dir() else ""
        if not os.access(existing, os.W_OK):
            yield Finding(
                "wrong",
                what,
                f"{place} cannot be written to",
                "choose another place or mend its rights",
            )
        elif free < _LITTLE_SPACE:
            yield Finding(
                "note",
                what,
                f"{place}: {size(free)} free{used}",
                "checkpoints of large models need more",
            )
        else:
            yield Finding("ok", what, f"{place}: {size(free)} free{used}")


def _used(folder: Path) -> int:
    """Bytes on disk below a folder, each file once."""
    seen: dict[tuple[int, int], int] = {}
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                facts = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            seen[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(seen.values())


def _hub(args: argparse.Namespace) -> Iterator[Finding]:
    """The hub: does it answer, and does it know the token."""
    from kubetune.data.reading.hub import hub_token

    stored = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "token"
    try:
        token = hub_token() or (stored.read_text().strip() if stored.is_file() else None)
    except (OSError, UnicodeError) as error:
        yield Finding(
            "note",
            "hub token",
            f"{stored} cannot be read: {error}",
            "mend its rights, or set HF_TOKEN",
        )
        token = None
    have = "a token is set" if token else "no token, which only gated and private models need"
    if args.offline or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield Finding("note", "hub", f"not asked; {have}")
        return
    given = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    shown = given.rpartition("@")[2]  # what stands before it may be a password
    try:
        address = urlsplit(given)
        shown = f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"
        request = urllib.request.Request(
            f"{shown}/api/{'whoami-v2' if token else 'models?limit=1'}"
        )
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        said = _answer_to(request)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            yield Finding(
                "wrong",
                "hub",
                f"{shown} does not take the token",
                "make a new one and set HF_TOKEN",
            )
        else:
            yield Finding(
                "note", "hub", f"{shown} answers with {error.code}; {have}", "try again later"
            )
    except json.JSONDecodeError:
        remedy = "look at HF_ENDPOINT, and whether a proxy or a login page stands in between"
        yield Finding(
            "note", "hub", f"{shown} answers, and is not the hub: expected JSON; {have}", remedy
        )
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        remedy = "models then come from folders and the cache; behind a proxy set HTTPS_PROXY"
        yield Finding("note", "hub", f"{shown} cannot be reached: {reason}; {have}", remedy)
    else:
        who = (
            f"; the token is {said['name']}'s"
            if token and isinstance(said, dict) and "name" in said
            else f"; {have}"
        )
        yield Finding("ok", "hub", f"{shown} answers{who}")


def _answer_to(request: urllib.request.Request) -> Any:
    """The JSON that a server answers with, all of it within _HUB_SECONDS: one that drips keeps a socket's limit."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=_HUB_SECONDS) as answer:
                found.put(answer.read())
        except Exception as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            found.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        said = found.get(timeout=_HUB_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"no whole answer within {_HUB_SECONDS:g} s") from None
    if isinstance(said, Exception):
        raise said
    return json.loads(said)


def _cluster(args: argparse.Namespace) -> Iterator[Finding]:
    """The kubeconfig's cluster: does it answer, allow what runs need, and serve the kinds of workload."""
    if args.offline:
        yield Finding("note", "cluster", "not asked")
        return
    namespace, kind = _wanted(args)
    try:
        cluster = open_cluster(namespace, patience_seconds=_CLUSTER_SECONDS)
        from kubetune.k8s.api.kinds import WORKLOADS

        workload = WORKLOADS[kind].name
        refused = [
            f"{verb} {name}{f'/{part}' if part else ''}"
            for verb, name, part in (*_NEEDED, ("create", workload, ""))
            if not cluster.may(verb, name, part)
        ]
        served = [name for name, found in WORKLOADS.items() if cluster.serves(found.name)]
    except errors.KubetuneError as error:
        first = errors.first_line(error)
        yield Finding("note", "cluster", first, "needed only to work with a cluster")
        return
    place = f"{scrub(cluster.address)}, namespace {cluster.namespace}"
    yield Finding("ok", "cluster", f"{place}, serves {', '.join(served)}")
    if kind not in served:
        yield Finding(
            "wrong",
            f"kind {kind}",
            "not served",
            WORKLOADS[kind].install or "the cluster is incomplete",
        )
    if refused:
        remedy = "ask for these rights; docs/kubernetes.md has the Role"
        yield Finding("wrong", "rights", f"refused: {', '.join(refused)}", remedy)
    else:
        yield Finding("ok", "rights", f"enough for runs of kind {kind}")
    if shutil.which("kubectl") is None:
        yield Finding(
            "note", "kubectl", "not on the PATH", "`port-forward` and terminals in pods need it"
        )


def _wanted(args: argparse.Namespace) -> tuple[str | None, str]:
    """The namespace and the kind of workload that are asked about. Raises ConfigError for a run file with mistakes."""
    if args.run_file is None:
        return args.namespace, "job"
    from kubetune.config.load import load_config

    config = load_config(args.run_file, environ={}).kubernetes
    if config is None:
        return args.namespace, "job"
    return args.namespace or config.namespace, config.kind


CHECKS: tuple[Callable[[argparse.Namespace], Iterator[Finding]], ...] = (
    _libraries,
    _devices,
    _disk,
    _hub,
    _cluster,
)
