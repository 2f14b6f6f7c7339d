"""A recipe: where a published data set is, and what becomes of one of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Skipped(ValueError):
    """A record that no row can be made of. `reason` is a word to count by."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Options:
    """What the user chose of what decides the rows."""

    style: str
    max_history_rounds: int  # attempts with their feedback that a state holds at most


@dataclass(slots=True)
class Converted:
    """What one record became."""

    # without `id` and `images`, which every recipe's rows get alike
    rows: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0
    notes: Counter[str] = field(default_factory=Counter)  # what was fixed or left out inside it
    # keys that hold something and are in no row: `split`, `conversations[].loss`
    unused_keys: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class DataRecipe:
    """One data set, and the function that makes rows of a record of it."""

    name: str  # on the command line
    hub: str  # id of the data set
    splits: tuple[str, ...]
    styles: tuple[str, ...]  # the first is the default
    # convert(record, has_image, options) raises Skipped
    convert: Callable[[Mapping[str, Any], bool, Options], Converted]

    def file_name(self, style: str, split: str) -> str:
        """Return the name of the file that the rows of a split go to."""
        if len(self.styles) == 1:
            return f"{self.name}_{split}.jsonl"
        return f"{self.name}_{style}_{split}.jsonl"
