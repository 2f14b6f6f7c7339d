"""The records that make up training and evaluation, and a check that enough are left to begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from kubetune.base.humanize import counted
from kubetune.config.schema import DataConfig, SourceConfig
from kubetune.data.prepared.pipeline import Batch, Tally, make_batches
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.record import Record
from kubetune.data.reading.sources import locate, no_records, read_source
from kubetune.data.spec import Split
from kubetune.errors import DataError

# Where the run file names the data of each split.
_KEYS: Final[dict[Split, str]] = {
    "train": "data.train",
    "eval": "data.eval",
    "forget": "evaluation.forget.data",
}


def held_out_share(data: DataConfig) -> float:
    """Return the share of training's records that is held out to evaluate on; 0 where `data.eval` names sources."""
    return data.eval if isinstance(data.eval, float) else 0.0


def plan_batches(
    splits: Mapping[Split, Sequence[SourceConfig]],
    held_out: float,
    seed: int,
    problems: Problems,
    tallies: Mapping[Split, Sequence[Tally]],
) -> Iterator[Batch]:
    """Read every record of a run, in the order of the sources, training first.

    `held_out`: the share of training's records that goes to evaluation. `tallies`: by split and source, what became of
    the records. What cannot be read is counted there, where a share is held out as one of training.
    """
    for split, sources in splits.items():
        share = held_out if split == "train" else 0.0
        for index, fates in enumerate(_fates(sources, seed, share)):
            unreadable = problems.part()
            records = read_source(sources[index], unreadable)
            yield from make_batches(records, index, _splitter(split, fates))

            # Complete only now, since all records of the source were read.
            tally = tallies[split][index]
            tally.records += unreadable.total
            tally.unreadable += unreadable.total
            tally.blank_lines += unreadable.blank_lines


def read_taken(
    source: SourceConfig,
    seed: int,
    problems: Problems,
) -> Iterator[Record]:
    """Yield the records of a source that `path#N` and `range` take, whatever split they go to."""
    (fates,) = _fates([source], seed, 0.0)
    for index, record in enumerate(read_source(source, problems)):
        # Without fates all are taken; behind the last fate none is.
        if fates is None or (index < len(fates) and fates[index]):
            yield record


def _fates(
    sources: Sequence[SourceConfig],
    seed: int,
    share: float,
) -> Sequence[bytes | None]:
    """Return what becomes of the records of each source, as `selection.decide_fates` does."""
    if not share and not any(source.range or locate(source).sample for source in sources):
        return [None] * len(sources)
    # It imports numpy, which the common case does without.
    from kubetune.data.reading.selection import decide_fates

    return decide_fates(sources, seed, share)


def _splitter(split: Split, fates: bytes | None) -> Callable[[int], Split | None]:
    """Return a function from the index of a record to its split; None for one that is not taken."""

    def split_of(index: int) -> Split | None:
        if fates is None:
            return split
        # Behind the last record that is taken there are no fates.
        fate = fates[index] if index < len(fates) else 0
        return split_of_fate[fate]

    split_of_fate: tuple[Split | None, ...] = (None, split, "eval")
    return split_of


def summarise(sources: Sequence[SourceConfig], tallies: Sequence[Tally]) -> dict[str, Any]:
    """Return the contents of stats.json: what became of the records, in all and by source."""
    total = Tally()
    by_source = []
    for source, tally in zip(sources, tallies, strict=True):
        total.add(tally)
        columns = tally.unused_columns.to_json(tally.records)
        by_source.append({"path": source.path, **vars(tally), "unused_columns": columns})

    stats = dict(vars(total))
    # Each source has columns of its own.
    del stats["unused_columns"]
    stats["lost_share"] = total.lost_share
    stats["sources"] = by_source
    return stats


def require_rows(
    data: DataConfig,
    split: Split,
    stats: dict[str, Any],
) -> None:
    """Raise DataError when a split has no rows, or more of its records are left out than the config allows."""
    if not stats["records"]:
        raise no_records(_KEYS[split], _sources_of(data, split))
    if stats["rows"] and stats["lost_share"] <= data.max_lost_share:
        return

    # The message names each cause, and only the remedies that help with it.
    lost = stats["overlong"] + stats["no_label"] + stats.get("unusable", 0)
    records = counted(stats["records"], "record")
    causes, remedies = _causes(data.max_length, stats)
    advice = remedies[-1]
    if len(remedies) > 1:
        advice = f"{', '.join(remedies[:-1])}, or {advice}"
    raise DataError(
        f"{_KEYS[split]}: {lost:,} of {records} ({stats['lost_share']:.1%}) would be left out: {', '.join(causes)}. "
        f"data.max_lost_share allows {data.max_lost_share:.0%}. {advice[0].upper()}{advice[1:]}. Nothing was written."
    )


def require_all_rows(data: DataConfig, stats: Mapping[Split, dict[str, Any]]) -> None:
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
    """Return the sources of a split that `data` names; none for those of another section."""
    if split == "eval" and isinstance(data.eval, tuple):
        return data.eval
    return () if split == "forget" else data.train


def _causes(limit: int, stats: dict[str, Any]) -> tuple[list[str], list[str]]:
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
