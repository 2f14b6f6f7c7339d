"""The records of a source that are taken, and those of them held out: pure functions of a seed and an index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kubetune.config.schema import SourceConfig
from kubetune.data.prepared.order import Ids, hash_ids
from kubetune.data.reading.sources import count_rows, locate
from kubetune.errors import DataError


def decide_fates(
    sources: Sequence[SourceConfig], seed: int, share: float = 0.0
) -> list[bytes | None]:
    """For each source what becomes of each record: 0 it is not taken, 1 it is, 2 it is held out; None: all are taken.

    `share` of what is taken from all the sources together is held out. Records beyond the end are not taken.
    """
    taken = [select_rows(source, seed) for source in sources]
    if not share:
        return [None if ids is None else _codes(ids) for ids in taken]
    present = [
        np.arange(count_rows(source), dtype=np.int64) if ids is None else ids
        for source, ids in zip(sources, taken, strict=True)
    ]
    return [_codes(*pair) for pair in zip(present, hold_out(present, share, seed), strict=True)]


def _codes(taken: Ids, held_out: Ids | None = None) -> bytes:
    codes = np.zeros(int(taken[-1]) + 1 if len(taken) else 0, np.uint8)
    codes[taken] = 1
    if held_out is not None:
        codes[held_out] = 2
    return codes.tobytes()


def select_rows(source: SourceConfig, seed: int) -> Ids | None:
    """The indices of the records that `path#N` and `range` take, ascending, or None for all.

    The records are shuffled by a hash of (seed, index); `#N` takes the first N of them, `range` a slice of those.
    """
    sample = locate(source).sample
    if sample is None and source.range is None:
        return None
    ids = np.arange(count_rows(source), dtype=np.int64)
    shuffled = ids[np.argsort(hash_ids(ids, seed, "sample"), kind="stable")][:sample]
    first, end = source.range or (0, len(shuffled))
    if not 0 <= first < min(end, len(shuffled)):
        raise DataError(
            f"{source.path}: range [{first}, {end}) takes no record of {len(shuffled):,}"
        )
    return np.sort(shuffled[first:end])


def hold_out(taken: Sequence[Ids], share: float, seed: int) -> list[Ids]:
    """The records of each source to evaluate on: `share` of all that are taken, but at least one and never all."""
    total = sum(len(ids) for ids in taken)
    if total < 2:
        raise DataError(
            f"data.eval: {share} holds out a share of data.train, which has {total} record; expected 2"
        )
    number = min(max(1, round(share * total)), total - 1)
    keys = np.concatenate([hash_ids(ids, seed, "eval", source) for source, ids in enumerate(taken)])
    chosen = np.zeros(total, bool)
    chosen[np.argsort(keys, kind="stable")[:number]] = True
    parts = np.split(chosen, np.cumsum([len(ids) for ids in taken])[:-1])
    return [ids[part] for ids, part in zip(taken, parts, strict=True)]
