"""Which records of a source are taken, and which of these are held out: pure functions of a seed and an index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kubetune.base.humanize import counted
from kubetune.config.schema import SourceConfig
from kubetune.data import row_counts
from kubetune.data.order import Ids, hash_ids, shuffled
from kubetune.data.reading.sources import count_rows, empty_range, locate, no_records
from kubetune.errors import DataError

# What becomes of a record, a byte for each.
_NOT_TAKEN = 0
_TAKEN = 1
_HELD_OUT = 2


def decide_fates(
    sources: Sequence[SourceConfig],
    seed: int,
    share: float = 0.0,
) -> list[bytes | None]:
    """Return for each source the fate of its records: 0 not taken, 1 taken, 2 held out; None where all are taken.

    `share` of what is taken from all sources together is held out. Records beyond the end of the bytes are not taken.

    Example: a source of five records, of which 0, 2 and 3 are taken and 2 is held out

        record  0  1  2  3  4
        fate    1  0  2  1       the bytes end with the last record that is taken
    """
    if share:
        return _fates_with_held_out(sources, seed, share)
    fates: list[bytes | None] = []
    for source in sources:
        taken = select_rows(source, seed)
        fates.append(None if taken is None else _fates(taken))
    return fates


def _fates_with_held_out(
    sources: Sequence[SourceConfig],
    seed: int,
    share: float,
) -> list[bytes | None]:
    taken = []
    for source in sources:
        ids = select_rows(source, seed)
        if ids is None:
            ids = np.arange(count_rows(source), dtype=np.int64)
        taken.append(ids)
    if not any(len(ids) for ids in taken):
        raise no_records("data.train", sources)

    fates: list[bytes | None] = []
    for ids, held_out in zip(taken, hold_out(taken, share, seed), strict=True):
        fates.append(_fates(ids, held_out))
    return fates


def _fates(taken: Ids, held_out: Ids | None = None) -> bytes:
    # Later marks replace earlier ones: what is held out was taken first.
    count = int(taken[-1]) + 1 if len(taken) else 0
    fates = np.full(count, _NOT_TAKEN, np.uint8)
    fates[taken] = _TAKEN
    if held_out is not None:
        fates[held_out] = _HELD_OUT
    return fates.tobytes()


def select_rows(source: SourceConfig, seed: int) -> Ids | None:
    """Return the indices of the records that `path#N` and `range` take, ascending; None where all are taken.

    The records are shuffled by a hash of (seed, index); `#N` takes the first N of them, `range` a slice of those.
    """
    sample = locate(source).sample
    if sample is None and source.range is None:
        return None
    ids = np.arange(count_rows(source), dtype=np.int64)
    sampled = shuffled(ids, seed, "sample")[:sample]

    # A range is a slice of the shuffled records, so ranges that do not overlap share no record.
    first, end = source.range or (0, len(sampled))
    if not 0 <= first < min(end, len(sampled)):
        raise empty_range(source, len(sampled))

    return np.sort(sampled[first:end])


def hold_out(
    taken: Sequence[Ids],
    share: float,
    seed: int,
) -> list[Ids]:
    """Return the records of each source to evaluate on: `share` of all that are taken, at least one and never all.

    `taken` and the result: the indices of each source's records, ascending.
    """
    sizes = [len(ids) for ids in taken]
    total = sum(sizes)
    if total < 2:
        raise DataError(
            f"data.eval: {share} holds out a share of data.train, which has {counted(total, 'record')}; expected 2"
        )

    number = row_counts.held_out(total, share)

    # The records with the smallest hashes, over all sources together.
    hashes = []
    for source, ids in enumerate(taken):
        hashes.append(hash_ids(ids, seed, "eval", source))
    chosen = np.zeros(total, bool)
    chosen[np.argsort(np.concatenate(hashes), kind="stable")[:number]] = True

    # `chosen` lies end to end over the sources, and is cut back into their parts.
    held_out = []
    begin = 0
    for ids in taken:
        end = begin + len(ids)
        held_out.append(ids[chosen[begin:end]])
        begin = end

    return held_out
