"""One pass over all records of a run: read, encoded, counted and watched.

`data check` and `data prepare` make the same pass, so they say the same of the same data. Each takes
what only it needs (rows for show, files of rows) from the results as they pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace

from kubetune.data.prepared.pipeline import BatchResult, RecordBatch, encode_batches, make_batches
from kubetune.data.prepared.row_maker import RowMaker
from kubetune.data.prepared.row_watch import RowWatch
from kubetune.data.prepared.tally import Tally, summarise
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.reading.taken import fates_of
from kubetune.data.spec import DataSpec, Split
from kubetune.data.text.encode_labelled import most_tokens
from kubetune.data.text.find_labels import find_labels
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.vision.image_processor import processor_of


class DataPass:
    """A pass over the data of a run.

    Run through `results` first; `stats` and `problems` are complete then.
    """

    def __init__(
        self,
        spec: DataSpec,
        tokenizer: Tokenizer,
        problems: Problems | None = None,
        *,
        limits: Iterable[int] = (),
    ) -> None:
        """`limits`: values of data.max_length by which rows are profiled; none: they are not profiled.

        Raise DataError where labels of a classifier make no problem.
        """
        self.problems = problems or Problems()
        self.sources = spec.splits
        self.labels = None

        # The run's own limit is profiled too, to be compared with the others.
        profiled_at: tuple[int, ...] = ()
        if limits:
            profiled_at = tuple(sorted({*limits, spec.data.max_length}))
        # Labels are found first: whether they are classes or numbers decides how each row is encoded.
        if spec.task == "sequence_classification":
            self.labels = find_labels(spec.classification, spec.model, spec.sources)
            limit = most_tokens(spec.data.max_length, tokenizer)
            spec = replace(spec, data=spec.data.model_copy(update={"max_length": limit}))

        # The one by which rows are encoded.
        self.spec = spec
        self.tokenizer = tokenizer
        self._processor = processor_of(spec, tokenizer)
        self._maker = RowMaker(
            tokenizer,
            spec.data,
            self.sources,
            self.labels,
            self._processor,
            profiled_at,
            spec.record_kind,
        )
        # Kept here and not in the maker of rows, which may run in several processes: rows are compared with all others.
        self._watch = RowWatch(spec.model, self.sources, self.labels)
        self._tallies: dict[Split, list[Tally]] = {}
        for split, sources in self.sources.items():
            self._tallies[split] = [Tally() for _ in sources]

    @property
    def has_images(self) -> bool:
        """True if records may have images."""
        return self._processor is not None

    def results(self) -> Generator[BatchResult]:
        """Yield the rows, batch after batch, once they are counted."""
        # Results come in the order of the batches, whatever the number of processes.
        num_proc = self.spec.data.num_proc
        for result in encode_batches(self._maker.encode, self._batches(), self.problems, num_proc):
            self._tallies[result.split][result.source].add(result.tally)
            self._watch.add(result)
            yield result

    def _batches(self) -> Iterator[RecordBatch]:
        """Read every record, in the order of the sources, training first; count those that cannot be read.

        Where a share of training is held out, a record that cannot be read is one of training.
        """
        for split, sources in self.spec.sources.items():
            share = self.spec.held_out_share if split == "train" else 0.0
            for index, fates in enumerate(fates_of(sources, self.spec.seed, share)):
                unreadable = self.problems.part()
                records = read_source(sources[index], unreadable)
                yield from make_batches(records, index, _splitter(split, fates))

                # Complete only now, since all records of the source were read.
                tally = self._tallies[split][index]
                tally.records += unreadable.total
                tally.unreadable += unreadable.total
                tally.blank_lines += unreadable.blank_lines
                tally.doubtful_headers.update(unreadable.doubts)

    def stats(self) -> dict[Split, JsonObject]:
        """Return what became of the records of each split, and what was seen of its rows."""
        stats: dict[Split, JsonObject] = {}
        for split, tallies in self._tallies.items():
            stats[split] = summarise(self.sources[split], tallies) | self._watch.facts(split)
        return stats


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
