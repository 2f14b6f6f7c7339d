"""One pass over all records of a run: encoded, counted and watched, for a check and for prepared rows alike."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from kubetune.config.schema import Config, SourceConfig
from kubetune.data.findings.row_watch import RowWatch
from kubetune.data.prepared.pipeline import Result, Split, Tally, Worker, encode_batches
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import not_read
from kubetune.data.reading.splits import plan_batches, summarise
from kubetune.data.text.labels import Labels


class LookThrough:
    """Run through `results` first; `stats` are then complete."""

    def __init__(
        self,
        config: Config,
        worker: Worker,
        sources: Mapping[Split, Sequence[SourceConfig]],
        labels: Labels | None,
        problems: Problems,
    ) -> None:
        self._config = config
        self._worker = worker
        self._sources = sources
        self._problems = problems
        self._watch = RowWatch(config, sources, labels)
        self._tallies = {split: [Tally() for _ in given] for split, given in sources.items()}

    def results(self) -> Generator[Result]:
        """Yield the rows, batch after batch, once they are counted."""
        batches = plan_batches(self._config, self._problems, self._tallies)
        num_proc = self._config.data.num_proc
        for result in encode_batches(self._worker, batches, self._problems, num_proc):
            self._tallies[result.split][result.source].add(result.tally)
            self._watch.add(result)
            yield result

    def stats(self) -> dict[Split, dict[str, Any]]:
        """Return what became of the records of each split, and what was seen of its rows."""
        return {
            split: summarise(self._sources[split], tallies) | self._watch.facts(split)
            for split, tallies in self._tallies.items()
        }


def with_files_not_read(
    config: Config, stats: Mapping[Split, dict[str, Any]], *, images: bool
) -> dict[Split, dict[str, Any]]:
    """Return the counts with those of files in folders of data that are not read, as they lie there now."""
    with_files = dict(stats)
    for split, sources in config.sources.items():
        if sources:
            left = not_read(sources, images=images)
            with_files[split] = {**with_files[split], "files_not_read": left}
    return with_files
