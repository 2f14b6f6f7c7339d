"""Problems with the data, collected so that all of it is shown at once."""

from __future__ import annotations

import re
from bisect import insort
from dataclasses import dataclass, field
from typing import Final

from kubetune.base.humanize import counted, visible
from kubetune.errors import DataError

SHOWN: Final = 20


# Lines that are named of a problem that several records have, besides its first.
_MORE_LINES: Final = 3
# Problems are kept in so many different words; the rest are only counted.
_MOST_KINDS: Final = 1_000
# What differs where records have the same mistake: places (`messages[3]`), numbers, quoted texts of several words, lists
# or objects. A single word, such as a role, and the name of a key are what the mistake is about.
_OF_ONE_RECORD: Final = re.compile(
    r"(?<= is )[\[{].*?(?=; expected|$)"
    r'|"(?:[^"\\]|\\.)*\s(?:[^"\\]|\\.)*(?:"|…)'
    r"|(?<![\w`])-?\d[\d.,]*"
)


@dataclass
class _Kind:
    """A problem that one or more records of a file have, in the same words but for what each of them holds."""

    what: str  # in the words of its first record
    count: int = 0
    lines: list[int] = field(default_factory=list)  # the lowest ones, in ascending order

    def add(self, line: int, what: str) -> None:
        """Note the line of another record that has it."""
        if self.lines and line < self.lines[0]:
            self.what = what
        self.count += 1
        if line not in self.lines:
            insort(self.lines, line)
            del self.lines[_MORE_LINES + 1 :]

    def sentence(self, file: str) -> str:
        """Return the problem with its first line, and how many other records have it.

        gsm.csv:2: has the keys `a`; expected … The same in 299 more records: lines 3, 4, 5 …
        """
        text = f"{file}:{self.lines[0]}: {self.what}."
        others = self.count - 1
        if not others:
            return text
        text += f" The same in {counted(others, 'more record')}"
        if len(self.lines) > 1:
            numbers = ", ".join(f"{line:,}" for line in self.lines[1:])
            text += f": lines {numbers}" if others > 1 else f": line {numbers}"
        return f"{text} …" if others > _MORE_LINES else f"{text}."


class Problems:
    """Counts every problem and keeps those of the lowest lines, each as `file:line: what, what was expected`."""

    def __init__(self, keep: int | None = SHOWN) -> None:
        """Keep so many problems; None for all."""
        self.total = 0
        # Blank lines that were passed over, but for those at the ends of files.
        self.blank_lines = 0
        # What may be wrong, and is read as it is: `file:line: …`.
        self.doubts: list[str] = []
        self._keep = keep
        # (file, line, what is wrong), in ascending order.
        self._kept: list[tuple[str, int, str]] = []
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def add(self, where: str, what: str) -> None:
        """Note a problem of the record at `where` (`file:line`)."""
        self.total += 1
        file, _, line = where.rpartition(":")
        # Reading runs ahead of encoding, so problems come in no order.
        insort(self._kept, (file, int(line), what))
        words = _OF_ONE_RECORD.sub("", what)
        kind = self._kinds.get((file, words))
        if kind is None and len(self._kinds) < _MOST_KINDS:
            kind = self._kinds[file, words] = _Kind(what)
        if kind is not None:
            kind.add(int(line), what)
        if self._keep is not None:
            del self._kept[self._keep :]

    def part(self) -> Problems:
        """Return problems of one source: they are counted on their own, and noted here too."""
        return _Part(self)

    @property
    def first(self) -> list[str]:
        """Return the problems kept, in the order of their lines."""
        return [visible(f"{file}:{line}: {what}.", keep="") for file, line, what in self._kept]

    def sentences(self) -> list[str]:
        """Return the problems in the order of their first lines; a problem of several records occurs once."""
        kinds = sorted(self._kinds.items(), key=lambda item: (item[0][0], item[1].lines[0]))
        return [visible(kind.sentence(file), keep="") for (file, _), kind in kinds]

    def error(self) -> DataError:
        """Return the error that shows the problems and says that nothing was written."""
        sentences = self.sentences()
        if self.total == 1:
            return DataError(f"{sentences[0]} Nothing was written.")
        more = f", of which {SHOWN} are shown" if len(sentences) > SHOWN else ""
        return DataError(
            [*sentences[:SHOWN], f"{self.total:,} problems{more}. Nothing was written."]
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
