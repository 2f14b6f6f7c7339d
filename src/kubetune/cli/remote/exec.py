"""`kubetune exec`: a command in the pods of a run, or a shell in one of them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

from kubetune.cli.remote.run_on_cluster import add_run, find, kubectl, prefix
from kubetune.errors import OK, ConfigError

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster
    from kubetune.k8s.cluster.asking_pods import PodContainer

# Separator between our arguments and the command, which becomes `args.command`.
COMMAND = "--"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--node", type=int, default=0, metavar="N", help="pod of this node (default 0)"
    )
    chosen.add_argument("--all", action="store_true", help="in the pods of all nodes at once")
    parser.add_argument("--stdin", action="store_true", help="pass standard input on")
    parser.epilog = "The command comes after --. Without one, on a terminal, this opens a shell."


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code, of several the first that is not 0. Raise ConfigError without a pod."""
    cluster, spec = find(args)
    from kubetune.k8s.cluster.asking_pods import on_all
    from kubetune.k8s.cluster.cluster_runs import running

    # All running pods, or the one of a node.
    targets = running(cluster, spec)
    chosen = targets
    if not args.all:
        chosen = [target for target in targets if target.node == args.node]
    if not chosen:
        nodes = ", ".join(str(target.node) for target in targets) or "none"
        raise ConfigError(
            f"{spec.name}: no pod of node {args.node} is running (running: {nodes}); "
            f"see kubetune status {spec.typed}"
        )

    # Without a command: a shell, which needs a terminal and one pod.
    if not args.command:
        if args.all or not sys.stdin.isatty():
            raise ConfigError(
                "command line: found no command; expected one after --, as in kubetune exec RUN -- ls"
            )
        return _shell(cluster.namespace, chosen[0])

    if not args.all:
        stdin = None
        if args.stdin:
            stdin = sys.stdin.buffer
        out = Prompt(sys.stdout.buffer)
        err = Prompt(sys.stderr.buffer)
        return _run_in(cluster, chosen[0], args.command, out, err, stdin)

    # In several pods at once, each line is marked with its node.
    def run_marked(target: PodContainer) -> int:
        mark = prefix(target.node, spec.nodes)
        out = Marked(sys.stdout.buffer, mark)
        err = Marked(sys.stderr.buffer, mark)
        try:
            return _run_in(cluster, target, args.command, out, err)
        finally:
            out.end()
            err.end()

    for code in on_all(run_marked, chosen):
        if code != OK:
            return code
    return OK


def _run_in(
    cluster: Cluster,
    target: PodContainer,
    command: Sequence[str],
    out: Prompt | Marked,
    err: Prompt | Marked,
    stdin: BinaryIO | None = None,
) -> int:
    """Run a command in a pod; return its exit code, also where the pod has no such program."""
    from kubetune.k8s.api.api_errors import NoProgram
    from kubetune.k8s.api.client import say

    try:
        return cluster.exec(
            target.pod,
            target.container,
            command,
            stdin=stdin,
            stdout=out,
            stderr=err,
            waits_for_node=True,
        )
    except NoProgram as error:
        say(str(error))
        return error.exit_code


def _shell(namespace: str, target: PodContainer) -> int:
    """Open a shell on this terminal, by kubectl, which handles raw mode and the size of the window."""
    shell = "command -v bash > /dev/null && exec bash || exec sh"
    command = [kubectl(), "exec", "-it", "-n", namespace, target.pod, "-c", target.container]
    command += ["--", "sh", "-c", shell]
    return subprocess.run(command, env=os.environ, check=False).returncode


class Prompt:
    """A stream without a buffer, so that a prompt without a line end is seen."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        """Write the data at once."""
        self._stream.write(data)
        self._stream.flush()


class Marked:
    """A stream that writes whole lines, each after a mark, so that those of several pods do not mix."""

    def __init__(self, stream: BinaryIO, mark: str) -> None:
        self._stream = stream
        self._mark = mark.encode()
        # The begin of a line whose end has not come yet.
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Write the lines that are complete now, each after the mark."""
        # "ab" is kept, and "c\nd" then completes the line "abc" and keeps "d".
        *lines, self._rest = (self._rest + data).split(b"\n")
        marked = [self._mark + line + b"\n" for line in lines]
        self._stream.write(b"".join(marked))
        self._stream.flush()

    def end(self) -> None:
        """Write a last line that has no line end."""
        if self._rest:
            self.write(b"\n")
