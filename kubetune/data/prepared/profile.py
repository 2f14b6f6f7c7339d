"""Make-up of rows, counted as they go by: shares that are trained, tokens of images, what shorter rows would lose.

For the data's page (reporting/data_page). Counts whole rows, before any is cut or left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kubetune.data.text.encode import Encoded

LIMITS: Final = tuple(2**power for power in range(7, 18))
"""Values of data.max_length that are compared, besides the one that is set."""

SHARE_STEP: Final = 5
"""Rows are counted by the share of their tokens that is trained in steps of so many per cent."""

_MOST_LIMITS: Final = 7


@dataclass
class Profile:
    """Counts over the rows of one split. `limits` are in ascending order; `image_token` is None where none is seen.

    `shares`: rows by the step that their share falls into; `lost`: labels behind each limit; `image_tokens`: rows with
    images by the tokens of these.
    """

    limits: tuple[int, ...] = ()
    image_token: int | None = None
    labels: int = 0
    shares: Counter[int] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    image_tokens: Counter[int] = field(default_factory=Counter)

    def add_row(self, row: Encoded) -> None:
        """Count one row."""
        for ids, trained in row.sequences:
            self._add_sequence(len(ids), trained)
        if row.images:
            self.image_tokens[row.ids.count(self.image_token)] += 1  # type: ignore[arg-type]

    def _add_sequence(self, length: int, trained: Sequence[bool]) -> None:
        end, labels = length, 0
        for limit in reversed(self.limits):
            if limit < end:
                labels += sum(trained[limit:end])
                self.lost[limit] += labels
                end = limit
        labels += sum(trained[:end])
        self.labels += labels
        if labels:
            self.shares[min(99, 100 * labels // length) // SHARE_STEP] += 1

    def add(self, other: Profile) -> None:
        """Count the rows of another too."""
        self.labels += other.labels
        for mine, theirs in ((self.shares, other.shares), (self.lost, other.lost)):
            mine.update(theirs)
        self.image_tokens.update(other.image_tokens)

    def costs(self, lengths: Counter[int], chosen: int) -> list[dict[str, Any]]:
        """For each limit worth a look, the shares that are lost by it: of rows, of tokens in these, of labels.

        `lengths`: rows by their tokens; `chosen`: the limit that is set, which is always among them.
        """
        rows, tokens = lengths.total(), sum(length * count for length, count in lengths.items())
        longest = max(lengths, default=0)
        cutting = [limit for limit in self.limits if limit < longest]
        enough = next((limit for limit in self.limits if limit >= longest), chosen)
        shown: Sequence[int] = sorted({*cutting[-_MOST_LIMITS:], enough, chosen})
        found = []
        for limit in shown:
            long = {length: count for length, count in lengths.items() if length > limit}
            found.append(
                {
                    "limit": limit,
                    "rows": sum(long.values()) / max(1, rows),
                    "tokens": sum(length * count for length, count in long.items())
                    / max(1, tokens),
                    "labels": self.lost[limit] / max(1, self.labels),
                    "is_chosen": limit == chosen,
                }
            )
        return found

    def to_json(self, lengths: Counter[int], chosen: int) -> dict[str, Any]:
        """For the page."""
        from kubetune.data.prepared.histogram import bars

        steps = range(min(self.shares, default=0), max(self.shares, default=-1) + 1)
        return {
            "costs": self.costs(lengths, chosen),
            "has_labels": self.labels > 0,
            "shares": [[SHARE_STEP * n, SHARE_STEP * (n + 1), self.shares[n]] for n in steps],
            "image_tokens": bars(self.image_tokens.elements()),
        }
