"""Text that reward functions print, line by line into the log of the rank, without secrets."""

from __future__ import annotations

import os
from typing import Final

from kubetune.base import logs

_LOG: Final = logs.family_logger("REWARD")
_PIECE_BYTES: Final = 64 * 1024
# Limits of a group and of a line. A function that prints in a loop must not fill the disk.
_MOST_LINES: Final = 1000
_MOST_CHARACTERS: Final = 2000


class Printed:
    """The pipe that functions print to, read whenever the rank waits for them."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.is_open = True  # something may still come
        self._rest = b""  # of a line that has not ended
        self._lines = 0
        os.set_blocking(pipe, False)

    def read(self) -> bool:
        """Log what is there, a piece of it at a time. Return False if nothing is."""
        try:
            piece = os.read(self.pipe, _PIECE_BYTES)
        except BlockingIOError:
            return False
        if not piece:
            self.is_open = False
            return False
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._log(line)
        # A line without an end is not kept in memory either.
        if len(self._rest) > _PIECE_BYTES:
            self._log(self._rest)
            self._rest = b""
        return True

    def finish(self) -> None:
        """Log the rest of what was printed for a group, and start to count for the next group."""
        # As much as the pipe can hold: a process that continues to print is not waited for.
        for _ in range(16):
            if not self.read():
                break
        if self._rest:
            self._log(self._rest)
            self._rest = b""
        if self._lines > _MOST_LINES:
            _LOG.warning("… and %d more lines", self._lines - _MOST_LINES)
        self._lines = 0

    def close(self) -> None:
        """Log the rest, and close the pipe."""
        self.finish()
        os.close(self.pipe)

    def _log(self, line: bytes) -> None:
        self._lines += 1
        if self._lines > _MOST_LINES:
            return
        text = line.decode("utf-8", "replace").rstrip("\r")
        if len(text) > _MOST_CHARACTERS:
            # Cut after secrets are taken out, since a half of one has no known form.
            text = logs.scrub(text)
            text = f"{text[:_MOST_CHARACTERS]}… ({len(text) - _MOST_CHARACTERS:,} more characters)"
        _LOG.info("%s", text)
