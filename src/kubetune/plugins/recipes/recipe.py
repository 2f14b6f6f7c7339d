"""A recipe: where a published data set is, and what becomes of one of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kubetune.data.reading.fields import NOTHING


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
    notes: Counter[str] = field(default_factory=Counter)  # what was mended or left out inside it


@dataclass(frozen=True, slots=True)
class Recipe:
    """One data set, and the function that makes rows of a record of it."""

    name: str  # on the command line
    hub: str  # id of the data set
    splits: tuple[str, ...]
    styles: tuple[str, ...]  # the first is the default
    has_history: bool  # `max_history_rounds` means something
    # Keys that rows are made of, each with the keys of the objects in it.
    keys: Mapping[str, tuple[str, ...]]
    # convert(record, has_image, options) raises Skipped
    convert: Callable[[Mapping[str, Any], bool, Options], Converted]

    def file_name(self, style: str, split: str) -> str:
        """Return the name of the file that the rows of a split go to."""
        if len(self.styles) == 1:
            return f"{self.name}_{split}.jsonl"
        return f"{self.name}_{style}_{split}.jsonl"

    def unused_keys(self, record: Mapping[str, Any]) -> set[str]:
        """Return the keys that hold something and are in no row: `split`, `conversations[].loss`."""
        unused = set()
        for key, value in record.items():
            if value in NOTHING:
                continue
            if key not in self.keys:
                unused.add(key)
                continue
            place = key
            parts = [value]
            if isinstance(value, list):
                place = f"{key}[]"
                parts = value
            for part in parts:
                if isinstance(part, dict):
                    for name in part.keys() - set(self.keys[key]):
                        if part[name] not in NOTHING:
                            unused.add(f"{place}.{name}")
        return unused
