"""Templates of the pages, and what every page has: style sheet, scripts, filters."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kubetune.base.humanize import ago, counted, duration, number, place, share, size
from kubetune.reporting.look.differing_words import compared_with
from kubetune.reporting.look.line_breaks import code_lines, spans, unbroken, whole_words
from kubetune.reporting.look.metric_values import interval, label_of, measured
from kubetune.reporting.look.style import favicon, style, text_of
from kubetune.rundir.intervals import p_in_words
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


# Functions that templates call by their names.
FILTERS = (
    ago,
    code_lines,
    compared_with,
    counted,
    duration,
    favicon,
    interval,
    label_of,
    measured,
    mfu_sentence,
    number,
    p_in_words,
    percent,
    place,
    share,
    size,
    spans,
    turns,
    unbroken,
    whole_words,
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
    return (
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
