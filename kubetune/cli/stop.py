"""`kubetune stop`: have a run save a checkpoint and leave its nodes. `kubetune resume` lets it go on from there."""

from __future__ import annotations

import argparse

from kubetune.cli.run_on_cluster import add_run, find
from kubetune.errors import OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the pods have saved and gone")


def run(args: argparse.Namespace) -> int:
    """Stop, and say what each node said last. Raises ConfigError when the run is not running."""
    from kubetune.cluster.streams import Source, Streams
    from kubetune.launch.kubernetes import stop, wait_gone

    cluster, spec = find(args)
    last: dict[int, str] = {}

    def remember(source: Source, text: str) -> None:
        # The agent's own last line only repeats the exit code.
        if text.strip() and not text.startswith("kubetune: ended"):
            last[source.node] = text

    stop(cluster, spec)
    if args.no_wait:
        print(f"kubetune: {spec.name} was asked to save and stop")
        return OK
    Streams(cluster, spec, remember).follow()
    wait_gone(cluster, spec)
    for node, text in sorted(last.items()):
        print(f"node {node}: {text}")
    print(f"kubetune: {spec.name} is stopped and holds no node; go on: kubetune resume {spec.typed}")
    return OK
