"""`kubetune gpus`: the GPUs of all pods of a run in one table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.remote.run_on_cluster import add_run, find_running
from kubetune.cli.tables import print_table

if TYPE_CHECKING:
    from kubetune.k8s.cluster.gpus import Gpus

HEAD = ("NODE", "POD", "GPU", "NAME", "LOAD", "MEMORY", "HEAT", "POWER")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser)
    add_json(parser, "as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Print the table. Raise ConfigError when no pod runs."""
    cluster, targets = find_running(args)
    from kubetune.k8s.cluster.gpus import query_gpus

    nodes = query_gpus(cluster, targets)

    def show() -> None:
        print_table(HEAD, list(_rows(nodes)))

    return Answer([asdict(node) for node in nodes], show)


def _rows(nodes: Sequence[Gpus]) -> Iterator[tuple[object, ...]]:
    """Yield a line for each GPU, and one for each node that did not answer."""
    for node in nodes:
        for gpu in node.rows:
            yield (
                node.node,
                node.pod,
                gpu["index"],
                gpu["name"],
                f"{gpu['utilization_percent']}%",
                f"{gpu['memory_used_mib']}/{gpu['memory_total_mib']} MiB",
                f"{gpu['temperature_celsius']}°C",
                f"{gpu['power_watts']} W",
            )
        # A row that is shorter than the head ends with a sentence.
        if node.problem:
            yield node.node, node.pod, "", node.problem.splitlines()[0]
