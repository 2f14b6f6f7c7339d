"""Common parts of the verbs about a run on a cluster: its name, questions to a person, marks of nodes."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.humanize import shell_word
from kubetune.cli.json_answers import print_json
from kubetune.cli.tables import print_table
from kubetune.errors import OK, ConfigError, EnvironmentFault, MissingExtra
from kubetune.library.connection import open_cluster

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster
    from kubetune.k8s.cluster.runs import Target
    from kubetune.k8s.manifests.spec import RunSpec

_COLOURS = (36, 33, 35, 32, 34, 31)


def add_run(
    parser: argparse.ArgumentParser, *, optional: bool = False, or_folder: bool = False
) -> None:
    """Add the run, by name or by its file, and the namespace it is in. `or_folder`: or by its run directory here."""
    known = (
        "name of a run, its file, or its run directory on this machine"
        if or_folder
        else "name of a run, or its file"
    )
    parser.add_argument("run_name", nargs="?" if optional else None, metavar="RUN", help=known)
    add_namespace(parser)


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """Add the namespace that a run, or what belongs to one, is in."""
    parser.add_argument(
        "-n",
        "--namespace",
        metavar="NAME",
        help="default: the run file's, else that of the kubeconfig",
    )


def is_file(run: str) -> bool:
    """The name of a run on a command line is its file."""
    return run.endswith((".yaml", ".yml")) or os.sep in run


def connect(args: argparse.Namespace) -> tuple[Cluster, str | None]:
    """The cluster, and the name of the run if one was given. Raises ConfigError, EnvironmentFault."""
    name, namespace = args.run_name, args.namespace
    if name is not None and is_file(name):
        from kubetune.config.load import load_config
        from kubetune.k8s.run_names import run_name

        if Path(name).is_dir():
            raise ConfigError(
                f"{name} is a folder of this machine; expected the name of a run on a cluster, or its run file. A run "
                f"here is seen by kubetune watch {shell_word(name)}, and stopped by kubetune stop {shell_word(name)}"
            )
        if not Path(name).exists():
            raise ConfigError(
                f"{name}: no run is there; expected the name of a run on a cluster, or its run file"
            )
        config = load_config(Path(name), environ={})
        name = run_name(config)
        namespace = namespace or (config.kubernetes.namespace if config.kubernetes else None)
    try:
        return open_cluster(namespace), name
    except MissingExtra as lack:
        if name is None or Path(args.run_name).exists():
            raise
        raise MissingExtra(f"{name}: no run is there in this folder; {lack}") from None


def find(args: argparse.Namespace) -> tuple[Cluster, RunSpec]:
    """The cluster and the run that the command line names. Raises ConfigError when there is no such run."""
    cluster, name = connect(args)
    assert name is not None
    from kubetune.k8s.cluster.runs import find_run

    return cluster, find_run(cluster, name)


def find_running(args: argparse.Namespace) -> tuple[Cluster, list[Target]]:
    """The cluster and the running pods of the run that the command line names. Raises ConfigError without any."""
    cluster, spec = find(args)
    from kubetune.k8s.cluster.runs import running

    targets = running(cluster, spec)
    if not targets:
        raise ConfigError(f"{spec.name}: no pod is running; see kubetune status {spec.typed}")
    return cluster, targets


def show(
    facts: Sequence[Any], head: Sequence[str], rows: Sequence[Sequence[object]], *, as_json: bool
) -> int:
    """Print what was found of a run, as a table of `rows` or the facts themselves as JSON; returns the exit code."""
    if as_json:
        print_json(facts)
    else:
        print_table(head, rows)
    return OK


def local_folder(spec: RunSpec) -> Path:
    """Folder of the logs and results of a run on this machine."""
    return Path("outputs") / spec.name


def asker(args: argparse.Namespace) -> Callable[[str], bool]:
    """A function that asks the person at the terminal; with --yes the answer is yes."""

    def ask(question: str) -> bool:
        if args.yes:
            return True
        if not sys.stdin.isatty():
            raise ConfigError(
                f"{question}? Nobody can be asked here; add --yes. Nothing was changed."
            )
        return input(f"{question}? [y/N] ").strip().lower() in ("y", "yes")

    return ask


@contextmanager
def told_on_interrupt(text: str) -> Iterator[None]:
    """Within, Ctrl-C says what becomes of what was waited for: it is done by the cluster and does not end with us."""
    try:
        yield
    except KeyboardInterrupt:
        after = "\n" if sys.stderr.isatty() else ""  # a terminal has just written ^C
        print(f"{after}kubetune: {text}", file=sys.stderr, flush=True)
        raise


def prefix(node: int, nodes: int, more: str = "") -> str:
    """Mark of the lines of one node, coloured on a terminal; empty for the only node."""
    if nodes == 1 and not more:
        return ""
    text = f"[node {node}{f' {more}' if more else ''}] "
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return f"\x1b[{_COLOURS[node % len(_COLOURS)]}m{text}\x1b[0m" if is_coloured else text


def kubectl() -> str:
    """Path of kubectl, which does what needs SPDY or a terminal. Raises EnvironmentFault where it is missing."""
    path = shutil.which("kubectl")
    if path is None:
        raise EnvironmentFault(
            "kubectl is not on the PATH; this needs it: https://kubernetes.io/docs/tasks/tools/"
        )
    return path
