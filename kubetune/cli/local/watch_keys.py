"""Keys that a reader of `kubetune watch` presses: scroll the log, choose a rank's, pause, leave."""

from __future__ import annotations

import os
import re
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

HELP: Final = "↑ ↓ PgUp PgDn scroll · ← → rank · p pause · q or Ctrl-C leaves; the run goes on"

PAUSED: Final = "paused: p goes on · ↑ ↓ PgUp PgDn scroll · q or Ctrl-C leaves; the run goes on"

_KEY: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_MEANINGS: Final = {
    **dict.fromkeys(("\x1b[A", "\x1bOA", "k"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB", "j"), "down"),
    **dict.fromkeys(("\x1b[C", "\x1bOC", "l"), "right"),
    **dict.fromkeys(("\x1b[D", "\x1bOD", "h"), "left"),
    **dict.fromkeys(("\x1b[5~", "b"), "page up"),
    **dict.fromkeys(("\x1b[6~", "f"), "page down"),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "g"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "G"), "end"),
    **dict.fromkeys(("p", " "), "pause"),
    "q": "leave",
}


@dataclass(frozen=True)
class View:
    """The view of a run: whose log, how many lines above its end, and whether the screen stands still."""

    rank: int = 0
    above_end: int = 0
    is_paused: bool = False
    is_left: bool = False

    def after(self, key: str, *, ranks: Sequence[int], lines: int, page: int) -> View:
        """The view when a key was pressed, with `lines` of log known of which a `page` is shown at a time."""
        top = max(0, lines - page)
        by = {
            "up": 1,
            "down": -1,
            "page up": page,
            "page down": -page,
            "home": top,
            "end": -top,
        }.get(key)
        if by is not None:
            return replace(self, above_end=min(top, max(0, self.above_end + by)))
        if key in ("left", "right") and ranks:
            at = ranks.index(self.rank) if self.rank in ranks else 0
            return View(ranks[(at + (1 if key == "right" else -1)) % len(ranks)])
        if key == "pause":
            return replace(self, is_paused=not self.is_paused)
        return replace(self, is_left=True) if key == "leave" else self

    def following(self, before: Sequence[str], now: Sequence[str]) -> View:
        """The view of the same lines when others have come after them; one at the end of the log stays there."""
        if not self.above_end or not before:
            return self
        newer = next((count for count, line in enumerate(reversed(now)) if line == before[-1]), 0)
        return replace(self, above_end=min(len(now), self.above_end + newer))


@contextmanager
def keys(pressed: Callable[[str], None]) -> Iterator[bool]:
    """Within, `pressed` is told each key of the terminal by its meaning; False where there is none to read from."""
    if not _is_ours():
        yield False
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    now = termios.tcgetattr(terminal)
    # Ctrl-Z would leave the reader's shell on our screen, and with our way of reading keys.
    now[6][termios.VSUSP] = os.fpathconf(terminal, "PC_VDISABLE").to_bytes()
    termios.tcsetattr(terminal, termios.TCSANOW, now)
    threading.Thread(target=_read, args=(terminal, pressed), daemon=True).start()
    try:
        yield True
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _is_ours() -> bool:
    """Standard input is a terminal, and this process may read from it: in the background it is the shell's."""
    if not sys.stdin or not sys.stdin.isatty():
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # a terminal that controls no processes
        return True


def _read(terminal: int, pressed: Callable[[str], None]) -> None:
    while True:
        try:
            text = os.read(terminal, 1024).decode(errors="replace")
        except OSError:  # it has been closed
            return
        if not text:
            return
        for key in _KEY.findall(text):
            if meaning := _MEANINGS.get(key):
                pressed(meaning)
