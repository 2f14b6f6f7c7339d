"""Fates of records: counted, with the reason of each that was skipped, and summed over processes and restarts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

MOST_ERRORS: Final = 100
"""So many skipped records are described, the first; all are counted."""

FILTERED: Final = "filtered_by_source"
"""The reason of records that the user did not ask for: counted, but no error."""


_COUNTERS: Final = ("skipped", "notes", "sets", "unused_keys")


class Skipped(ValueError):
    """A record that no row can be made of. `reason` is what it is counted by."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


@dataclass
class Tally:
    """Counts of one split. `notes` count what was mended or left out inside of records that were used, and
    `unused_keys` in how many of them a key says something that is in no row."""

    read: int = 0
    rows: int = 0
    rounds: int = 0
    images_saved: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    sets: Counter[str] = field(default_factory=Counter)
    unused_keys: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def skip(self, where: str, name: str, reason: str, message: str) -> None:
        """Count a record that was skipped; `where` is `file:line`, `name` its id."""
        self.skipped[reason] += 1
        if reason != FILTERED and len(self.errors) < MOST_ERRORS:
            self.errors.append(f"{where}: {name}: {reason}: {message}")

    def add(self, other: Tally) -> None:
        """Count the other's records too, which come after these."""
        self.read += other.read
        self.rows += other.rows
        self.rounds += other.rounds
        self.images_saved += other.images_saved
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        self.errors = [*self.errors, *other.errors][:MOST_ERRORS]

    def to_json(self) -> dict[str, Any]:
        """Form that the journal keeps, to be read by `from_json`."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Tally:
        """A tally of a journal."""
        counters = {name: Counter(value[name]) for name in _COUNTERS}
        return cls(**{**value, **counters})

    def summary(self) -> dict[str, Any]:
        """Content of stats.json for a split; the same for the same input and settings, so no times."""
        return {
            "samples_processed": self.read,
            "samples_used": self.read - self.skipped.total(),
            "skipped": self.skipped.total(),
            "no_image": self.skipped["no_image"],
            "no_conversations": self.skipped["no_conversations"],
            FILTERED: self.skipped[FILTERED],
            "total_rounds": self.rounds,
            "examples_generated": self.rows,
            "images_saved": self.images_saved,
            "skipped_by_reason": dict(sorted(self.skipped.items())),
            "notes": {note: number for note, number in sorted(self.notes.items()) if number},
            "keys_not_used": dict(sorted(self.unused_keys.items())),
            "samples_used_by_source": dict(sorted(self.sets.items())),
            "errors": self.errors,
        }
