"""What a terminal shows beside plain lines: colours, a progress bar, lines that end at a space. Read `progress_bar` first.

Not for log lines (logs), nor for tables (cli/tables): a pipe has those too.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import Final, TextIO

# Names this start's wish to see every log line on the terminal (`kubetune train -v`), for the processes of a run.
VERBOSE: Final = "KUBETUNE_VERBOSE"

# Goes to the first column and removes what is on the line.
CLEAR: Final = "\r\x1b[2K"

# Codes of a terminal's colours.
BOLD = 1
DIM = 2
RED = 31
GREEN = 32
YELLOW = 33
BLUE = 34
PURPLE = 35


def coloured(text: str, colour: int) -> str:
    """Return a text in a colour of the terminal; as it is if standard output is none, or NO_COLOR is set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or not text.strip():
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def moves_cursor() -> bool:
    """True if standard output is a terminal that can move its cursor."""
    # rich's `is_terminal` is not used: with FORCE_COLOR, which notebooks set, it is true of a pipe, and every update of
    # a bar would be one more line there.
    if not sys.stdout.isatty():
        return False
    return os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def is_brief(level: str = "INFO") -> bool:
    """True if standard output gets what a person wants to see first, and the rest is in the log file alone.

    `level`: the setting `logging.level`. Who sets DEBUG wants every line.
    """
    return level != "DEBUG" and not os.environ.get(VERBOSE) and moves_cursor()


class _Wrapper(textwrap.TextWrapper):
    """Breaks lines at spaces, within paths after a slash, and within keys after a dot."""

    # textwrap's name of what divides a text where hyphens do not. It leaves out the empty parts.
    wordsep_simple_re = re.compile(r"(\s+)|(?<=/)(?=[^/\s])|(?<=[a-z]\.)(?=[a-z])")


def fold(text: str, width: int, *, breaks: bool = True) -> list[str]:
    """Return a text in lines, at least one. Without `breaks`, a word that is too long stays whole, to be copied."""
    if len(text) <= width:
        return [text]
    return _Wrapper(width, break_on_hyphens=False, break_long_words=breaks).wrap(text)


def folded(text: str, stream: TextIO) -> str:
    """Return a text as a terminal shows it without breaking a word; as it is if the stream is no terminal."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        lines += fold(line, width, breaks=False)
    return "\n".join(lines)
