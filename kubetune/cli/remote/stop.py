"""`kubetune stop`: have a run save a checkpoint and leave its nodes. `kubetune resume` lets it go on from there."""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import asdict, replace

from kubetune.cli.remote.run_on_cluster import add_run, find, told_on_interrupt
from kubetune.errors import OK

_LINES = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the pods have saved and gone")


def run(args: argparse.Namespace) -> int:
    """Stop, and say what each node said last. Raises ConfigError when the run is not running."""
    from kubetune.cluster.log_follow import Source, Streams
    from kubetune.cluster.runs import keep_words, read_progress, trainer_pods
    from kubetune.cluster.submit import stop, wait_gone
    from kubetune.cluster.termination import Words, read_words

    cluster, spec = find(args)
    last: dict[int, str] = {}
    lines: deque[str] = deque(maxlen=_LINES)

    def remember(source: Source, text: str) -> None:
        if source.node == 0:
            lines.append(text)
        # The agent's own last line only repeats the exit code.
        if text.strip() and not text.startswith("kubetune: ended"):
            last[source.node] = text

    known = read_progress(cluster, spec, trainer_pods(cluster, spec)) or {}
    words = Words("", *(known.get(name) for name in ("step", "steps", "loss", "tokens_per_second", "saved_step")))
    stop(cluster, spec)
    if words != Words():
        keep_words(cluster, spec, words)
    if args.no_wait:
        print(f"kubetune: {spec.name} was asked to save and stop")
        return OK
    with told_on_interrupt(f"{spec.name} saves and stops all the same; see kubetune status {spec.typed}"):
        Streams(cluster, spec, remember).follow()
        wait_gone(cluster, spec)
    if said := {name: value for name, value in asdict(read_words([*lines])).items() if value not in (None, "")}:
        keep_words(cluster, spec, replace(words, **said))
    for node, text in sorted(last.items()):
        print(f"node {node}: {text}")
    print(f"kubetune: {spec.name} is stopped and holds no node; go on: kubetune resume {spec.typed}")
    return OK
