"""Working in pods by hand: pods that idle, this folder's code copied into them, training started and stopped there.

They are a StatefulSet, which needs nothing installed and never ends, under the run's name with `-dev` after it.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kubetune.base.yaml_text import dump
from kubetune.config.schema import Config
from kubetune.config.schema.cluster import JobSetConfig
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import ApiError, may_pass
from kubetune.k8s.api.client import Cluster, Sink
from kubetune.k8s.cluster.asking_pods import PodContainer, on_all
from kubetune.k8s.cluster.cluster_runs import running
from kubetune.k8s.cluster.pods import IDLE, has_ended
from kubetune.k8s.manifests.configmap import pod_config
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec
from kubetune.k8s.run_names import name_beside, run_name

# Folder in the pods: `tree` is the code, beside it the config, the log and the process id.
BENCH = "/tmp/kubetune-dev"

MAX_TREE_BYTES = 64 * 1024 * 1024

_PAUSE_SECONDS = 0.5
_SUFFIX = "-dev"
_INSIDE = ["python", "-P", "-m", "kubetune.k8s.cluster.in_pod"]
# Folders of tools, where git does not say what is code.
_NOT_CODE = {"__pycache__", "node_modules", "outputs", "mlruns", "venv"}


def dev_config(config: Config) -> Config:
    """Return the config of the pods to work in. Raise ConfigError without a `kubernetes` section."""
    if config.kubernetes is None:
        raise ConfigError(
            "kubernetes: the section is missing; add at least `kubernetes: {image: …}`"
        )
    if config.kubernetes.samplers is not None:
        raise ConfigError(
            "kubernetes.samplers: the pods of `dev` are a StatefulSet, which has no servers beside it; leave it and "
            "grpo.servers out for `dev`"
        )
    # Nothing prepares before people work in them: they do that themselves.
    changes = {
        "kind": "statefulset",
        "preprocess": None,
        "initialisers": (),
        "jobset": JobSetConfig(),
    }
    kubernetes = config.kubernetes.model_copy(update=changes)
    name = name_beside(run_name(config.name, config.model.path), _SUFFIX)
    return config.model_copy(update={"name": name, "kubernetes": kubernetes})


def idling(objects: list[Manifest]) -> list[Manifest]:
    """Return the same objects with trainers that do nothing until somebody starts something in them."""
    for obj in objects:
        if obj["kind"] == "StatefulSet":
            pod = obj["spec"]["template"]["spec"]
            pod["containers"][0]["command"] = [*_INSIDE, IDLE]
    return objects


def all_running(cluster: Cluster, spec: RunSpec) -> list[PodContainer]:
    """Return the pods of all nodes. Raise ConfigError while some are missing, since the others would wait for them."""
    targets = running(cluster, spec)
    if len(targets) < spec.nodes:
        raise ConfigError(
            f"{spec.name}: {len(targets)} of {spec.nodes} pods are running; see kubetune status {spec.typed}"
        )
    return targets


def pack_tree(root: Path, config_text: str) -> bytes:
    """Return a tar of the code below `root` and the config. Raise ConfigError when it is too much to be code."""
    archive = io.BytesIO()
    total = 0
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in _code_files(root):
            total += path.stat().st_size
            if total > MAX_TREE_BYTES:
                raise ConfigError(
                    f"{root} holds more than {MAX_TREE_BYTES >> 20} MiB of files ({path.relative_to(root)} is one too "
                    "many); run this in a folder of code, with what is not code in .gitignore"
                )
            tar.add(path, f"tree/{path.relative_to(root)}", recursive=False)

        # The config is no file of this machine: it has the paths that pods see.
        config = config_text.encode()
        info = tarfile.TarInfo("run.yaml")
        info.size = len(config)
        tar.addfile(info, io.BytesIO(config))
    return archive.getvalue()


def _code_files(root: Path) -> Iterator[Path]:
    """Yield the files that git does not ignore; outside of git, all that are not hidden or made by tools."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
        paths = [root / name for name in listing.decode().split("\0") if name]
    # There is no git, or this is no repository.
    except (FileNotFoundError, subprocess.CalledProcessError):
        paths = []
        for path in sorted(root.rglob("*")):
            if _may_be_code(path.relative_to(root)):
                paths.append(path)

    for path in paths:
        # Secrets lie in `.env`, which some repositories do not ignore.
        if path.is_file() and path.name != ".env":
            yield path


def _may_be_code(path: Path) -> bool:
    """True if no part of a path is hidden, or a folder of a tool's."""
    return not any(part.startswith(".") or part in _NOT_CODE for part in path.parts)


def start_training(
    cluster: Cluster, spec: RunSpec, targets: Sequence[PodContainer], tree: Path
) -> None:
    """Copy code and config into all pods, then start the agent in each. Raise EnvironmentFault naming a pod."""
    archive = pack_tree(tree, dump([pod_config(spec)]))
    agent = ["python", "-P", "-m", "kubetune.agent", spec.run_dir]

    def copy(target: PodContainer) -> None:
        argv = [*_INSIDE, "unpack", BENCH]
        _must(cluster, target, argv, stdin=io.BytesIO(archive))

    def start(target: PodContainer) -> None:
        argv = [*_INSIDE, "start", BENCH, *agent, "--config", f"{BENCH}/run.yaml"]
        _must(cluster, target, argv)

    # No pod starts with old code while another one is still copied to.
    on_all(copy, targets)
    on_all(start, targets)


def follow_training(
    cluster: Cluster, targets: Sequence[PodContainer], sink_of: Callable[[PodContainer], Sink]
) -> list[int]:
    """Pass on what all pods print until training ends in each; return the exit codes, by pod."""

    def follow(target: PodContainer) -> int:
        sink = _Counted(sink_of(target))
        while True:
            try:
                # After a break from the byte on that came last.
                argv = [*_INSIDE, "follow", BENCH, str(sink.bytes)]
                return cluster.exec(target.pod, target.container, argv, stdout=sink)
            except ApiError as error:
                # Waits until there is an answer, or gives up.
                pod = cluster.get("Pod", target.pod)
                if not may_pass(error) or pod is None or has_ended(pod):
                    raise
                time.sleep(_PAUSE_SECONDS)

    return on_all(follow, targets)


def stop_training(cluster: Cluster, targets: Sequence[PodContainer]) -> list[int | None]:
    """Have training save and end in all pods; return the exit codes, by pod; None where none ran."""

    def stop(target: PodContainer) -> int | None:
        argv = [*_INSIDE, "stop", BENCH]
        answer = io.BytesIO()
        code = cluster.exec(target.pod, target.container, argv, stdout=answer)
        return code if code or answer.getvalue() else None

    return on_all(stop, targets)


def set_aside(cluster: Cluster, spec: RunSpec, target: PodContainer) -> None:
    """Rename the run directory, so that the next training begins anew."""
    script = 'test ! -e "$1" || mv "$1" "$1.$(date +%Y%m%d-%H%M%S)"'
    _must(cluster, target, ["sh", "-c", script, "sh", spec.run_dir])


def _must(
    cluster: Cluster, target: PodContainer, argv: Sequence[str], stdin: io.BytesIO | None = None
) -> None:
    """Run a command in a pod. Raise EnvironmentFault with what it printed where it fails."""
    output = io.BytesIO()
    code = cluster.exec(
        target.pod, target.container, argv, stdin=stdin, stdout=output, stderr=output
    )
    if code != 0:
        text = output.getvalue().decode(errors="replace").strip()
        raise EnvironmentFault(f"pod {target.pod}: {text}")


class _Counted:
    """Passes bytes on and counts them."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.bytes = 0

    def write(self, data: bytes) -> None:
        """Pass bytes on."""
        self._sink.write(data)
        self.bytes += len(data)
