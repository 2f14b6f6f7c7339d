"""Templates of the pages, and what every page has: style sheet, scripts, filters."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kubetune.base.humanize import ago, counted, duration, number, place, share, size
from kubetune.reporting.look.metric_values import interval, label_of, measured
from kubetune.reporting.look.style import favicon, style, text_of
from kubetune.rundir.machine import versions
from kubetune.rundir.metrics import now
from kubetune.rundir.throughput import mfu_sentence


def percent(part: float) -> int:
    """Return a part as whole per cent, 0 to 100, as the classes `part-0` to `part-100` have it.

    A part above 0 is at least 1 %, so that its bar can be seen.
    """
    least = 1 if part > 0 else 0
    return max(least, min(100, round(100 * part)))


# The names of speakers in chat templates, and the model's among them.
_ROLES = ("system", "developer", "user", "assistant", "model", "tool")
_MODELS = ("assistant", "model")


def turns(prompt: str) -> list[dict[str, str]]:
    """Return the turns of a prompt that was decoded without special tokens, in which names of roles are left over.

        user⏎How are you?⏎assistant⏎   →   [{"role": "user", "content": "How are you?"}]

    Return [] for other prompts.
    """
    # The last line asks the model to speak.
    first, *others = prompt.strip().split("\n")
    if first not in _ROLES or not others or others[-1] not in _MODELS:
        return []
    spoken: list[tuple[str, list[str]]] = [(first, [])]
    for line in others[:-1]:
        if line in _ROLES:
            spoken.append((line, []))
        else:
            spoken[-1][1].append(line)
    return [{"role": role, "content": "\n".join(lines).strip()} for role, lines in spoken]


# Tables that a narrow window shows as pairs of a name and a value.
_TABLES = re.compile(r'<table class="(?:numbers|bad)\b.*?</table>', re.DOTALL)
_HEADS = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
_ROWS = re.compile(r"(?<=<tr)(?=[ >]).*?</tr>", re.DOTALL)
_CELLS = re.compile(r"<(t[hd])(?=[ >])")
_NUMBER = re.compile(r"<th[^>]*>\s*\d")
_TAGS = re.compile(r"<[^>]*>")


def labelled(page: str) -> str:
    """Return a page in which each cell of a table carries the heading of its column, which a narrow window shows.

    <tr><th>150</th><td>92 %</td></tr>   →   <tr><th>150</th><td data-label="exact match">92 %</td></tr>
    """
    return _TABLES.sub(_label_cells, page)


def _label_cells(table: re.Match[str]) -> str:
    head, end, body = table[0].partition("</thead>")
    labels = [" ".join(_TAGS.sub(" ", text).split()) for text in _HEADS.findall(head)]

    def label_row(row: re.Match[str]) -> str:
        of_columns = iter(labels)

        def label_cell(cell: re.Match[str]) -> str:
            label = next(of_columns, "")
            # A line is called by its head; a number alone would not say of what.
            is_named = cell[1] == "th" and not _NUMBER.search(row[0])
            if is_named or not label:
                return cell[0]
            # Quotes can only come from a name, which templates have escaped.
            return f'{cell[0]} data-label="{label}"'

        return _CELLS.sub(label_cell, row[0])

    return head + end + _ROWS.sub(label_row, body)


# Functions that templates call by their names.
FILTERS = (
    ago,
    counted,
    duration,
    favicon,
    interval,
    label_of,
    measured,
    mfu_sentence,
    number,
    percent,
    place,
    share,
    size,
    turns,
)


@lru_cache(maxsize=1)
def environment(*first: BaseLoader) -> Environment:
    """Return the templates of this package. Templates of the loaders in `first` are looked up before them."""
    made = Environment(
        loader=ChoiceLoader([*first, PackageLoader("kubetune.reporting", "templates")]),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt name is an error, not an empty place
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,  # a server that runs while kubetune is upgraded keeps its own templates
    )
    # Templates call them by the names that they have here.
    for function in FILTERS:
        made.filters[function.__name__] = function
    return made


def render(template: str, **facts: Any) -> str:
    """Return a page from a template of this package. Its style and scripts are inside it."""
    return labelled(
        environment()
        .get_template(template)
        .render(
            style=Markup(style()),
            chart_style=Markup(text_of("vendor/uPlot.min.css")),
            chart_library=Markup(text_of("vendor/uPlot.iife.min.js")),
            chart_script=Markup(text_of("templates/charts.js")),
            table_script=Markup(text_of("templates/tables.js")),
            sweep_script=Markup(text_of("templates/sweep.js")),
            made=f"{now()[:16].replace('T', ' ')} UTC",
            version=versions()["kubetune"],
            **facts,
        )
    )
