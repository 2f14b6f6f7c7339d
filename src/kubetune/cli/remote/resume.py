"""`kubetune resume`: let a stopped run go on from its newest checkpoint."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from kubetune.base.humanize import shell_word
from kubetune.cli.remote.run_on_cluster import add_run, find
from kubetune.errors import OK, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Resume. Raise ConfigError when the run is not stopped, and for one of this machine, which is trained on here."""
    # With a namespace, the name is that of a run on the cluster, even if a folder here has it too.
    if args.namespace is None and Path(args.run_name).is_dir():
        raise ConfigError(_why_not_here(Path(args.run_name)))
    cluster, spec = find(args)
    from kubetune.k8s.cluster.stopping import resume

    resume(cluster, spec)
    print(f"kubetune: {spec.name} goes on; see kubetune status {spec.typed}")
    return OK


def _why_not_here(run_dir: Path) -> str:
    """Return why `resume` does not continue a run of this machine, and what does.

    Raise ConfigError for a folder that is no run directory.
    """
    from kubetune.rundir.starts import train_again
    from kubetune.supervisor.place import holders

    # The command is made first: it raises for a folder that is no run directory.
    command = shlex.join(["kubetune", *train_again(run_dir)])
    if holders(run_dir):
        return f"{run_dir} is a run of this machine and is running; see kubetune watch {shell_word(run_dir)}"
    return (
        f"{run_dir} is a run of this machine, and `resume` is for those of a cluster (name it with -n NAMESPACE if a "
        f"folder here has the same name); this one goes on from its newest checkpoint by: {command}"
    )
