"""The composition of rows: the share that is trained, tokens of images, and what a lower data.max_length would lose.

For the page about the data (reporting/data_page). Counts whole rows, before any is cut or left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.text.encode import Encoded

# Values of data.max_length that are compared, besides the one that is set.
LIMITS: Final = tuple(2**power for power in range(7, 18))

# Rows are counted by the share of their tokens that is trained in steps of so many per cent.
SHARE_STEP: Final = 5

_MOST_LIMITS: Final = 7


@dataclass
class Profile:
    """Counts over the rows of one split."""

    # Values of data.max_length, rising.
    limits: tuple[int, ...] = ()
    # None where no image can be.
    image_token: int | None = None
    labels: int = 0
    # Step of the trained share, `percent // SHARE_STEP` -> sequences.
    shares: Counter[int] = field(default_factory=Counter)
    # Limit -> labels after it.
    lost: Counter[int] = field(default_factory=Counter)
    # Tokens of a row's images -> rows with images.
    image_tokens: Counter[int] = field(default_factory=Counter)

    def add_row(self, row: Encoded) -> None:
        """Count one row."""
        # A limit holds for each sequence of a pair.
        for ids, trained in row.sequences:
            self._add_sequence(len(ids), trained)
        if row.images:
            self.image_tokens[row.ids.count(self.image_token)] += 1  # type: ignore[arg-type]

    def _add_sequence(self, length: int, trained: Sequence[bool]) -> None:
        # From the end to the beginning, so that each token is looked at once for all limits.
        # Example: 10 tokens, the last 4 trained, limits 6 and 8: 2 labels are lost at 8, 4 at 6.
        end = length
        labels = 0
        for limit in reversed(self.limits):
            if limit < end:
                labels += sum(trained[limit:end])
                self.lost[limit] += labels
                end = limit

        labels += sum(trained[:end])

        self.labels += labels
        if labels:
            percent = min(99, 100 * labels // length)  # 100 % belongs to the last step
            self.shares[percent // SHARE_STEP] += 1

    def add(self, other: Profile) -> None:
        """Count the rows of another profile too."""
        self.labels += other.labels
        self.shares.update(other.shares)
        self.lost.update(other.lost)
        self.image_tokens.update(other.image_tokens)

    def costs(self, lengths: Counter[int], chosen: int) -> list[JsonObject]:
        """Return what each limit worth showing loses: which share of the rows, of the tokens in them, of the labels.

        `lengths`: tokens of a row -> rows. `chosen`: the limit that is set, which is always shown.
        """
        rows = lengths.total()
        tokens = sum(length * count for length, count in lengths.items())
        costs = []
        for limit in self._limits_to_show(max(lengths, default=0), chosen):
            long_rows = 0
            long_tokens = 0
            for length, count in lengths.items():
                if length > limit:
                    long_rows += count
                    long_tokens += length * count
            costs.append(
                {
                    "limit": limit,
                    "rows": long_rows / max(1, rows),
                    "tokens": long_tokens / max(1, tokens),
                    "labels": self.lost[limit] / max(1, self.labels),
                    "is_chosen": limit == chosen,
                }
            )

        return costs

    def _limits_to_show(self, longest: int, chosen: int) -> list[int]:
        """Return the largest limits that cut a row, the smallest that cuts none, and the one that is set."""
        cutting = [limit for limit in self.limits if limit < longest]
        shown = {*cutting[-_MOST_LIMITS:], chosen}
        not_cutting = self.limits[len(cutting) :]
        if not_cutting:
            shown.add(not_cutting[0])
        return sorted(shown)

    def to_json(self, lengths: Counter[int], chosen: int) -> JsonObject:
        """Return the profile for the page."""
        from kubetune.data.length_bars import bars

        shares = []
        first = min(self.shares, default=0)
        last = max(self.shares, default=-1)
        for step in range(first, last + 1):
            percent = SHARE_STEP * step
            shares.append([percent, percent + SHARE_STEP, self.shares[step]])
        return {
            "costs": self.costs(lengths, chosen),
            "has_labels": self.labels > 0,
            "shares": shares,
            "image_tokens": bars(self.image_tokens.elements()),
        }
