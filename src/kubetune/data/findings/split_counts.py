"""The counts of one split, from which its findings are made."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kubetune.base.humanize import counted, place
from kubetune.config.schema import DataConfig, RewardConfig, SourceConfig
from kubetune.data.findings.finding import Finding, Severity
from kubetune.data.prepared.tally import MOST_PLACES
from kubetune.data.reading.strict_json import JsonObject
from kubetune.data.spec import Split


@dataclass(frozen=True)
class SplitCounts:
    """The counts of one split, from which its findings are made."""

    task: str
    data: DataConfig
    split: Split
    name: str  # what the split is called in sentences
    sources: Sequence[SourceConfig]
    stats: JsonObject  # `tally.summarise` and `RowWatch.facts` together
    rewards: Sequence[RewardConfig] = ()
    shown_columns: Collection[str] = ()  # to a teacher
    are_labels_listed: bool = False  # in `classification.labels`: each is meant to be a class

    def rows(self, number: int, unit: str = "row") -> str:
        """Return `3 of 20 rows of train`."""
        return f"{number:,} of {counted(self.stats['rows'], unit)} of {self.name}"

    def records(self, number: int) -> str:
        """Return `3 of 20 records of train`."""
        return f"{number:,} of {counted(self.stats['records'], 'record')} of {self.name}"

    def places(self, pairs: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """Return pairs of a source's index and a record's, as people read them: `data.jsonl records 5, 9`."""
        # Records count from 1 for people.
        by_source: dict[int, list[str]] = {}
        for source, record in pairs:
            by_source.setdefault(source, []).append(f"{record + 1:,}")
        texts = []
        for source, records in by_source.items():
            noun = "record" if len(records) == 1 else "records"
            texts.append(f"{place(self.sources[source].path)} {noun} {', '.join(records)}")
        return tuple(texts)

    def counted_places(self, what: str) -> tuple[str, ...]:
        """Return the first records that are counted under `what`."""
        pairs = []
        for index, source in enumerate(self.stats["sources"]):
            for record in source["places"].get(what, ()):
                pairs.append((index, record))
        return self.places(pairs[:MOST_PLACES])

    def finding(
        self,
        severity: Severity,
        id: str,
        sentence: str,
        number: int = 0,
        places: tuple[str, ...] = (),
        advice: str = "",
    ) -> Finding:
        """Return a finding about this split."""
        return Finding(id, severity, self.split, sentence, number, places, advice)

    def counted_warning(self, what: str, sentence: str, advice: str = "") -> Finding:
        """Return a warning of what is counted under a name, with the first places of it."""
        places = self.counted_places(what)
        return self.finding("warning", what, sentence, self.stats[what], places, advice)
