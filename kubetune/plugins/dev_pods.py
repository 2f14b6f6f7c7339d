"""Working in pods by hand: pods that idle, this folder's code copied into them, training started and stopped there.

They are a StatefulSet, which needs nothing installed and never ends, under the run's name with `-dev` behind it.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kubetune.base.yaml_text import dump
from kubetune.config.schema import Config
from kubetune.config.schema.cluster import JobSetConfig
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import ApiError, may_pass
from kubetune.k8s.api.client import Cluster, Sink
from kubetune.k8s.cluster.pods import IDLE, has_ended
from kubetune.k8s.cluster.runs import Target, on_all, running
from kubetune.k8s.manifests.configmap import pod_config
from kubetune.k8s.manifests.spec import Manifest, RunSpec
from kubetune.k8s.run_names import name_beside, run_name

BENCH = "/tmp/kubetune-dev"
"""Folder in the pods: `tree` is the code, beside it the config, the log and the process id."""

MAX_TREE_BYTES = 64 * 1024 * 1024

_PAUSE_SECONDS = 0.5
_SUFFIX = "-dev"
_INSIDE = ["python", "-P", "-m", "kubetune.k8s.cluster.in_pod"]
_NOT_CODE = {"__pycache__", "node_modules", "outputs", "mlruns", "venv"}


def dev_config(config: Config) -> Config:
    """The config of the pods to work in. Raises ConfigError without a `kubernetes` section."""
    if config.kubernetes is None:
        raise ConfigError(
            "kubernetes: the section is missing; add at least `kubernetes: {image: …}`"
        )
    kubernetes = config.kubernetes.model_copy(
        update={
            "kind": "statefulset",
            "preprocess": None,
            "initialisers": (),
            "jobset": JobSetConfig(),
        }
    )
    name = name_beside(run_name(config.name, config.model.path), _SUFFIX)
    return config.model_copy(update={"name": name, "kubernetes": kubernetes})


def idling(objects: list[Manifest]) -> list[Manifest]:
    """The same objects, but their trainers do nothing until somebody starts something in them."""
    for obj in objects:
        if obj["kind"] == "StatefulSet":
            obj["spec"]["template"]["spec"]["containers"][0]["command"] = [*_INSIDE, IDLE]
    return objects


def all_running(cluster: Cluster, spec: RunSpec) -> list[Target]:
    """The pods of all nodes. Raises ConfigError while some are missing, since the others would wait for them."""
    targets = running(cluster, spec)
    if len(targets) < spec.nodes:
        raise ConfigError(
            f"{spec.name}: {len(targets)} of {spec.nodes} pods are running; see kubetune status {spec.typed}"
        )
    return targets


def pack_tree(root: Path, config_text: str) -> bytes:
    """A tar of the code below `root` and the config. Raises ConfigError when it is too much to be code."""
    archive, total = io.BytesIO(), 0
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in _code_files(root):
            total += path.stat().st_size
            if total > MAX_TREE_BYTES:
                raise ConfigError(
                    f"{root} holds more than {MAX_TREE_BYTES >> 20} MiB of files ({path.relative_to(root)} is one too "
                    "many); run this in a folder of code, with what is not code in .gitignore"
                )
            tar.add(path, f"tree/{path.relative_to(root)}", recursive=False)
        info = tarfile.TarInfo("run.yaml")
        info.size = len(config_text.encode())
        tar.addfile(info, io.BytesIO(config_text.encode()))
    return archive.getvalue()


def _code_files(root: Path) -> Iterable[Path]:
    """The files that git does not ignore; outside of git, all that are not hidden or made by tools. Never `.env`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = (
            subprocess.run(command, cwd=root, capture_output=True, check=True)
            .stdout.decode()
            .split("\0")
        )
        found = [root / name for name in listed if name]
    except (FileNotFoundError, subprocess.CalledProcessError):
        parts = ((path, path.relative_to(root).parts) for path in sorted(root.rglob("*")))
        found = [
            path
            for path, inside in parts
            if not any(part[0] == "." or part in _NOT_CODE for part in inside)
        ]
    return [path for path in found if path.is_file() and path.name != ".env"]


def start_training(cluster: Cluster, spec: RunSpec, targets: Sequence[Target], tree: Path) -> None:
    """Copy code and config into all pods, then start the agent in each. Raises EnvironmentFault naming a pod."""
    archive = pack_tree(tree, dump([pod_config(spec)]))
    command = [
        "python",
        "-P",
        "-m",
        "kubetune.agent",
        spec.run_dir,
        "--config",
        f"{BENCH}/run.yaml",
    ]

    def copy(target: Target) -> None:
        _must(cluster, target, [*_INSIDE, "unpack", BENCH], stdin=io.BytesIO(archive))

    on_all(copy, targets)
    on_all(lambda target: _must(cluster, target, [*_INSIDE, "start", BENCH, *command]), targets)


def follow_training(
    cluster: Cluster, targets: Sequence[Target], sink_of: Callable[[Target], Sink]
) -> list[int]:
    """Pass on what all pods print until training ends in each; the exit codes, by pod."""

    def follow(target: Target) -> int:
        sink = _Counted(sink_of(target))
        while True:
            try:
                argv = [*_INSIDE, "follow", BENCH, str(sink.bytes)]
                return cluster.exec(target.pod, target.container, argv, stdout=sink)
            except ApiError as error:
                pod = cluster.get("Pod", target.pod)  # waits until there is an answer, or gives up
                if not may_pass(error) or pod is None or has_ended(pod):
                    raise
                time.sleep(_PAUSE_SECONDS)

    return on_all(follow, targets)


def stop_training(cluster: Cluster, targets: Sequence[Target]) -> list[int]:
    """Have training save and end in all pods; the exit codes, by pod."""
    return on_all(
        lambda target: cluster.exec(
            target.pod, target.container, [*_INSIDE, "stop", BENCH], stdout=io.BytesIO()
        ),
        targets,
    )


def set_aside(cluster: Cluster, spec: RunSpec, target: Target) -> None:
    """Rename the run directory, so that the next training begins anew."""
    script = 'test ! -e "$1" || mv "$1" "$1.$(date +%Y%m%d-%H%M%S)"'
    _must(cluster, target, ["sh", "-c", script, "sh", spec.run_dir])


def _must(
    cluster: Cluster, target: Target, argv: Sequence[str], stdin: io.BytesIO | None = None
) -> None:
    said = io.BytesIO()
    code = cluster.exec(target.pod, target.container, argv, stdin=stdin, stdout=said, stderr=said)
    if code != 0:
        raise EnvironmentFault(
            f"pod {target.pod}: {said.getvalue().decode(errors='replace').strip()}"
        )


class _Counted:
    """Passes bytes on and counts them."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self.bytes = sink, 0

    def write(self, data: bytes) -> None:
        self._sink.write(data)
        self.bytes += len(data)
