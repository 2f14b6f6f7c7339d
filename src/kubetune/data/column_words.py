"""Columns in words: as a run file, the command line and a sentence name them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kubetune.base.humanize import shell_word


def in_yaml(columns: Mapping[str, str]) -> str:
    """Return columns as a run file has them: `columns: {input: context}`."""
    pairs = ", ".join(f"{key}: {_quoted(name)}" for key, name in columns.items())
    return f"columns: {{{pairs}}}"


def in_words(columns: Mapping[str, str]) -> str:
    """Return columns as the command line has them: `--columns input=context`."""
    pairs = " ".join(shell_word(f"{key}={name}") for key, name in columns.items())
    return f"--columns {pairs}"


def in_list(names: Sequence[str]) -> str:
    """Return names of columns in words: "`A`, `B` and `C`"."""
    *others, last = (f"`{name}`" for name in names)
    return f"{', '.join(others)} and {last}" if others else last


def lacking(column: str) -> str:
    """Return what is said of records without a column that `columns` names, and that they can do without."""
    return f"`{column}` is missing, and taken for empty"


def nowhere(absent: Mapping[str, int], records: int, path: str) -> str:
    """Return the error about a column that none of the records of a file has; empty if each is in some.

    `absent`: records that lack it, by column.
    """
    for column, number in absent.items():
        if number == records:
            return f"{path}: no record has a column {column!r}, which `columns` names"
    return ""


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z_][\w-]*", name, re.ASCII) else f'"{name}"'
