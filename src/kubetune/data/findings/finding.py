"""A finding about the data of a run: what it is, where, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from kubetune.base.humanize import visible
from kubetune.data.prepared.tally import MOST_PLACES

Severity = Literal["error", "warning", "note"]
OF_RUN: Final = "run"  # the id of what is about the run, not about its data
NOTHING_FOUND: Final = "nothing stands out in the data"


@dataclass(frozen=True)
class Finding:
    """Something about the data that a person should know.

    Example:

        Finding(
            id="repeats",
            severity="warning",
            split="train",
            sentence="3 of 20 rows of train repeat another",
            count=3,
            places=("data.jsonl records 5, 8, 9",),
        )
    """

    id: str
    severity: Severity  # an error keeps training from beginning
    split: str  # empty where it is about all of them
    sentence: str  # without a full stop
    count: int = 0
    places: tuple[str, ...] = ()  # the first ones
    advice: str = ""  # whole sentences

    @property
    def line(self) -> str:
        """Return all of it in one line, fit for a terminal."""
        text = self.sentence
        if self.places:
            more = " …" if self.count > MOST_PLACES else ""
            text += f" ({'; '.join(self.places)}{more})"
        if self.advice:
            text += f". {self.advice}"
        return visible(text.rstrip("."), keep="")

    def to_json(self) -> dict[str, Any]:
        """Return it as data, with its line."""
        return {**asdict(self), "line": self.line}
