"""The findings about the data of a run that can be had at once: of prepared rows, or of data that are small.

For `kubetune plan`, which reads all rows of small data only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kubetune.base.whole_folder import is_whole
from kubetune.config.schema import Config
from kubetune.data.findings.finding import Finding
from kubetune.data.inspect.estimate import is_on_disk, taken_by, where_is
from kubetune.errors import DataError

if TYPE_CHECKING:
    from kubetune.data.text.tokenizer import Tokenizer

MOST_RECORDS: Final = 1_000
MOST_PICTURED_RECORDS: Final = 50
"""Of data with images, each of which has to be opened."""
MOST_BYTES: Final = 4 << 20


def known_findings(
    config: Config, environ: Mapping[str, str], load: Callable[[], Tokenizer]
) -> tuple[Finding, ...] | None:
    """Return the findings, or None where nobody has looked at all rows and they are too many to do so now.

    `load`: of the tokenizer, which is asked for only where it is on this machine.
    """
    if not _is_here(config, environ):
        return None
    from kubetune.data.findings.sentences import find
    from kubetune.data.inspect.check import check
    from kubetune.data.prepared.fingerprint import MANIFEST, fingerprint, kept_stats
    from kubetune.data.text.tokenizer import cache_folder

    try:
        tokenizer = load()
        folder = cache_folder(config.data.cache) / "prepared" / fingerprint(config, tokenizer)[:32]
        if is_whole(folder, MANIFEST):
            # A damaged disk may still have changed the counts; the run itself compares checksums.
            with suppress(ValueError, LookupError, TypeError):
                return find(config, kept_stats(folder, config, images=config.sees), tokenizer)
        if not _is_small(config):
            return None
        one_process = config.data.model_copy(update={"num_proc": 1})
        return check(config.model_copy(update={"data": one_process}), tokenizer).findings
    except DataError as error:
        sentence = str(error).removesuffix(" Nothing was written.").rstrip(".")
        return (Finding("refused", "error", "", sentence),)


def _is_here(config: Config, environ: Mapping[str, str]) -> bool:
    """True if the tokenizer and all data are files of this machine."""
    for sources in config.sources.values():
        for source in sources:
            located = where_is(config, source)
            if located is None or not located.files:
                return False
    return is_on_disk(config.model.tokenizer or config.model.path, environ)


def _is_small(config: Config) -> bool:
    records, size = 0, 0
    for sources in config.sources.values():
        for source in sources:
            located = where_is(config, source)
            size += sum(file.stat().st_size for file in located.files) if located else 0
            if size > MOST_BYTES:
                return False
            records += taken_by(config, source) or 0
    return records <= (MOST_PICTURED_RECORDS if config.sees else MOST_RECORDS)
