"""`kubetune completion`: a script that teaches a shell the verbs and options, made by shtab from the parser itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from kubetune.errors import OK, EnvironmentFault

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")


def run(args: argparse.Namespace) -> int:
    """Print the script. Raise EnvironmentFault where shtab is missing or does not know the shell."""
    from kubetune.cli import make_parser
    from kubetune.cli.overview import VERBS

    try:
        import shtab
    except ModuleNotFoundError:
        raise EnvironmentFault("completion needs the `shtab` library: pip install shtab") from None
    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise EnvironmentFault(
            f"this version of shtab makes no script for {args.shell}: pip install -U shtab"
        )
    program = make_parser(*VERBS)
    for action in _actions_of(program):
        if action.type is Path or action.dest == "inputs":
            # shtab reads this attribute of an argument to know how its value is completed.
            completes = shtab.FILE
            if action.metavar == "RUN_DIR":
                completes = shtab.DIRECTORY
            vars(action)["complete"] = completes
    sys.stdout.write(shtab.complete(program, args.shell) + "\n")
    return OK


def _actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all arguments of a parser and of the parsers of its verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions_of(below)
