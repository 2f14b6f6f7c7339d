"""What is wrong with the data, collected so that all of it is shown at once."""

from __future__ import annotations

from typing import Final

from kubetune.errors import DataError

SHOWN: Final = 20


class Problems:
    """Counts every problem and keeps the first few, each as `file:line: what, what was expected`."""

    def __init__(self) -> None:
        self.total = 0
        self._first: list[tuple[str, int, str]] = []

    def add(self, where: str, what: str) -> None:
        """Note a problem of the record at `where` (`file:line`)."""
        self.total += 1
        if len(self._first) < SHOWN:
            file, _, line = where.rpartition(":")
            self._first.append((file, int(line), what))

    @property
    def first(self) -> list[str]:
        """The problems kept, in the order of their lines: reading runs ahead of encoding, which finds others."""
        return [f"{file}:{line}: {what}." for file, line, what in sorted(self._first)]

    def error(self) -> DataError:
        """The error that shows the problems and says that nothing was written."""
        if self.total == 1:
            return DataError(f"{self.first[0]} Nothing was written.")
        more = f", of which {SHOWN} are shown" if self.total > SHOWN else ""
        return DataError([*self.first, f"{self.total:,} problems{more}. Nothing was written."])

    def raise_if_any(self) -> None:
        """Raise DataError when there is a problem."""
        if self.total:
            raise self.error()
