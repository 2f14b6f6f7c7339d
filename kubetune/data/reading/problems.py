"""Problems with the data, collected so that all of it is shown at once."""

from __future__ import annotations

from bisect import insort
from typing import Final

from kubetune.base.humanize import visible
from kubetune.errors import DataError

SHOWN: Final = 20


class Problems:
    """Counts every problem and keeps those of the lowest lines, each as `file:line: what, what was expected`."""

    def __init__(self, keep: int | None = SHOWN) -> None:
        """Keep so many problems; None for all."""
        self.total = 0
        # Blank lines that were passed over, but for those at the ends of files.
        self.blank_lines = 0
        self._keep = keep
        # (file, line, what is wrong), in ascending order.
        self._kept: list[tuple[str, int, str]] = []

    def add(self, where: str, what: str) -> None:
        """Note a problem of the record at `where` (`file:line`)."""
        self.total += 1
        file, _, line = where.rpartition(":")
        # Reading runs ahead of encoding, so problems come in no order.
        insort(self._kept, (file, int(line), what))
        if self._keep is not None:
            del self._kept[self._keep :]

    def part(self) -> Problems:
        """Return problems of one source: they are counted on their own, and noted here too."""
        return _Part(self)

    @property
    def first(self) -> list[str]:
        """Return the problems kept, in the order of their lines."""
        return [visible(f"{file}:{line}: {what}.", keep="") for file, line, what in self._kept]

    def error(self) -> DataError:
        """Return the error that shows the problems and says that nothing was written."""
        if self.total == 1:
            return DataError(f"{self.first[0]} Nothing was written.")
        more = f", of which {SHOWN} are shown" if self.total > SHOWN else ""
        return DataError(
            [*self.first[:SHOWN], f"{self.total:,} problems{more}. Nothing was written."]
        )

    def raise_if_any(self) -> None:
        """Raise DataError when there is a problem."""
        if self.total:
            raise self.error()


class _Part(Problems):
    """Counts problems and hands them on to those that it is a part of."""

    def __init__(self, whole: Problems) -> None:
        super().__init__(0)
        self._whole = whole

    def add(self, where: str, what: str) -> None:
        self.total += 1
        self._whole.add(where, what)
