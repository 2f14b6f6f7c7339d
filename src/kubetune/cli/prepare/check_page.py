"""The page that `kubetune data check --html` writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubetune.data.inspect.check import Report
    from kubetune.data.inspect.gallery import Gallery
    from kubetune.data.spec import DataSpec
    from kubetune.data.text.tokenizer import Tokenizer


def write_page(
    output: Path,
    name: str | None,
    spec: DataSpec,
    report: Report,
    gallery: Gallery,
    tokenizer: Tokenizer,
) -> None:
    """Write a report as a page, with rows as the model sees them. `name`: of the run."""
    from importlib.util import find_spec

    from kubetune.config.naming import model_short_name
    from kubetune.data.inspect.survey import survey
    from kubetune.data.length_bars import bars
    from kubetune.reporting.data_page import write_data_page

    data = spec.data
    # A run without a name is called as its files are.
    names = [Path(source.path).name for source in data.train]
    title = name or ", ".join(names)

    # What the page says about the run. Languages are named only where the library that knows them is installed.
    settings = {
        "title": title,
        "model": model_short_name(spec.model.tokenizer or spec.model.path),
        "task": spec.task,
        "max_length": data.max_length,
        "overlong": data.overlong,
        "train_on": data.train_on,
        "has_languages": find_spec("py3langid") is not None,
    }

    # One bar for each range of lengths.
    length_bars = {}
    for split, lengths in report.lengths.items():
        length_bars[split] = bars(lengths.elements(), data.max_length)
    profiles = {}
    for split, profile in report.profiles.items():
        profiles[split] = profile.to_json(report.lengths[split], data.max_length)

    facts = {
        "check": report.to_json(),
        "survey": survey(data, spec.record_kind, spec.seed),
        "rows": gallery.rows(tokenizer, spec.splits),
        "lengths": length_bars,
        "profiles": profiles,
        "settings": settings,
    }
    write_data_page(output, facts)
