"""`kubetune delete`: remove a run, from the cluster or from this machine.

The results of a run on a cluster stay unless --volumes is given; of a run here nothing stays.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kubetune.base.humanize import shell_word
from kubetune.cli.remote.run_on_cluster import add_run, asker, find, is_file, message_on_leaving
from kubetune.errors import OK, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser, or_folder=True)
    parser.add_argument(
        "--volumes",
        action="store_true",
        help="delete the results too: the claims that the run made",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    """Say what will be deleted, ask, and delete it. Raise ConfigError when the answer is no."""
    if args.namespace is None and Path(args.run_name).is_dir():
        return _delete_here(args, Path(args.run_name))
    cluster, spec = find(args)
    from kubetune.k8s.cluster.stopping import deletable, delete

    objects = deletable(cluster, spec, volumes=args.volumes)
    print(f"kubetune: this will be deleted in namespace {cluster.namespace}:")
    for obj in objects:
        print(f"  {obj['kind']} {obj['metadata']['name']}")

    outputs = spec.kubernetes.storage.outputs
    # A claim that the run did not make is not deleted with it.
    kept = not args.volumes or not outputs.size
    where = "the volume under /outputs"
    if outputs.size:
        where = f"claim {spec.name}-outputs"
    fate = "are lost for ever"
    if kept:
        fate = "stay"
    print(f"kubetune: the results on {where} {fate}", flush=True)

    if not asker(args)(f"Delete {spec.name}"):
        raise ConfigError("nothing was deleted")
    with message_on_leaving("some of it may still exist; repeat the command to delete the rest"):
        delete(cluster, spec, objects)

    # Without the run, its file still says where the results are; its name alone does not.
    line = f"kubetune: {spec.name} was deleted"
    if kept and is_file(args.run_name):
        line += f"; copy its results with kubetune cp {shell_word(args.run_name)}"
    print(line)
    return OK


def _delete_here(args: argparse.Namespace, run_dir: Path) -> int:
    """Delete a run directory of this machine. Raise ConfigError when the answer is no, or the run is at work."""
    from kubetune.library.deleting import delete_run, require_deletable

    if args.volumes:
        raise ConfigError(
            "--volumes is for runs on a cluster; a run of this machine goes as a whole"
        )
    require_deletable(run_dir)
    print(
        f"kubetune: {run_dir} will be deleted with its checkpoints, numbers and logs, for ever",
        flush=True,
    )
    if not asker(args)(f"Delete {run_dir}"):
        raise ConfigError("nothing was deleted")
    delete_run(run_dir)
    print(f"kubetune: {run_dir} was deleted")
    return OK
