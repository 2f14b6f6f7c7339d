"""The records that make up training and evaluation, and a check that enough are left to begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kubetune.base.humanize import counted, unused_keys
from kubetune.config.schema import Config, SourceConfig
from kubetune.data.prepared.pipeline import Batch, Split, Tally, make_batches
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.readers import Record
from kubetune.data.reading.sources import locate, read_source
from kubetune.errors import DataError

_KEYS: dict[Split, str] = {"train": "data.train", "eval": "data.eval", "forget": "evaluation.forget.data"}


def split_sources(config: Config) -> dict[Split, tuple[SourceConfig, ...]]:
    """The sources of each split; a share held out comes from the sources of training."""
    named: dict[Split, tuple[SourceConfig, ...]] = {**config.sources}
    if config.data.eval and isinstance(config.data.eval, float):
        named["eval"] = config.data.train
    return {split: given for split, given in named.items() if given}


def plan_batches(config: Config, problems: Problems, tallies: Mapping[Split, Sequence[Tally]]) -> Iterator[Batch]:
    """Read every record that the config asks for, in the order of the sources, training first.

    What cannot be read is counted in the tallies; where a share is held out, in those of training.
    """
    seed = config.training.seed
    share = config.data.eval if isinstance(config.data.eval, float) else 0.0
    for split, sources in config.sources.items():
        held_out = share if split == "train" else 0.0
        for index, (source, fates) in enumerate(zip(sources, _fates(sources, seed, held_out), strict=True)):
            unreadable = problems.part()
            yield from make_batches(read_source(source, unreadable), index, _splitter(split, fates))
            tallies[split][index].records += unreadable.total
            tallies[split][index].unreadable += unreadable.total


def read_taken(source: SourceConfig, seed: int, problems: Problems) -> Iterator[Record]:
    """The records of a source that `path#N` and `range` take, whatever split they go to."""
    (fates,) = _fates([source], seed, 0.0)
    for index, record in enumerate(read_source(source, problems)):
        if fates is None or (index < len(fates) and fates[index]):
            yield record


def _fates(sources: Sequence[SourceConfig], seed: int, share: float) -> Sequence[bytes | None]:
    if not share and not any(source.range or locate(source).sample for source in sources):
        return [None] * len(sources)
    from kubetune.data.reading.selection import decide_fates  # imports numpy, which the common case does without

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
    by_source = [{"path": source.path, **vars(tally)} for source, tally in zip(sources, tallies, strict=True)]
    return {**vars(total), "lost_share": total.lost_share, "sources": by_source}


def remarks(stats: dict[str, Any]) -> list[str]:
    """Records of a split that became no rows, or other ones: `7 left out as too long`."""
    fates = {
        "overlong": "left out as too long",
        "truncated": "truncated",
        "no_label": "left out with nothing to train on",
        "unusable": "left out, whose answers are equal, empty, or to different prompts",
        "refused": "refused",
        "unreadable": "that cannot be read",
    }
    found = [f"{stats[name]:,} {fate}" for name, fate in fates.items() if stats.get(name)]
    if stats.get("split"):
        found.append(f"{stats['split']:,} split into {stats['pieces']:,} rows")
    return [*found, *changes(stats), *answers(stats)]


def told(split: str, stats: dict[str, Any]) -> list[str]:
    """Lines on what became of a split's records, where rows are not all that they hold."""
    found, keys = remarks(stats), unused_keys(stats.get("unused_keys", {}))  # not in data that were prepared before
    became = f"of {stats['records']:,} records {', '.join(found)}" if found else ""
    left = unused_keys(stats.get("files_not_read", {}), "files not read")
    return [f"{split}: {line}" for line in (became, keys, left) if line]


def answers(stats: dict[str, Any]) -> list[str]:
    """The answers of a split that are compared or judged, in numbers: lengths may be all that is known of them."""
    found, rows = stats.get("answers") or {}, stats["rows"]
    if "chosen_tokens" in found and rows:
        chosen, rejected = (found[f"{name}_tokens"] / rows for name in ("chosen", "rejected"))
        longer = found.get("chosen_longer", 0) / rows
        return [
            f"chosen answers of {chosen:,.1f} tokens, rejected of {rejected:,.1f}; {longer:.0%} of the chosen longer"
        ]
    if found:
        return [f"{found.get('good', 0):,} good answers and {found.get('bad', 0):,} bad"]
    return []


def changes(stats: dict[str, Any]) -> list[str]:
    """Parts that rows of a split lack or have without a word of it in their records."""
    meanings = {
        "reasoning_dropped": "with reasoning that the chat template leaves out",
        "unlike_prompt": (
            "with an answer that does not begin where the generation prompt ends, which may open a thought: such a "
            "beginning is trained and never asked for. Set model.chat_template to one that begins both alike"
        ),
        "special_texts": "with special tokens in their texts, which become such tokens",
    }
    of_images = {
        "images_above_budget": ("image", " of more tokens than vision.image_max_tokens, being so narrow"),
        "images_animated": ("animated image", ", the first frame of which alone is seen"),
        "images_deep": ("image", " with more than 8 bits of grey, whose brighter parts become white"),
    }
    return [
        *(f"{stats[name]:,} {meaning}" for name, meaning in meanings.items() if stats.get(name)),
        *(f"{counted(stats[name], unit)}{how}" for name, (unit, how) in of_images.items() if stats.get(name)),
    ]


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
