"""The records that make up training and evaluation, and a check that enough are left to begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kubetune.base.humanize import counted
from kubetune.config.schema import Config, SourceConfig
from kubetune.data.prepared.pipeline import Batch, Split, Tally, make_batches
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.record import Record
from kubetune.data.reading.sources import locate, read_source
from kubetune.errors import DataError

_KEYS: dict[Split, str] = {
    "train": "data.train",
    "eval": "data.eval",
    "forget": "evaluation.forget.data",
}


def split_sources(config: Config) -> dict[Split, tuple[SourceConfig, ...]]:
    """The sources of each split; a share held out comes from the sources of training."""
    named: dict[Split, tuple[SourceConfig, ...]] = {**config.sources}
    if config.data.eval and isinstance(config.data.eval, float):
        named["eval"] = config.data.train
    return {split: given for split, given in named.items() if given}


def plan_batches(
    config: Config, problems: Problems, tallies: Mapping[Split, Sequence[Tally]]
) -> Iterator[Batch]:
    """Read every record that the config asks for, in the order of the sources, training first.

    What cannot be read is counted in the tallies; where a share is held out, in those of training.
    """
    seed = config.training.seed
    share = config.data.eval if isinstance(config.data.eval, float) else 0.0
    for split, sources in config.sources.items():
        held_out = share if split == "train" else 0.0
        for index, (source, fates) in enumerate(
            zip(sources, _fates(sources, seed, held_out), strict=True)
        ):
            unreadable = problems.part()
            yield from make_batches(read_source(source, unreadable), index, _splitter(split, fates))
            tallies[split][index].records += unreadable.total
            tallies[split][index].unreadable += unreadable.total
            tallies[split][index].blank_lines += unreadable.blank_lines


def read_taken(source: SourceConfig, seed: int, problems: Problems) -> Iterator[Record]:
    """The records of a source that `path#N` and `range` take, whatever split they go to."""
    (fates,) = _fates([source], seed, 0.0)
    for index, record in enumerate(read_source(source, problems)):
        if fates is None or (index < len(fates) and fates[index]):
            yield record


def _fates(sources: Sequence[SourceConfig], seed: int, share: float) -> Sequence[bytes | None]:
    if not share and not any(source.range or locate(source).sample for source in sources):
        return [None] * len(sources)
    from kubetune.data.reading.selection import (
        decide_fates,
    )  # imports numpy, which the common case does without

    return decide_fates(sources, seed, share)


def _splitter(split: Split, fates: bytes | None) -> Callable[[int], Split | None]:
    """A function from the index of a record to its split. `fates` are as in `selection.decide_fates`."""
    if fates is None:
        return lambda _: split
    splits: tuple[Split | None, ...] = (None, split, "eval")
    return lambda index: splits[fates[index]] if index < len(fates) else None


def summarise(sources: Sequence[SourceConfig], tallies: Sequence[Tally]) -> dict[str, Any]:
    """Contents of stats.json: what became of the records, in all and by source."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    by_source = [
        {"path": source.path, **vars(tally)} for source, tally in zip(sources, tallies, strict=True)
    ]
    return {**vars(total), "lost_share": total.lost_share, "sources": by_source}


def require_rows(config: Config, split: Split, stats: dict[str, Any]) -> None:
    """Raise DataError when a split has no rows, or more of its records are left out than the config allows."""
    allowed, limit = config.data.max_lost_share, config.data.max_length
    if not stats["records"]:
        raise DataError(f"{_KEYS[split]} holds no records. Nothing was written.")
    if stats["rows"] and stats["lost_share"] <= allowed:
        return
    lost = stats["overlong"] + stats["no_label"] + stats.get("unusable", 0)
    records = counted(stats["records"], "record")
    causes, remedies = [], ["mend the data", "raise data.max_lost_share"]
    if stats["overlong"]:
        causes.append(
            f"{stats['overlong']:,} longer than data.max_length {limit:,} (the longest has {stats['longest']:,} tokens)"
        )
        remedies.insert(0, "set data.overlong to truncate (or, of plain texts, to split)")
    if stats["no_label"]:
        reason = "no answer, or it was truncated" if stats["longest"] > limit else "no answer"
        causes.append(f"{stats['no_label']:,} with nothing to train on ({reason})")
    if stats.get("unusable"):  # not in data that were prepared before
        causes.append(f"{stats['unusable']:,} with equal or empty answers, or different prompts")
    if stats["longest"] > limit:
        remedies.insert(0, "raise data.max_length")
    if not lost:
        causes, remedies = ["none is a record that could be read"], remedies[-2:-1]
    advice = ", ".join(remedies[:-1]) + f", or {remedies[-1]}" if len(remedies) > 1 else remedies[0]
    raise DataError(
        f"{_KEYS[split]}: {lost:,} of {records} ({stats['lost_share']:.1%}) would be left out: {', '.join(causes)}. "
        f"data.max_lost_share allows {allowed:.0%}. {advice[0].upper()}{advice[1:]}. Nothing was written."
    )
