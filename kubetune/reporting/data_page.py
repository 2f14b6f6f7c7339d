"""The data's own page: what a run would be trained on, for somebody who has never read a word about kubetune.

Takes what a check and a survey found as plain data, and writes one HTML file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kubetune.base.files import write_atomic
from kubetune.base.logs import scrub
from kubetune.reporting.histogram import fold
from kubetune.reporting.rendering import render

LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish",
    "fa": "Persian", "fi": "Finnish", "fr": "French", "he": "Hebrew", "hi": "Hindi", "hu": "Hungarian",
    "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "nl": "Dutch", "no": "Norwegian",
    "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "th": "Thai",
    "tr": "Turkish", "uk": "Ukrainian", "vi": "Vietnamese", "zh": "Chinese",
}  # fmt: skip


def write_data_page(output: Path, facts: Mapping[str, Any]) -> Path:
    """The page in `output`.

    `facts`: `check` as check.Report.to_json gives it, `survey`, `rows` of gallery.Gallery, `lengths` by split as
    statistics.bars makes them, `profiles` by split as profile.Profile does, and `settings`: title, model, max_length,
    overlong, train_on, task, has_languages.
    """
    check, settings = facts["check"], facts["settings"]
    splits = [_split(name, stats, facts, settings) for name, stats in check["splits"].items()]
    text = render(
        "data.html",
        title=f"Data of {settings['title']}",
        has_charts=False,
        data="",
        ok=check["ok"],
        findings=check["findings"],
        problems=check["problems"],
        splits=splits,
        surveys=[_named(found) for found in facts["survey"]],
        rows=facts["rows"],
        settings=settings,
    )
    write_atomic(output, scrub(text))
    return output


def _split(
    name: str, stats: Mapping[str, Any], facts: Mapping[str, Any], settings: Mapping[str, Any]
) -> Any:
    limit, profile = settings["max_length"], facts["profiles"].get(name)
    found = {
        "name": name,
        "stats": stats,
        "bars": _bars(facts["lengths"].get(name, []), limit),
        "profile": profile,
    }
    if profile is not None:
        found |= {name: _bars(profile[name]) for name in ("shares", "image_tokens")}
    return found


def _bars(
    histogram: Sequence[Sequence[int]], limit: int | None = None
) -> list[tuple[int, int, int, float, bool]]:
    """Bars as they are drawn: from, to, how many, that as a part of the longest, and whether it is beyond `limit`."""
    folded = fold(histogram, limit)
    most = max((count for _, _, count in folded), default=1)
    return [
        (low, high, n, n / max(1, most), limit is not None and low > limit)
        for low, high, n in folded
    ]


def _named(found: Mapping[str, Any]) -> dict[str, Any]:
    languages = {
        role: [
            (LANGUAGES.get(code, code), count / max(1, sum(n for _, n in counts)))
            for code, count in counts
        ]
        for role, counts in found["languages"].items()
        if counts
    }
    sizes = found["image_sizes"]
    sides = _bars(sizes["longer_sides"]) if sizes else []
    return {
        **found,
        "languages": languages,
        "turn_bars": _bars(found["turn_bars"]),
        "longer_sides": sides,
    }
