"""`kubetune exec`: a command in the pods of a run, or a shell in one of them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import TYPE_CHECKING, BinaryIO

from kubetune.cli.remote.run_on_cluster import add_run, find, kubectl, prefix
from kubetune.errors import OK, ConfigError

if TYPE_CHECKING:
    from kubetune.k8s.cluster.runs import Target

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
    parser.epilog = "After -- comes the command; left out on a terminal: a shell."


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code, the first that is not 0 of several. Raise ConfigError without a pod."""
    cluster, spec = find(args)
    from kubetune.k8s.api.api_errors import NoProgram
    from kubetune.k8s.api.client import say
    from kubetune.k8s.cluster.runs import on_all, running

    there = running(cluster, spec)
    chosen = there if args.all else [target for target in there if target.node == args.node]
    if not chosen:
        nodes = ", ".join(str(target.node) for target in there) or "none"
        raise ConfigError(
            f"{spec.name}: no pod of node {args.node} is running (running: {nodes}); "
            f"see kubetune status {spec.typed}"
        )
    if not args.command:
        if args.all or not sys.stdin.isatty():
            raise ConfigError(
                "command line: found no command; expected one after --, as in kubetune exec RUN -- ls"
            )
        return _shell(cluster.namespace, chosen[0])
    stdin = sys.stdin.buffer if args.stdin else None
    if not args.all:
        target = chosen[0]
        out, err = Prompt(sys.stdout.buffer), Prompt(sys.stderr.buffer)
        try:
            return cluster.exec(
                target.pod, target.container, args.command, stdin=stdin, stdout=out, stderr=err
            )
        except NoProgram as error:
            say(str(error))
            return error.exit_code

    def run_in(target: Target) -> int:
        out, err = (
            Marked(stream, prefix(target.node, spec.nodes))
            for stream in (sys.stdout.buffer, sys.stderr.buffer)
        )
        try:
            return cluster.exec(target.pod, target.container, args.command, stdout=out, stderr=err)
        except NoProgram as error:
            say(str(error))
            return error.exit_code
        finally:
            out.end()
            err.end()

    return next((code for code in on_all(run_in, chosen) if code != OK), OK)


def _shell(namespace: str, target: Target) -> int:
    """A shell on this terminal: raw mode and window sizes are kubectl's trade."""
    shell = "command -v bash > /dev/null && exec bash || exec sh"
    command = [
        kubectl(),
        "exec",
        "-it",
        "-n",
        namespace,
        target.pod,
        "-c",
        target.container,
        "--",
        "sh",
        "-c",
        shell,
    ]
    return subprocess.run(command, env=os.environ, check=False).returncode


class Prompt:
    """Writes everything at once: who looks on should not wait until a buffer is full."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        """Write at once what was not whole lines, such as a prompt."""
        self._stream.write(data)
        self._stream.flush()


class Marked:
    """Writes whole lines, each after a mark, so that the lines of several pods do not tear each other apart."""

    def __init__(self, stream: BinaryIO, mark: str) -> None:
        self._stream, self._mark, self._rest = stream, mark.encode(), b""

    def write(self, data: bytes) -> None:
        """Write the lines that are whole by now, each after the mark."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._stream.write(b"".join(self._mark + line + b"\n" for line in lines))
        self._stream.flush()

    def end(self) -> None:
        """Write a last line that had no end."""
        if self._rest:
            self.write(b"\n")
