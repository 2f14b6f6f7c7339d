"""Token counts of the first rows of training, from which those of all are estimated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """Tokens of the first rows of training, and what becomes of their records."""

    sampled: int  # records
    tokens_per_row: float  # of a row that is kept, on average
    overlong_share: float  # of the records
    limit: int  # most tokens of a sequence
    bad_share: float  # of the records
    kept_share: float  # rows that are kept, for each record
    longest: int  # tokens of the longest sequence
    saved_share: float = 0.0  # share of the tokens in beginnings that rows share, computed once
    rows_per_record: float = 1.0  # more than one where long texts are split
    bad: tuple[str, ...] = ()  # the first bad records: file, line, and what is wrong
    lost_share: float = 0.0  # of the records: no row is made of them
    refusal: str = ""  # what is wrong where not one row is left of them

    def rows(self, records: int | None) -> int | None:
        """Return how many rows so many records become, before any are left out; None if they are not known."""
        if records is None:
            return None
        return round(records * self.rows_per_record)

    def longest_of(self, rows: int | None) -> int:
        """Return the most tokens that a row of so many may have; a quarter more where not all were sampled."""
        if rows is not None and rows <= self.sampled:
            return self.longest
        # Rounded up; 5 / 4 of what the sample showed.
        return min(self.limit, -(-5 * self.longest // 4))

    def tokens(self, records: int | None) -> int | None:
        """Return the tokens of the rows that so many records become; rows that are not kept count as nothing."""
        if records is None:
            return None
        return round(records * self.kept_share * self.tokens_per_row)
