"""`kubetune top`: CPU, memory, /dev/shm and free disk of all pods of a run. Needs no metrics server."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kubetune.cli.run_on_cluster import add_run, find, print_table, size
from kubetune.errors import OK, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table. Raises ConfigError when no pod runs."""
    from kubetune.cluster.runs import Target, ask, on_all, running

    cluster, spec = find(args)
    targets = running(cluster, spec)
    if not targets:
        raise ConfigError(f"{spec.name}: no pod is running; see kubetune status {spec.name}")

    def usage(target: Target) -> dict[str, Any]:
        (answer,) = ask(cluster, target, "usage")
        return {"node": target.node, "pod": target.pod, **answer}

    found = on_all(usage, targets)
    if args.json:
        print(json.dumps(found, indent=2))
        return OK
    print_table(
        ("NODE", "POD", "CPU", "MEMORY", "/DEV/SHM", "CACHE FREE", "OUTPUTS FREE"),
        [
            (
                use["node"],
                use["pod"],
                f"{use['cpu_cores']:.2f}",
                size(use["memory_bytes"]),
                f"{size(use['shm_used_bytes'])} of {size(use['shm_total_bytes'])}",
                size(use["cache_free_bytes"]),
                size(use["outputs_free_bytes"]),
            )
            for use in found
        ],
    )
    return OK
