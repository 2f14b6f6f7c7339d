"""Which records of a source a run takes, and for which split; those that it takes are read here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kubetune.config.schema import SourceConfig
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import locate, read_source


def read_taken(
    source: SourceConfig,
    seed: int,
    problems: Problems,
) -> Iterator[Record]:
    """Yield the records of a source that `path#N` and `range` take, whatever split they go to."""
    (fates,) = fates_of([source], seed, 0.0)
    for index, record in enumerate(read_source(source, problems)):
        # Without fates all are taken; after the last fate none is.
        if fates is None or (index < len(fates) and fates[index]):
            yield record


def fates_of(
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
