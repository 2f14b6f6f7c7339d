"""The page of data: what a run would be trained on, for readers who do not know kubetune.

It takes the results of a check and of a survey as plain data, and writes one HTML file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubetune.base.files import write_atomic
from kubetune.base.logs import scrub
from kubetune.reporting.histogram import drawn_bars
from kubetune.reporting.rendering import render

# Names of the languages that a survey tells apart, by their code of ISO 639-1.
LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish",
    "fa": "Persian", "fi": "Finnish", "fr": "French", "he": "Hebrew", "hi": "Hindi", "hu": "Hungarian",
    "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "nl": "Dutch", "no": "Norwegian",
    "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "th": "Thai",
    "tr": "Turkish", "uk": "Ukrainian", "vi": "Vietnamese", "zh": "Chinese",
}  # fmt: skip


def write_data_page(output: Path, facts: Mapping[str, Any]) -> Path:
    """Write the page, and return its path. `facts` holds

    check       as check.Report.to_json returns it
    survey      a survey of each source
    rows        of gallery.Gallery
    lengths     by split, as statistics.bars makes them
    profiles    by split, as profile.Profile makes them
    settings    title, model, max_length, overlong, train_on, task, has_languages
    """
    check = facts["check"]
    settings = facts["settings"]
    splits = [_split(name, stats, facts) for name, stats in check["splits"].items()]
    # base.html, which all pages share, asks for charts and their data. This page has none.
    text = render(
        "data.html",
        title=f"Data of {settings['title']}",
        has_charts=False,
        data="",
        ok=check["ok"],
        findings=check["findings"],
        problems=check["problems"],
        splits=splits,
        surveys=[_survey(survey) for survey in facts["survey"]],
        rows=facts["rows"],
        settings=settings,
    )
    write_atomic(output, scrub(text))
    return output


def _split(
    name: str,
    stats: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a split with its histograms as bars. Without a model it has no profile of tokens."""
    # By split, as the check has them.
    profile = facts["profiles"].get(name)
    lengths = facts["lengths"].get(name, [])
    split = {
        "name": name,
        "stats": stats,
        "bars": drawn_bars(lengths, facts["settings"]["max_length"]),
        "profile": profile,
    }
    if profile is not None:
        split["shares"] = drawn_bars(profile["shares"])
        split["image_tokens"] = drawn_bars(profile["image_tokens"])
    return split


def _survey(survey: Mapping[str, Any]) -> dict[str, Any]:
    """Return the survey of a source, with languages by name and histograms as bars."""
    languages: dict[str, list[tuple[str, float]]] = {}
    for role, counts in survey["languages"].items():
        total = sum(count for _, count in counts)
        for code, count in counts:
            shares = languages.setdefault(role, [])
            shares.append((LANGUAGES.get(code, code), count / max(1, total)))

    # A source without images has no sizes.
    sizes = survey["image_sizes"]
    return {
        **survey,
        "languages": languages,
        "turn_bars": drawn_bars(survey["turn_bars"]),
        "longer_sides": drawn_bars(sizes["longer_sides"] if sizes else []),
    }
