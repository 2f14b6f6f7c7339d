"""State of a conversion: a file that is only ever whole, so that a killed conversion goes on from there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from kubetune.base import fault_injection
from kubetune.base.files import explained_writes, write_atomic
from kubetune.plugins.recipes.tally import Tally

SAVE_RECORDS: Final = 4096
SAVE_SECONDS: Final = 10.0
"""After so many records, or so long, a journal is saved: what a kill costs at most."""


@dataclass
class Journal:
    """One split on its way: `read` records have become the first `written` bytes of the file."""

    path: Path
    read: int = 0
    written: int = 0
    done: bool = False
    tally: Tally = field(default_factory=Tally)
    _saved: int = 0
    _saved_at: float = field(default_factory=time.monotonic)

    @classmethod
    def open(cls, path: Path) -> Journal:
        """The journal of a conversion that was stopped, or a new one."""
        if not path.exists():
            return cls(path)
        kept = json.loads(path.read_text())
        read = kept["read"]
        return cls(path, read, kept["written"], kept["done"], Tally.from_json(kept["tally"]), read)

    @contextmanager
    def appending(self, file: Path) -> Iterator[IO[bytes]]:
        """The file of rows, with what came after the last save cut off."""
        with explained_writes(file), open(file, "r+b" if file.exists() else "x+b") as stream:
            stream.truncate(self.written)
            stream.seek(self.written)
            yield stream

    def save_sometimes(self, stream: IO[bytes]) -> None:
        """Save when enough has been done since the last time."""
        if (
            self.read - self._saved >= SAVE_RECORDS
            or time.monotonic() - self._saved_at >= SAVE_SECONDS
        ):
            self.save(stream)

    def save(self, stream: IO[bytes]) -> None:
        """Put on disk what was written, and then that it was."""
        stream.flush()
        os.fsync(stream.fileno())
        fault_injection.reach("convert.written")
        facts = {
            "read": self.read,
            "written": self.written,
            "done": self.done,
            "tally": self.tally.to_json(),
        }
        write_atomic(self.path, json.dumps(facts))
        fault_injection.reach("convert.saved")
        self._saved, self._saved_at = self.read, time.monotonic()
