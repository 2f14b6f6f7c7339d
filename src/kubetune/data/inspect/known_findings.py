"""The findings about the data of a run that can be had at once: of prepared rows, or of data that are small.

For `kubetune plan`, which reads all rows of small data only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kubetune.base.whole_folder import is_whole
from kubetune.config.schema import Config, EvaluationConfig, SourceConfig
from kubetune.data.findings.finding import Finding
from kubetune.data.inspect.estimate import is_on_disk, makes_data, taken_by, where_is
from kubetune.data.reading.sources import locate
from kubetune.data.spec import DataSpec
from kubetune.errors import DataError

if TYPE_CHECKING:
    from kubetune.data.text.tokenizer import Tokenizer

# Limits of small data. Each image has to be opened, so fewer records with images are small.
MOST_RECORDS: Final = 1_000
MOST_PICTURED_RECORDS: Final = 50
MOST_BYTES: Final = 4 << 20


def known_findings(
    config: Config,
    environ: Mapping[str, str],
    load: Callable[[], Tokenizer],
) -> tuple[Finding, ...] | None:
    """Return the findings, or None if nobody has looked at all rows and they are too many to do so now.

    `load`: of the tokenizer, which is asked for only if it is on this machine.
    """
    sources = list(chain(*config.sources.values()))
    for source in sources:
        located = where_is(source, made_by_pod=makes_data(config.kubernetes))
        if located is None or not located.files:
            return None

    if not is_on_disk(config.model.tokenizer or config.model.path, environ):
        return None
    from kubetune.data.findings.group_findings import LEARNS_ALIKE, of_names
    from kubetune.data.findings.sentences import find
    from kubetune.data.findings.split_files import located_sources
    from kubetune.data.inspect.check import check
    from kubetune.data.prepared.fingerprint import MANIFEST, fingerprint, kept_stats
    from kubetune.data.text.tokenizer import cache_folder

    spec = DataSpec.of(config)
    try:
        tokenizer = load()
        key = fingerprint(spec, tokenizer)
        folder = cache_folder(config.data.cache) / "prepared" / key[:32]
        # Rows that are prepared were looked at then, and their counts are kept with them.
        if is_whole(folder, MANIFEST):
            # A damaged disk may still have changed the counts; the run itself compares checksums.
            with suppress(ValueError, LookupError, TypeError):
                known = find(spec, kept_stats(folder, spec), tokenizer)
                if any(finding.severity == "error" for finding in known):
                    return known
                best_metric = config.training.metric_for_best_model
                missing = _missing_references(
                    spec, config.evaluation, best_metric, folder, tokenizer
                )
                return (*missing, *known)

        most_records = MOST_PICTURED_RECORDS if config.sees else MOST_RECORDS
        if not _are_small(sources, most_records):
            # Names of files say this of any number of rows.
            if config.task not in LEARNS_ALIKE:
                return None
            named = of_names(located_sources(config.data.train))
            return tuple(finding for finding in named if finding.severity == "error") or None
        # Processes of their own would take longer to start than so few rows take.
        one_process = config.data.model_copy(update={"num_proc": 1})
        return check(config.model_copy(update={"data": one_process}), tokenizer).named_findings
    except DataError as error:
        return (Finding("refused", "error", "", error.problem),)


def _missing_references(
    spec: DataSpec,
    evaluation: EvaluationConfig,
    best_metric: str,
    folder: Path,
    tokenizer: Tokenizer,
) -> Iterator[Finding]:
    """Yield what a run with these prepared rows would refuse for want of references."""
    # Opening rows takes numpy, and an image processor if there are images.
    if evaluation.generate is None and not spec.rewards and spec.task != "distill":
        return
    from kubetune.data.findings.checked import missing_references
    from kubetune.data.prepared.prepare import load_prepared

    prepared = load_prepared(folder, tokenizer, spec)
    yield from missing_references(prepared, evaluation, best_metric)


def _are_small(sources: Sequence[SourceConfig], most_records: int) -> bool:
    size = 0
    for source in sources:
        for file in locate(source).files:
            size += file.stat().st_size
    # Records are counted only in small files, which takes no time.
    if size > MOST_BYTES:
        return False
    return sum(taken_by(source) or 0 for source in sources) <= most_records
