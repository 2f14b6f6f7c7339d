"""One pass over all records of a run: read, encoded, counted and watched.

`data check` and `data prepare` make the same pass, so they say the same of the same data. What only one of them wants
(rows for show, files of rows) it takes from the results as they go by.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kubetune.config.schema import SourceConfig
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.row_watch import RowWatch
from kubetune.data.findings.sentences import find
from kubetune.data.prepared.pipeline import Result, Tally, Worker, encode_batches
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import not_read
from kubetune.data.reading.splits import held_out_share, plan_batches, summarise
from kubetune.data.spec import DataSpec, Split
from kubetune.data.text.encode_labelled import most_tokens
from kubetune.data.text.find_labels import find_labels
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.vision.image_processor import processor_of


class DataPass:
    """A pass over the data of a run.

    Run through `results` first; `stats`, `findings` and `problems` are complete then.
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

        # From here on, `spec` is the one by which rows are encoded.
        self._spec = spec
        self._tokenizer = tokenizer
        self._processor = processor_of(spec, tokenizer)
        self._worker = Worker(
            tokenizer,
            spec.data,
            self.sources,
            self.labels,
            self._processor,
            profiled_at,
            spec.record_kind,
        )
        # Kept here and not in the worker, which may run in several processes: rows are compared with all others.
        self._watch = RowWatch(spec.model, self.sources, self.labels)
        self._tallies: dict[Split, list[Tally]] = {}
        for split, sources in self.sources.items():
            self._tallies[split] = [Tally() for _ in sources]

    @property
    def has_images(self) -> bool:
        """True if records may have images."""
        return self._processor is not None

    def results(self) -> Generator[Result]:
        """Yield the rows, batch after batch, once they are counted."""
        batches = plan_batches(
            self._spec.sources,
            held_out_share(self._spec.data),
            self._spec.seed,
            self.problems,
            self._tallies,
        )
        # Results come in the order of the batches, whatever the number of processes.
        num_proc = self._spec.data.num_proc
        for result in encode_batches(self._worker, batches, self.problems, num_proc):
            self._tallies[result.split][result.source].add(result.tally)
            self._watch.add(result)
            yield result

    def stats(self) -> dict[Split, dict[str, Any]]:
        """Return what became of the records of each split, and what was seen of its rows."""
        stats: dict[Split, dict[str, Any]] = {}
        for split, tallies in self._tallies.items():
            stats[split] = summarise(self.sources[split], tallies) | self._watch.facts(split)
        return stats

    def findings(self, stats: Mapping[Split, dict[str, Any]]) -> tuple[Finding, ...]:
        """Return what a person should know about the data, by their `stats`."""
        return find(self._spec, stats, self._tokenizer)


def with_files_not_read(
    sources: Mapping[Split, Sequence[SourceConfig]],
    stats: Mapping[Split, dict[str, Any]],
    *,
    images: bool,
) -> dict[Split, dict[str, Any]]:
    """Return the counts with those of files in folders of data that are not read, as they lie there now."""
    with_files = dict(stats)
    for split, of_split in sources.items():
        if of_split:
            left = not_read(of_split, images=images)
            with_files[split] = {**with_files[split], "files_not_read": left}

    return with_files
