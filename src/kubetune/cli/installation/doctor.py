"""`kubetune doctor`: check this installation, and say how to fix what is wrong.

It changes nothing. Each check is a function that yields findings. To add one, write the function and name it in CHECKS.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from kubetune import errors
from kubetune.base.files import user_cache
from kubetune.base.gpus import GPU_QUERY, gpu_use
from kubetune.base.humanize import size
from kubetune.base.logs import scrub
from kubetune.base.terminal import GREEN, RED, YELLOW
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.remote.run_on_cluster import add_namespace
from kubetune.cli.tables import print_fact
from kubetune.library.cluster_connection import open_cluster
from kubetune.plan.model_shapes import hub_home

Level = Literal["ok", "note", "wrong"]
MARKS: dict[Level, str] = {"ok": "ok", "note": "--", "wrong": "!!"}
_COLOURS: dict[Level, int] = {"ok": GREEN, "note": YELLOW, "wrong": RED}

# How long each check waits for an answer.
_HUB_SECONDS = 5.0
_MOST_HUB_BYTES = 1 << 20
_TORCH_SECONDS = 60.0
_CLUSTER_SECONDS = 5.0
# Bytes; with less free space, a note says that checkpoints may not fit.
_LITTLE_SPACE = 20 * 2**30
# Run in its own process, as importing PyTorch may crash.
_LOOK_AT_TORCH = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"version": torch.__version__, "built_for": torch.version.cuda, "cuda": cuda, "names": names}))
"""
# What `submit` and the verbs after it must be allowed to do in the cluster, besides creating the workload:
# verb, kind, and part of the kind.
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


@dataclass(frozen=True)
class CheckFinding:
    """One line of the table. The names of the fields are keys of what `--json` prints."""

    level: Level
    # What was looked at, such as "PyTorch".
    what: str
    # What the check saw, such as a version.
    result: str
    # How to fix what is `wrong`, or to change what a `note` says.
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "run_file", type=Path, nargs="?", metavar="RUN.YAML", help="look at what this run needs too"
    )
    add_namespace(parser)
    parser.add_argument(
        "--offline", action="store_true", help="ask neither the hub nor the cluster"
    )
    add_json(parser, "as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Run all checks and print their findings; the exit code is 3 where something is wrong."""
    findings: list[CheckFinding] = []
    with busy("looking at devices, disk, hub, cluster and libraries"):
        for check in CHECKS:
            findings += check(args)
    is_wrong = any(finding.level == "wrong" for finding in findings)
    return Answer(
        [asdict(finding) for finding in findings],
        lambda: _show(findings),
        errors.ENVIRONMENT if is_wrong else errors.OK,
    )


def _show(findings: Sequence[CheckFinding]) -> None:
    """Print all findings, each with how to change it."""
    width = max(len(finding.what) for finding in findings) + 4
    for finding in findings:
        label = f"{MARKS[finding.level]}  {finding.what}"
        print_fact(label, finding.result, width, _COLOURS[finding.level])
        if finding.remedy:
            print_fact("", f"→ {finding.remedy}", width)


def _libraries(_: argparse.Namespace) -> Iterator[CheckFinding]:
    """Check Python, kubetune and the versions of the libraries it needs; tell which extras are complete."""
    from packaging.requirements import Requirement

    yield CheckFinding("ok", "Python", f"{sys.version.split()[0]} at {sys.executable}")
    kubetune = importlib.metadata.distribution("kubetune")
    yield CheckFinding("ok", "kubetune", f"{kubetune.version} at {Path(__file__).parents[2]}")
    extras = kubetune.metadata.get_all("Provides-Extra") or ()
    # By extra: the libraries of it that are not installed.
    missing: dict[str, list[str]] = {}
    right = []  # libraries that every run needs, with their versions
    for requirement in map(Requirement, kubetune.requires or ()):
        # A requirement of an extra has a marker such as `extra == "mlflow"`.
        extra = next((name for name in extras if f'"{name}"' in str(requirement.marker)), "")
        if requirement.name == "kubetune" or extra in ("dev", "notebooks"):
            continue
        version = _version_of(requirement.name)
        if extra:
            missing.setdefault(extra, [])
            if version is None:
                missing[extra].append(requirement.name)
        remedy = f"pip install '{requirement.name}{requirement.specifier}'"
        if version and not requirement.specifier.contains(version, prereleases=True):
            yield CheckFinding(
                "wrong", requirement.name, f"{version}, needs {requirement.specifier}", remedy
            )
        elif version and not extra:
            right.append(f"{requirement.name} {version}")
        elif not extra:
            yield CheckFinding("wrong", requirement.name, "missing", remedy)
    yield CheckFinding("ok", "libraries", ", ".join(right))
    complete = [extra for extra, libraries in missing.items() if not libraries]
    incomplete = [extra for extra, libraries in missing.items() if libraries]
    yield CheckFinding("ok", "extras", ", ".join(complete) or "none")
    if incomplete:
        remedy = f"where a run needs one: pip install 'kubetune[{incomplete[0]}]'"
        yield CheckFinding("note", "extras not here", ", ".join(incomplete), remedy)


def _version_of(name: str) -> str | None:
    """Return the version of an installed library; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(_: argparse.Namespace) -> Iterator[CheckFinding]:
    """Check cores, memory, GPUs with their driver, and whether PyTorch can use them."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = len(os.sched_getaffinity(0))
    yield CheckFinding("ok", "machine", f"{cores} usable cores, {size(memory)} of memory")
    gpus = gpu_use()
    for gpu in gpus:
        yield CheckFinding(
            "ok", f"GPU {gpu['index']}", f"{gpu['name']}, {gpu['memory_total_mib']} MiB"
        )
    if shutil.which(GPU_QUERY[0]) and not gpus:
        remedy = "look at the output of `nvidia-smi`; load the driver"
        yield CheckFinding("wrong", "NVIDIA driver", "nvidia-smi finds no GPU", remedy)
    yield _torch(len(gpus))


def _torch(gpus: int) -> CheckFinding:
    """Check in a process of its own whether PyTorch can use the GPUs, as importing it may crash."""
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", _LOOK_AT_TORCH],
            capture_output=True,
            text=True,
            timeout=_TORCH_SECONDS,
        )
    except subprocess.TimeoutExpired:
        problem = f"not imported within {_TORCH_SECONDS:.0f} s"
        return CheckFinding("wrong", "PyTorch", problem, "is its disk slow?")
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["it printed nothing"]
        problem = f"cannot be imported: {lines[-1]}"
        return CheckFinding("wrong", "PyTorch", problem, "pip install --force-reinstall torch")
    # Libraries may print before the answer, which is the last line.
    torch = json.loads(process.stdout.splitlines()[-1])
    build = "built for the CPU"
    if torch["built_for"]:
        build = f"built for CUDA {torch['built_for']}"
    build = f"{torch['version']}, {build}"
    if gpus and not torch["cuda"]:
        remedy = "install the PyTorch that fits the driver: pytorch.org, Get started"
        return CheckFinding("wrong", "PyTorch", f"{build}; sees none of {gpus} GPUs", remedy)
    if torch["names"]:
        return CheckFinding("ok", "PyTorch", f"{build}; sees {', '.join(torch['names'])}")
    return CheckFinding("ok", "PyTorch", f"{build}; trains on the CPU here")


def _disk(_: argparse.Namespace) -> Iterator[CheckFinding]:
    """Check the free space for runs and caches, and tell how large the caches are."""
    places = {
        "run directories": Path("outputs"),
        "models and data sets": hub_home(os.environ),
        "prepared data": user_cache(os.environ) / "kubetune",
    }
    for what, place in places.items():
        place = place.absolute()
        # A folder that does not exist yet would be made on the disk of its nearest parent.
        existing = next(parent for parent in (place, *place.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        state = f"{place}: {size(free)} free"
        if place.is_dir():
            state += f", {size(_used(place))} used"
        if not os.access(existing, os.W_OK):
            remedy = "choose another place or change its permissions"
            yield CheckFinding("wrong", what, f"{place} cannot be written to", remedy)
        elif free < _LITTLE_SPACE:
            yield CheckFinding("note", what, state, "checkpoints of large models need more")
        else:
            yield CheckFinding("ok", what, state)


def _used(folder: Path) -> int:
    """Return the bytes on disk below a folder."""
    # By device and inode, as a file with several names takes its space once.
    sizes: dict[tuple[int, int], int] = {}
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                facts = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            sizes[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(sizes.values())


def _hub(args: argparse.Namespace) -> Iterator[CheckFinding]:
    """Check whether the hub answers and takes the token."""
    stored = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "token"
    token = None
    try:
        token = _token(stored)
    except (OSError, UnicodeError) as error:
        remedy = "change its permissions, or set HF_TOKEN"
        yield CheckFinding("note", "hub token", f"{stored} cannot be read: {error}", remedy)
    token_state = "no token, which only gated and private models need"
    if token:
        token_state = "a token is set"
    if args.offline or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield CheckFinding("note", "hub", f"not asked; {token_state}")
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    yield _ask_hub(endpoint, token, token_state)


def _token(stored: Path) -> str | None:
    """Return the token of the environment, else the one that `hf auth login` stored; None without either."""
    from kubetune.data.reading.hub import hub_token

    token = hub_token()
    if token is None and stored.is_file():
        return stored.read_text().strip()
    return token


def _ask_hub(endpoint: str, token: str | None, token_state: str) -> CheckFinding:
    """Ask the hub who the token belongs to, or without one for a model."""
    # What is before an @ may be a password.
    address = endpoint.rpartition("@")[2]
    try:
        parts = urlsplit(endpoint)
        address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        path = "whoami-v2" if token else "models?limit=1"
        request = urllib.request.Request(f"{address}/api/{path}")
        if token:
            # Where the hub sends us to another host, that host gets no token.
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        answer = _answer_to(request)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            problem = f"{address} does not take the token"
            return CheckFinding("wrong", "hub", problem, "make a new one and set HF_TOKEN")
        problem = f"{address} answers with {error.code}; {token_state}"
        return CheckFinding("note", "hub", problem, "try again later")
    except _NotTheHub as error:
        problem = f"{address} answers, and is not the hub: {error}; {token_state}"
        remedy = "look at HF_ENDPOINT, and whether a proxy or a login page stands in between"
        return CheckFinding("note", "hub", problem, remedy)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        problem = f"{address} cannot be reached: {reason}; {token_state}"
        remedy = "models then come from folders and the cache; behind a proxy set HTTPS_PROXY"
        return CheckFinding("note", "hub", problem, remedy)
    if token and isinstance(answer, dict) and "name" in answer:
        return CheckFinding("ok", "hub", f"{address} answers; the token is {answer['name']}'s")
    return CheckFinding("ok", "hub", f"{address} answers; {token_state}")


class _NotTheHub(Exception):
    """Something else answers. The message says what was expected."""


def _answer_to(request: urllib.request.Request) -> Any:
    """Return the JSON that a server answers with. Raise TimeoutError where not all of it comes in _HUB_SECONDS.

    Raise _NotTheHub where it is no JSON, or longer than the hub's answers are.

    The timeout of a socket does not suffice: each byte of a slow answer starts it anew.
    """
    answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=_HUB_SECONDS) as response:
                answers.put(response.read(_MOST_HUB_BYTES + 1))
        except Exception as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=_HUB_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"no whole answer within {_HUB_SECONDS:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    if len(answer) > _MOST_HUB_BYTES:
        raise _NotTheHub(f"expected JSON of at most {_MOST_HUB_BYTES:,} bytes")
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise _NotTheHub("expected JSON") from None


def _cluster(args: argparse.Namespace) -> Iterator[CheckFinding]:
    """Check whether the kubeconfig's cluster answers, allows what runs need, and serves the kinds of workload."""
    if args.offline:
        yield CheckFinding("note", "cluster", "not asked")
        return
    namespace, kind = _wanted(args)
    try:
        # It waits for a short time only, as a kubeconfig often names a cluster that is gone.
        cluster = open_cluster(namespace, patience_seconds=_CLUSTER_SECONDS)
        from kubetune.k8s.api.kinds import WORKLOADS

        workload = WORKLOADS[kind].name
        refused = []
        for verb, name, part in (*_NEEDED, ("create", workload, "")):
            if not cluster.may(verb, name, part):
                refused.append(f"{verb} {name}/{part}" if part else f"{verb} {name}")
        served = [name for name, known in WORKLOADS.items() if cluster.serves(known.name)]
    except errors.KubetuneError as error:
        first = errors.first_line(error)
        yield CheckFinding("note", "cluster", first, "needed only to work with a cluster")
        return
    place = f"{scrub(cluster.address)}, namespace {cluster.namespace}"
    yield CheckFinding("ok", "cluster", f"{place}, serves {', '.join(served)}")
    if kind not in served:
        remedy = WORKLOADS[kind].install or "the cluster is incomplete"
        yield CheckFinding("wrong", f"kind {kind}", "not served", remedy)
    if refused:
        remedy = "ask for these rights; docs/kubernetes.md has the Role"
        yield CheckFinding("wrong", "rights", f"refused: {', '.join(refused)}", remedy)
    else:
        yield CheckFinding("ok", "rights", f"enough for runs of kind {kind}")
    if shutil.which("kubectl") is None:
        remedy = "`port-forward` and terminals in pods need it"
        yield CheckFinding("note", "kubectl", "not on the PATH", remedy)


def _wanted(args: argparse.Namespace) -> tuple[str | None, str]:
    """Return the namespace and the kind of workload to ask about. Raise ConfigError for a run file with mistakes."""
    if args.run_file is None:
        return args.namespace, "job"
    from kubetune.config.load import load_config

    config = load_config(args.run_file, environ={}).kubernetes
    if config is None:
        return args.namespace, "job"
    return args.namespace or config.namespace, config.kind


CHECKS: tuple[Callable[[argparse.Namespace], Iterator[CheckFinding]], ...] = (
    _devices,
    _disk,
    _hub,
    _cluster,
    _libraries,
)
