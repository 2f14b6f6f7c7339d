"""Commands to paste that write another file from the records of one."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from kubetune.base.humanize import shell_word


class Command(NamedTuple):
    """A command, and the file that it writes."""

    words: str
    made: str


def each_record(path: str, pairs: str, word: str) -> Command:
    """Return what writes the records of a file of JSON lines with other columns.

    `pairs`: columns with their values in Python of a record r, as in an object. `word`: for the name of the new file.
    """
    code = f"import json, sys; [print(json.dumps({{**r, {pairs}}})) for r in map(json.loads, sys.stdin)]"
    return piped(code, path, f"{path.removesuffix('.jsonl')}-{word}.jsonl")


def piped(code: str, path: str, made: str) -> Command:
    """Return a program in Python that reads one file and writes another."""
    return Command(
        f"python3 -c {shlex.quote(code)} < {shell_word(path)} > {shell_word(made)}", made
    )
