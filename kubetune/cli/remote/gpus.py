"""`kubetune gpus`: the GPUs of all pods of a run in one table."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from kubetune.cli.remote.run_on_cluster import add_run, find_running, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table. Raises ConfigError when no pod runs."""
    cluster, targets = find_running(args)
    from kubetune.k8s.cluster.gpus import query_gpus

    found = query_gpus(cluster, targets)
    rows: list[tuple[object, ...]] = []
    for node in found:
        for gpu in node.rows:
            memory = f"{gpu['memory_used_mib']}/{gpu['memory_total_mib']} MiB"
            heat, power = gpu["temperature_celsius"], gpu["power_watts"]
            load = f"{gpu['utilization_percent']}%"
            rows.append(
                (
                    node.node,
                    node.pod,
                    gpu["index"],
                    gpu["name"],
                    load,
                    memory,
                    f"{heat}°C",
                    f"{power} W",
                )
            )
        if node.problem:
            rows.append((node.node, node.pod, "", node.problem.splitlines()[0]))
    head = ("NODE", "POD", "GPU", "NAME", "LOAD", "MEMORY", "HEAT", "POWER")
    return show([asdict(node) for node in found], head, rows, as_json=args.json)
