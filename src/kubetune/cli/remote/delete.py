"""`kubetune delete`: remove a run from the cluster. Its results stay unless --volumes is given."""

from __future__ import annotations

import argparse

from kubetune.base.humanize import shell_word
from kubetune.cli.remote.run_on_cluster import add_run, asker, find, is_file, message_on_interrupt
from kubetune.errors import OK, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser)
    parser.add_argument(
        "--volumes",
        action="store_true",
        help="delete the results too: the claims that the run made",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    """Say what will be deleted, ask, and delete it. Raise ConfigError when the answer is no."""
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
    with message_on_interrupt("some of it may still exist; repeat the command to delete the rest"):
        delete(cluster, spec, objects)

    # Without the run, its file still says where the results are; its name alone does not.
    line = f"kubetune: {spec.name} was deleted"
    if kept and is_file(args.run_name):
        line += f"; copy its results with kubetune cp {shell_word(args.run_name)}"
    print(line)
    return OK
