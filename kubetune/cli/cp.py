"""`kubetune cp`: the results of a run on a cluster, on this machine: resumable, and verified byte for byte."""

from __future__ import annotations

import argparse
from pathlib import Path

from kubetune.cli.run_on_cluster import add_run, find, local_folder, size
from kubetune.errors import OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)
    parser.add_argument(
        "globs",
        nargs="*",
        metavar="GLOB",
        help="files or folders of the run directory, such as 'logs' or 'checkpoints/best/*'; left out: everything but "
        "the checkpoints that are neither best nor last",
    )
    parser.add_argument("-o", dest="to", type=Path, metavar="FOLDER", help="default outputs/RUN")


def run(args: argparse.Namespace) -> int:
    """Copy. Raises ConfigError when there is no such run, EnvironmentFault when something cannot be copied."""
    from kubetune.cluster.client import say
    from kubetune.cluster.copies import copy_home
    from kubetune.cluster.runs import reader

    cluster, spec = find(args)
    to = args.to or local_folder(spec)
    globs = [glob.rstrip("/") for glob in args.globs]
    with reader(cluster, spec) as target:
        copied = copy_home(cluster, target, spec.run_dir, to, globs, tell=say)
    there = f", {copied.unchanged} were there already" if copied.unchanged else ""
    print(f"kubetune: {copied.files} files ({size(copied.bytes)}) in {to}, all verified{there}")
    return OK
