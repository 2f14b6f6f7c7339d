"""Common parts of the verbs about a run on a cluster: its name, questions to a person, marks of nodes."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base.humanize import shell_word
from kubetune.errors import ConfigError, EnvironmentFault, MissingExtra
from kubetune.library.cluster_connection import open_cluster

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster
    from kubetune.k8s.cluster.asking_pods import PodContainer
    from kubetune.k8s.manifests.run_spec import RunSpec

_COLOURS = (36, 33, 35, 32, 34, 31)


def add_run(
    parser: argparse.ArgumentParser, *, optional: bool = False, or_folder: bool = False
) -> None:
    """Add the run, by name or by its file, and the namespace it is in. `or_folder`: or by its run directory here."""
    accepted = "name of a run, or its file"
    if or_folder:
        accepted = "name of a run, its file, or its run directory on this machine"
    count = None
    if optional:
        count = "?"
    parser.add_argument("run_name", nargs=count, metavar="RUN", help=accepted)
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
    """True if the command line names a run by its run file, not by the name it has in the cluster."""
    return run.endswith((".yaml", ".yml")) or os.sep in run


def connect(args: argparse.Namespace) -> tuple[Cluster, str | None]:
    """Return the cluster, and the name of the run if one was named. Raise ConfigError, EnvironmentFault."""
    name = args.run_name
    namespace = args.namespace
    if name is not None and is_file(name):
        from kubetune.config.load import load_config
        from kubetune.k8s.run_names import run_name

        # A folder is a run directory of this machine, which people often mean.
        if Path(name).is_dir():
            word = shell_word(name)
            raise ConfigError(
                f"{name} is a folder of this machine; expected the name of a run on a cluster, or its run file. For a "
                f"run of this machine there are kubetune watch {word}, kubetune stop {word} and kubetune delete {word}"
            )
        if not Path(name).exists():
            raise ConfigError(
                f"{name}: there is no such run; expected the name of a run on a cluster, or its run file"
            )

        # The file names the run and, unless the command line does, its namespace.
        config = load_config(Path(name), environ={})
        name = run_name(config.name, config.model.path)
        if namespace is None and config.kubernetes:
            namespace = config.kubernetes.namespace

    try:
        return open_cluster(namespace), name
    except MissingExtra as error:
        if name is None or Path(args.run_name).exists():
            raise
        # Without the extra for clusters, the name may be a mistake for a run of this machine.
        raise MissingExtra(f"{name}: there is no such run in this folder; {error}") from None


def find(args: argparse.Namespace) -> tuple[Cluster, RunSpec]:
    """Return the cluster and the run that the command line names. Raise ConfigError when there is no such run."""
    cluster, name = connect(args)
    assert name is not None
    from kubetune.k8s.cluster.run_lookup import find_run

    return cluster, find_run(cluster, name)


def find_running(args: argparse.Namespace) -> tuple[Cluster, list[PodContainer]]:
    """Return the cluster and the running pods of the run that the command line names. Raise ConfigError without any."""
    cluster, spec = find(args)
    from kubetune.k8s.cluster.cluster_runs import running

    targets = running(cluster, spec)
    if not targets:
        raise ConfigError(f"{spec.name}: no pod is running; see kubetune status {spec.typed}")
    return cluster, targets


def local_folder(spec: RunSpec) -> Path:
    """Return the folder for the logs and results of a run on this machine."""
    return Path("outputs") / spec.name


def asker(args: argparse.Namespace) -> Callable[[str], bool]:
    """Return a function that asks the person at the terminal; with --yes the answer is yes."""

    def ask(question: str) -> bool:
        if args.yes:
            return True
        # A script that waits for an answer would hang.
        if not sys.stdin.isatty():
            raise ConfigError(
                f"{question}? There is no terminal to ask on; add --yes. Nothing was changed."
            )
        answer = input(f"{question}? [y/N] ")
        return answer.strip().lower() in ("y", "yes")

    return ask


@contextmanager
def message_on_leaving(text: str) -> Iterator[None]:
    """Print `text` on Ctrl-C, or when the API server stays away.

    It says what becomes of the work of the cluster, which continues without this command.
    """
    try:
        yield
    except KeyboardInterrupt:
        # A terminal has just written ^C.
        line_end = ""
        if sys.stderr.isatty():
            line_end = "\n"
        print(f"{line_end}kubetune: {text}", file=sys.stderr, flush=True)
        raise
    except EnvironmentFault as error:
        if _is_away(error):
            print(f"kubetune: {text}", file=sys.stderr, flush=True)
        raise


def _is_away(error: EnvironmentFault) -> bool:
    """True if an error says that nobody answers, or that who answers cannot do so now."""
    from kubetune.k8s.api.api_errors import may_pass

    return may_pass(error)


def prefix(node: int, nodes: int, more: str = "", *, group: str = "node") -> str:
    """Return the mark of the lines of one node, coloured on a terminal; empty for the only node."""
    if nodes == 1 and not more:
        return ""
    name = f"{group} {node}"
    if more:
        name += f" {more}"
    mark = f"[{name}] "
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return mark

    # Neighbours differ; in larger runs colours come again.
    colour = _COLOURS[node % len(_COLOURS)]
    return f"\x1b[{colour}m{mark}\x1b[0m"


def kubectl() -> str:
    """Return the path of kubectl, which runs what needs SPDY or a terminal.

    Raise EnvironmentFault where it is not installed.
    """
    path = shutil.which("kubectl")
    if path is None:
        raise EnvironmentFault(
            "kubectl is not on the PATH; this needs it: https://kubernetes.io/docs/tasks/tools/"
        )
    return path
