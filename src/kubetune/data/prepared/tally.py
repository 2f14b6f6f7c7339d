"""Count what becomes of the records of a source, and check that enough of them are left to begin a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from kubetune.base.humanize import counted
from kubetune.config.schema import DataConfig, SourceConfig
from kubetune.data.column_facts import Columns
from kubetune.data.column_words import nowhere
from kubetune.data.reading.sources import no_records
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.spec import Split
from kubetune.data.text.row_notes import RowNote
from kubetune.errors import DataError

# Records that are named, of those that something is reported about.
MOST_PLACES: Final = 3

# Where the run file names the data of each split.
_KEYS: Final[dict[Split, str]] = {
    "train": "data.train",
    "eval": "data.eval",
    "forget": "evaluation.forget.data",
}


class Places(dict[str, list[int]]):
    """The first records of a source that something is reported about: kind of report -> indices of records."""

    def note(self, what: str, record: int) -> None:
        """Keep a record, unless enough are kept."""
        kept = self.setdefault(what, [])
        if len(kept) < MOST_PLACES:
            kept.append(record)

    def __add__(self, other: Places) -> Places:
        """Return the first records of both, these before the other's."""
        merged = Places()
        for places in (self, other):
            for what, records in places.items():
                for record in records:
                    merged.note(what, record)
        return merged


@dataclass
class Tally:
    """Records of a source counted by what became of them.

    Each record makes rows, or is left out, or is bad, so that

        records = rows - pieces + split + overlong (if dropped) + no_label + unusable + refused + unreadable
    """

    records: int = 0
    rows: int = 0

    # Longer than data.max_length: left out (overlong), cut (truncated), or split into pieces, each of which is a row.
    overlong: int = 0
    truncated: int = 0
    split: int = 0
    pieces: int = 0

    # Left out because they teach nothing: no token is trained, or the answers of a pair do not differ.
    no_label: int = 0
    unusable: int = 0

    # Bad: read, but not what a record has to be (refused), or no record at all (unreadable).
    refused: int = 0
    unreadable: int = 0
    blank_lines: int = 0

    # Rows in which the chat template …
    # … leaves out reasoning that the record holds
    reasoning_dropped: int = 0
    # … puts a trained answer elsewhere than at the end of the generation prompt
    unlike_prompt: int = 0
    # … writes a text before a call after the call's result
    text_moved: int = 0
    # … writes a trained answer differently from the record
    rewrites_answer: int = 0
    # A token lies across the border between a prompt and its answer.
    begins_inside_token: int = 0
    # The prompt is empty and no BOS is written, so that nothing predicts the first token of the answer.
    first_not_trained: int = 0
    # The template writes no end of a turn after an answer, and no token that ends one.
    open_answers: int = 0
    # Two messages of the assistant follow each other.
    answers_in_a_row: int = 0
    # A message has thoughts in a field, and others at the beginning of its content.
    thoughts_twice: int = 0
    # A tool's result begins with a tag that the template writes around results.
    results_wrapped: int = 0
    # An answer calls a function that is not among the tools of its conversation.
    calls_not_offered: int = 0
    # What is learned is `nan`, `NULL` or another word for nothing.
    answers_missing: int = 0
    # Numbers of a pair say that its rejected answer is the better one.
    scored_otherwise: int = 0
    # Some text holds what the tokenizer reads as a special token.
    special_texts: int = 0
    # The text begins with the token (BOS) that the tokenizer writes before each text too.
    bos_twice: int = 0
    # The prompt is a plain text, although the model has a chat template.
    plain_prompts: int = 0

    # Images, and those with more tokens than vision.image_max_tokens, with frames beyond the first, which are lost,
    # and with more grey levels than 8 bits can hold.
    images: int = 0
    images_above_budget: int = 0
    images_animated: int = 0
    images_deep: int = 0

    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0

    # Keys that decide nothing -> records in which they hold something.
    unused_keys: Counter[str] = field(default_factory=Counter)
    # First lines of tables that may be records (`file:1: …`) -> 1.
    doubtful_headers: Counter[str] = field(default_factory=Counter)
    # Records without a column that the config names, and that they can do without.
    absent: Counter[str] = field(default_factory=Counter)
    # What is in those of them that are columns of the record.
    unused_columns: Columns = field(default_factory=Columns)
    # Counts of answers that are compared or judged, and of their labels (remarks.answers_of).
    answers: Counter[str] = field(default_factory=Counter)
    # How a record with several readings was read -> records.
    taken: Counter[str] = field(default_factory=Counter)
    places: Places = field(default_factory=Places)

    def count(self, what: RowNote, record: int, number: int = 1) -> None:
        """Count `number` more of a kind, and keep the record as one of the kind's places."""
        if number:
            setattr(self, what, getattr(self, what) + number)
            self.places.note(what, record)

    @property
    def lost_share(self) -> float:
        """Share of the records that no row was made of."""
        if not self.records:
            return 0.0
        return (self.overlong + self.no_label + self.unusable) / self.records

    def add(self, other: Tally) -> None:
        """Count the other's records too."""
        longest = max(self.longest, other.longest)
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        self.longest = longest


def summarise(sources: Sequence[SourceConfig], tallies: Sequence[Tally]) -> JsonObject:
    """Return the contents of stats.json: what became of the records, in all and by source."""
    total = Tally()
    by_source = []
    for source, tally in zip(sources, tallies, strict=True):
        total.add(tally)
        columns = tally.unused_columns.to_json(_number_read(vars(tally)))
        by_source.append({"path": source.path, **vars(tally), "unused_columns": columns})

    stats = dict(vars(total))
    # Each source has columns of its own.
    del stats["unused_columns"]
    stats["lost_share"] = total.lost_share
    stats["sources"] = by_source
    return stats


def _number_read(counts: JsonObject) -> int:
    """Return how many records could be read: columns are looked at in these."""
    number: int = counts["records"] - counts["refused"] - counts["unreadable"]
    return number


def require_rows(
    data: DataConfig,
    split: Split,
    stats: JsonObject,
    *,
    are_first: bool = False,
) -> None:
    """Raise DataError when a split has no rows, or more of its records are left out than the config allows.

    `are_first`: the counts are of the first records only.
    """
    if not stats["records"]:
        raise no_records(_KEYS[split], _sources_of(data, split))
    # A share held out may hold no record that has it.
    if split == "train" or not isinstance(data.eval, float):
        for source in stats.get("sources", ()):
            problem = nowhere(source.get("absent", {}), _number_read(source), source["path"])
            if problem:
                raise DataError(f"{problem}. Nothing was written.")
    if stats["rows"] and stats["lost_share"] <= data.max_lost_share:
        return

    # The message names each cause, and only the remedies that help with it.
    lost = stats["overlong"] + stats["no_label"] + stats.get("unusable", 0)
    records = counted(stats["records"], "record")
    if are_first:
        records = f"the first {records}"
    causes, remedies = _causes(data.max_length, stats)
    advice = remedies[-1]
    if len(remedies) > 1:
        advice = f"{', '.join(remedies[:-1])}, or {advice}"
    raise DataError(
        f"{_KEYS[split]}: {lost:,} of {records} ({stats['lost_share']:.1%}) would be left out: {', '.join(causes)}. "
        f"data.max_lost_share allows {data.max_lost_share:.0%}. {advice[0].upper()}{advice[1:]}. Nothing was written."
    )


def require_all_rows(data: DataConfig, stats: Mapping[Split, JsonObject]) -> None:
    """Raise DataError as `require_rows` does, for all splits at once."""
    problems = []
    for split, of_split in stats.items():
        try:
            require_rows(data, split, of_split)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)


def _sources_of(data: DataConfig, split: Split) -> Sequence[SourceConfig]:
    """Return the sources of a split that `data` names; none for a split of another section."""
    if split == "eval" and isinstance(data.eval, tuple):
        return data.eval
    return () if split == "forget" else data.train


def _causes(limit: int, stats: JsonObject) -> tuple[list[str], list[str]]:
    """Return why records are left out, and what can be done, the gentlest first."""
    causes = []
    # Each cause puts its remedy before these.
    remedies = ["fix the data", "raise data.max_lost_share"]
    is_cut = stats["longest"] > limit
    if stats["overlong"]:
        longest = f"the longest has {stats['longest']:,} tokens"
        causes.append(f"{stats['overlong']:,} longer than data.max_length {limit:,} ({longest})")
        remedies.insert(0, "set data.overlong to truncate (or, of plain texts, to split)")
    if stats["no_label"]:
        reason = "no answer, or it was truncated" if is_cut else "no answer"
        causes.append(f"{stats['no_label']:,} with nothing to train on ({reason})")
    if stats.get("unusable"):  # not in data that were prepared before
        causes.append(f"{stats['unusable']:,} with equal or empty answers, or different prompts")
    if is_cut:
        remedies.insert(0, "raise data.max_length")
    # Nothing was left out: there are no rows since no record could be read.
    if not causes:
        return ["none is a record that could be read"], ["fix the data"]
    return causes, remedies
