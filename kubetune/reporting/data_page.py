"""The data's own page: what a run would be trained on, for somebody who has never read a word about kubetune.

Takes what a check and a survey found as plain data, and writes one HTML file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kubetune.base.files import write_atomic
from kubetune.base.humanize import counted, number, place, unused_keys
from kubetune.base.logs import scrub
from kubetune.reporting.page import fold, render

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
        verdict=check["verdict"],
        problems=check["problems"],
        leaked=check["eval_rows_also_in_train"],
        splits=splits,
        advice=_advice(check, facts["survey"], settings),
        surveys=[_named(found) for found in facts["survey"]],
        rows=facts["rows"],
        settings=settings,
    )
    write_atomic(output, scrub(text))
    return output


def _split(name: str, stats: Mapping[str, Any], facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    limit, profile = settings["max_length"], facts["profiles"].get(name)
    found = {"name": name, "stats": stats, "bars": _bars(facts["lengths"].get(name, []), limit), "profile": profile}
    if profile is not None:
        found |= {name: _bars(profile[name]) for name in ("shares", "image_tokens")}
    return found


def _bars(histogram: Sequence[Sequence[int]], limit: int | None = None) -> list[tuple[int, int, int, float, bool]]:
    """Bars as they are drawn: from, to, how many, that as a part of the longest, and whether it is beyond `limit`."""
    folded = fold(histogram, limit)
    most = max((count for _, _, count in folded), default=1)
    return [(low, high, n, n / max(1, most), limit is not None and low > limit) for low, high, n in folded]


def _advice(check: Mapping[str, Any], surveys: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Findings that somebody should look at, in sentences, the weightiest first."""
    said = []
    if total := check["problems"]["total"]:
        said.append(f"{counted(total, 'record')} cannot be used. The lines are named below.")
    if left := unused_keys(check["files_not_read"], "files not read"):
        said.append(f"In folders of data, {left}.")
    for name, stats in check["splits"].items():
        lines = ((source["path"], unused_keys(source["unused_keys"])) for source in stats["sources"])
        said += [f"{place(path)}, {name}: {line}." for path, line in lines if line]
        records = max(1, stats["records"])
        if stats["overlong"]:
            said.append(
                f"{counted(stats['overlong'], 'row')} of {name} ({stats['overlong'] / records:.1%}) left out: longer "
                f"than {number(settings['max_length'])} tokens. A larger data.max_length would keep them."
            )
        if stats["truncated"]:
            said.append(
                f"{counted(stats['truncated'], 'row')} of {name} truncated at {number(settings['max_length'])} tokens."
            )
        if stats["split"]:
            said.append(f"{counted(stats['split'], 'text')} of {name} split into {number(stats['pieces'])} rows.")
        if stats["no_label"]:
            said.append(f"{counted(stats['no_label'], 'row')} of {name} left out: nothing in them is trained.")
        if stats["unusable"]:
            said.append(f"{counted(stats['unusable'], 'pair')} of {name} left out: nothing tells its answers apart.")
        said += [f"In {name}: {change}." for change in stats["changes"]]
        if stats["duplicates"]:
            said.append(f"{counted(stats['duplicates'], 'repetition')} among the rows of {name}, word for word.")
        share = stats["trained_tokens"] / stats["tokens"] if stats["tokens"] else 0
        if stats["tokens"] and share < 0.05 and settings["task"] == "causal_lm":
            said.append(f"Only {share:.1%} of the tokens of {name} are trained; the rest is only read.")
    held_out = check["splits"].get("eval", {}).get("rows", 0)
    if (evaluated := check["eval_rows_evaluated"]) < held_out:
        said.append(
            f"{counted(evaluated, 'row')} of the {number(held_out)} of eval evaluated: as many of each source as make "
            "the mix that their weights make in training."
        )
    if leaked := check["eval_rows_also_in_train"]:
        said.append(
            f"{counted(leaked, 'row')} of the evaluation also in the training data: the model looks better than it is."
        )
    if empty := sum(found["empty_answers"] for found in surveys):
        said.append(f"{counted(empty, 'record')} in which an answer or a question is empty or missing.")
    if unusable := sum(count for found in surveys for _, count in found["unusable"]):
        said.append(f"{counted(unusable, 'image')} among those looked at cannot be used.")
    return said


def _named(found: Mapping[str, Any]) -> dict[str, Any]:
    languages = {
        role: [(LANGUAGES.get(code, code), count / max(1, sum(n for _, n in counts))) for code, count in counts]
        for role, counts in found["languages"].items()
        if counts
    }
    sizes = found["image_sizes"]
    sides = _bars(sizes["longer_sides"]) if sizes else []
    return {**found, "languages": languages, "turn_bars": _bars(found["turn_bars"]), "longer_sides": sides}
