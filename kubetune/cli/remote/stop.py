"""`kubetune stop`: have a run save a checkpoint and leave its nodes. `kubetune resume` lets it go on from there."""

from __future__ import annotations

import argparse

from kubetune.cli.remote.run_on_cluster import add_run, find, told_on_interrupt
from kubetune.errors import OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the pods have saved and gone")


def run(args: argparse.Namespace) -> int:
    """Stop, and say what each node said last. Raises ConfigError when the run is not running."""
    from kubetune.cluster.log_follow import LogFollower, Source
    from kubetune.cluster.runs import read_progress, trainer_pods
    from kubetune.cluster.submit import stop, wait_gone
    from kubetune.cluster.termination import left_progress, note_progress

    cluster, spec = find(args)
    last: dict[int, str] = {}

    def remember(source: Source, text: str) -> None:
        # The agent's own last line only repeats the exit code.
        if text.strip() and not text.startswith("kubetune: ended"):
            last[source.node] = text

    progress = read_progress(cluster, spec, trainer_pods(cluster, spec))
    stop(cluster, spec)
    if progress:
        note_progress(cluster, spec, progress)
    if args.no_wait:
        print(f"kubetune: {spec.name} was asked to save and stop")
        return OK
    with told_on_interrupt(f"{spec.name} saves and stops all the same; see kubetune status {spec.typed}"):
        follower = LogFollower(cluster, spec, remember)
        follower.follow()
        wait_gone(cluster, spec)
    if left := left_progress(follower.pods_seen()):
        note_progress(cluster, spec, left)
    for node, text in sorted(last.items()):
        print(f"node {node}: {text}")
    print(f"kubetune: {spec.name} is stopped and holds no node; go on: kubetune resume {spec.typed}")
    return OK
