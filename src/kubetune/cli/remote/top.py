"""`kubetune top`: CPU, memory, /dev/shm and free disk of all pods of a run. Needs no metrics server."""

from __future__ import annotations

import argparse
from typing import Any

from kubetune.base.humanize import size
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.remote.run_on_cluster import add_run, find_running
from kubetune.cli.tables import print_table
from kubetune.errors import EnvironmentFault

HEAD = ("NODE", "POD", "CPU", "MEMORY", "/DEV/SHM", "CACHE FREE", "OUTPUTS FREE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser)
    add_json(parser, "as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Print the table. Raise ConfigError when no pod runs."""
    cluster, targets = find_running(args)
    from kubetune.k8s.cluster.asking_pods import PodContainer, ask, on_all

    # If a pod does not answer, its line says why. The others are shown.
    def usage(target: PodContainer) -> dict[str, Any]:
        pod = {"node": target.node, "pod": target.pod}
        try:
            [answer] = ask(cluster, target, "usage")
        except EnvironmentFault as error:
            return pod | {"problem": str(error)}
        return {**pod, **answer}

    pods = on_all(usage, targets)

    def show() -> None:
        print_table(HEAD, [_row(pod) for pod in pods])

    return Answer(pods, show)


def _row(pod: dict[str, Any]) -> tuple[object, ...]:
    """Return the line of a pod: what it uses, or why it did not answer."""
    if "problem" in pod:
        return pod["node"], pod["pod"], pod["problem"].splitlines()[0]
    return (
        pod["node"],
        pod["pod"],
        f"{pod['cpu_cores']:.2f}",
        size(pod["memory_bytes"]),
        f"{size(pod['shm_used_bytes'])} of {size(pod['shm_total_bytes'])}",
        size(pod["cache_free_bytes"]),
        size(pod["outputs_free_bytes"]),
    )
