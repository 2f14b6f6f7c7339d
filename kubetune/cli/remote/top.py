"""`kubetune top`: CPU, memory, /dev/shm and free disk of all pods of a run. Needs no metrics server."""

from __future__ import annotations

import argparse
from typing import Any

from kubetune.base.humanize import size
from kubetune.cli.remote.run_on_cluster import add_run, find_running, show
from kubetune.errors import EnvironmentFault


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table. Raises ConfigError when no pod runs."""
    cluster, targets = find_running(args)
    from kubetune.k8s.cluster.runs import Target, ask, on_all

    def usage(target: Target) -> dict[str, Any]:
        asked = {"node": target.node, "pod": target.pod}
        try:
            (answer,) = ask(cluster, target, "usage")
        except EnvironmentFault as error:
            return {**asked, "problem": str(error)}
        return {**asked, **answer}

    found = on_all(usage, targets)
    rows = [
        (use["node"], use["pod"], use["problem"].splitlines()[0])
        if "problem" in use
        else (
            use["node"],
            use["pod"],
            f"{use['cpu_cores']:.2f}",
            size(use["memory_bytes"]),
            f"{size(use['shm_used_bytes'])} of {size(use['shm_total_bytes'])}",
            size(use["cache_free_bytes"]),
            size(use["outputs_free_bytes"]),
        )
        for use in found
    ]
    head = ("NODE", "POD", "CPU", "MEMORY", "/DEV/SHM", "CACHE FREE", "OUTPUTS FREE")
    return show(found, head, rows, as_json=args.json)
