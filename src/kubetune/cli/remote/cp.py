"""`kubetune cp`: the results of a run on a cluster, on this machine: resumable, and verified byte for byte."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base.humanize import counted, size
from kubetune.cli.remote.run_on_cluster import (
    add_run,
    find,
    is_file,
    local_folder,
    message_on_leaving,
)
from kubetune.errors import OK, ConfigError
from kubetune.library.cluster_connection import open_cluster

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster
    from kubetune.k8s.cluster.download import Downloaded
    from kubetune.k8s.cluster.volume_reader import VolumeReader
    from kubetune.k8s.manifests.run_spec import RunSpec


# So many containers are asked one after the other.
_MOST_CONTAINERS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser)
    parser.add_argument(
        "globs",
        nargs="*",
        metavar="GLOB",
        help="files or folders of the run directory, such as 'logs' or 'checkpoints/best/*'; left out: everything but "
        "the checkpoints that are neither best nor last",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="default outputs/RUN")


def run(args: argparse.Namespace) -> int:
    """Copy. Raise ConfigError when there is no such run or file, EnvironmentFault when one cannot be copied."""
    cluster, spec = _deleted(args) or find(args)
    from kubetune.k8s.cluster.volume_reader import VolumeReader

    to = args.output or local_folder(spec)
    # `checkpoints/` means the folder, as for a shell.
    globs = [glob.rstrip("/") for glob in args.globs]
    leaving = f"what is in {to} stays, and the same command continues from there"
    with message_on_leaving(leaving), VolumeReader(cluster, spec) as volume:
        done = _copied(cluster, spec, volume, to, globs)
    # Nothing matched, which is not the same as all of it being here already.
    if not done.copied and not done.unchanged:
        reason = f"{spec.run_dir} is empty so far"
        if globs:
            reason = f"nothing in {spec.run_dir} matches {' or '.join(globs)}"
        raise ConfigError(f"{reason}. Nothing was copied.")
    line = f"{counted(len(done.copied), 'file')} ({size(done.bytes)}) in {to}, all verified"
    if done.unchanged:
        line += f"; {counted(len(done.unchanged), 'file')} there already"
    print(f"kubetune: {line}")
    return OK


def _copied(
    cluster: Cluster, spec: RunSpec, volume: VolumeReader, to: Path, globs: list[str]
) -> Downloaded:
    """Copy the run directory, by another container where one ends meanwhile. Return what was done."""
    from kubetune.k8s.api.api_errors import Refused
    from kubetune.k8s.api.client import say
    from kubetune.k8s.cluster.asking_pods import NoAnswer
    from kubetune.k8s.cluster.download import Downloaded, download

    done = Downloaded()
    for containers_left in reversed(range(_MOST_CONTAINERS)):
        try:
            download(cluster, volume.target(), spec.run_dir, to, globs, done, say)
            break
        except (NoAnswer, Refused) as error:
            # A run that ends takes its containers along; the next one goes on where this one was.
            is_forbidden = isinstance(error, Refused) and error.code == 403
            if is_forbidden or not containers_left:
                raise
            say(f"{error}; asking another container")
    return done


def _deleted(args: argparse.Namespace) -> tuple[Cluster, RunSpec] | None:
    """Return the run of a run file that was deleted while its results are still on its claim; None for others."""
    if not (is_file(args.run_name) and Path(args.run_name).is_file()):
        return None
    from kubetune.config.load import load_config
    from kubetune.k8s.cluster.run_lookup import read_run
    from kubetune.k8s.manifests.run_spec import spec_of

    spec = spec_of(load_config(Path(args.run_name), environ={}))
    cluster = open_cluster(args.namespace or spec.kubernetes.namespace)
    # Claims that kubetune made have the name of the run.
    claim = spec.kubernetes.storage.outputs.claim or f"{spec.name}-outputs"
    if read_run(cluster, spec.name) or cluster.get("PersistentVolumeClaim", claim) is None:
        return None
    return cluster, spec.in_namespace(cluster.namespace)
