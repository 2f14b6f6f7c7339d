"""The option `--json`: here it is added, and here the facts of a verb are printed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

from kubetune.base.logs import scrub
from kubetune.base.processes import output_on_stderr
from kubetune.errors import OK, KubetuneError


@dataclass(frozen=True)
class Answer:
    """What a verb has to say, once for programs and once for people."""

    # What `--json` prints.
    facts: Any
    # Print the same for people; called without `--json` only.
    show: Callable[[], None]
    exit_code: int = OK
    # Raised once everything is printed: what is wrong with the thing that the answer is about.
    error: KubetuneError | None = None
    # Spaces a level of the JSON; None prints it on one line.
    indent: int | None = 2


def add_json(parser: argparse.ArgumentParser | argparse._ArgumentGroup, prints: str) -> None:
    """Add `--json`. `prints` completes its help: "print …"."""
    parser.add_argument("--json", action="store_true", help=f"print {prints}")


def prints_json(
    work: Callable[[argparse.Namespace], Answer],
) -> Callable[[argparse.Namespace], int]:
    """Turn a function that returns an Answer into the `run` of a verb with `--json`.

    With `--json`, whatever the work prints goes to standard error, so that standard output is JSON alone.
    """

    @wraps(work)
    def run(args: argparse.Namespace) -> int:
        with output_on_stderr() if args.json else nullcontext():
            answer = work(args)
        if args.json:
            print_json(answer.facts, answer.indent)
        else:
            answer.show()
        if answer.error is not None:
            raise answer.error
        return answer.exit_code

    return run


def print_json(facts: Any, indent: int | None = 2) -> None:
    """Print facts as JSON in ASCII, without the secrets of the environment."""
    print(scrub(json.dumps(facts, indent=indent)))
