"""`kubetune resume`: let a stopped run go on from its newest checkpoint."""

from __future__ import annotations

import argparse

from kubetune.cli.remote.run_on_cluster import add_run, find
from kubetune.errors import OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Resume. Raises ConfigError when the run is not stopped."""
    from kubetune.cluster.submit import resume

    cluster, spec = find(args)
    resume(cluster, spec)
    print(f"kubetune: {spec.name} goes on; see kubetune status {spec.typed}")
    return OK
