"""Turn records into encoded rows, in several processes, in order and in flat memory.

    records ──make_batches──▶ RecordBatch ──RowMaker.encode──▶ BatchResult: a Chunk of rows, and a Tally of the records

`data/inspect` looks at the results, `prepare` keeps them.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

from kubetune.data.prepared.profile import Profile
from kubetune.data.prepared.row_writer import Chunk
from kubetune.data.prepared.tally import Tally
from kubetune.data.prepared.workers import map_in_processes
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from kubetune.data.spec import Split

BATCH_RECORDS: Final = 256
# Up to here starting processes takes longer than the work.
FEW_BATCHES: Final = 8

_KILLED: Final = (
    "a process that tokenises was killed, probably for lack of memory; set data.num_proc lower and run the same "
    "command again. Nothing was written."
)


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Records of one source and one split, each with its index in the source."""

    source: int
    split: Split
    records: list[tuple[int, Record]]


@dataclass
class BatchResult:
    """One batch encoded."""

    source: int
    split: Split
    chunk: Chunk = field(default_factory=Chunk)
    tally: Tally = field(default_factory=Tally)
    # Tokens of every sequence, before any was cut or left out. So is the profile, if the worker makes any.
    lengths: array[int] = field(default_factory=lambda: array("I"))
    profile: Profile | None = None
    # (place of a record, what is wrong with it)
    problems: list[tuple[str, str]] = field(default_factory=list)
    # [rows] a number that equal rows share; of 64 bits, so that lists of them stay small
    digests: array[int] = field(default_factory=lambda: array("Q"))
    # [pairs] the digest that a pair would have with its answers exchanged
    reversed_digests: array[int] = field(default_factory=lambda: array("Q"))
    largest_id: int = -1


def add_digests(result: BatchResult) -> None:
    """Put the digests of the chunk's rows into the result, and the largest of all ids."""
    chunk = result.chunk
    stream = memoryview(chunk.tokens)
    start = 0
    for length, split, images in zip(chunk.lengths, chunk.splits, chunk.images, strict=True):
        row = stream[start : start + length]
        start += length
        # Rows with the same text about different images are not equal.
        crcs = b"".join(image.crc.to_bytes(4) for image in images)
        result.digests.append(_digest(row, crcs))
        if split:
            result.reversed_digests.append(_digest(row[split:], bytes(row[:split]), crcs))

    result.largest_id = max(chunk.tokens, default=-1)


def _digest(*parts: bytes | memoryview[int]) -> int:
    """Return a number of 64 bits for some bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest())


def encode_batches(
    encode: Callable[[RecordBatch], BatchResult],
    batches: Iterator[RecordBatch],
    problems: Problems,
    num_proc: int | None = None,
) -> Generator[BatchResult]:
    """Yield the results of all batches, in order. Raise EnvironmentFault if a process was killed."""
    # Read ahead, to see whether there is enough work for several processes.
    first = list(islice(batches, FEW_BATCHES + 1))
    processes = num_proc or len(os.sched_getaffinity(0))
    everything = chain(first, batches)
    results: Iterable[BatchResult]
    if processes == 1 or len(first) <= FEW_BATCHES:
        results = map(encode, everything)
    else:
        results = map_in_processes(
            encode,
            everything,
            processes,
            if_killed=_KILLED,
        )

    try:
        for result in results:
            for where, what in result.problems:
                problems.add(where, what)
            yield result
    finally:
        if isinstance(results, Generator):
            results.close()  # ends the processes now, not when the garbage is collected


def make_batches(
    records: Iterator[Record],
    source: int,
    split_of: Callable[[int], Split | None],
) -> Iterator[RecordBatch]:
    """Group the records of one source by split. `split_of(index)` is None for records that are not used."""
    # A batch of each split is filled; a full one goes out, the others at the end.
    open_batches: dict[Split, RecordBatch] = {}
    for index, record in enumerate(records):
        split = split_of(index)
        if split is None:
            continue
        batch = open_batches.setdefault(split, RecordBatch(source, split, []))
        batch.records.append((index, record))
        if len(batch.records) == BATCH_RECORDS:
            yield open_batches.pop(split)

    yield from open_batches.values()
