"""The page for a new run: a form, the plan of what is typed, and the run file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kubetune.base.humanize import place
from kubetune.config.resolved import as_yaml, dotted_values, read_config
from kubetune.config.schema import Config
from kubetune.errors import KubetuneError
from kubetune.library.plan_forecast import PlanForecast, forecast_run
from kubetune.reporting.look.line_breaks import unbroken
from kubetune.ui.form.fixes import field_of
from kubetune.ui.form.form_fields import LABELS, form
from kubetune.ui.form.plan_card import plan_card
from kubetune.ui.form.suited import free_name, suited_texts
from kubetune.ui.form.typed_config import (
    command_of,
    config_of,
    for_form,
    lines_of,
    typed_values,
    with_fixes,
)
from kubetune.ui.site import Site, act, page, run_of, site_of

_MOST_EARLIER = 4  # runs that a new one may begin as


def new_run(request: Request) -> Response:
    """Show the form, empty or with the settings of a run that is to be repeated."""
    site = site_of(request)
    values = suited_texts(None, {})
    base = ""
    if "dir" in request.query_params:
        run_dir = run_of(request)
        base = site.records.name_of(run_dir)
        values = texts_of(site, read_config(run_dir))

    values.setdefault("task", "causal_lm")
    # Settings without a field, such as the settings of a list of sources, are kept as they are.
    first, groups = form()
    in_form = {field.key for field in first}
    for group in groups:
        in_form.update(field.key for field in group.fields)
    others = {key: text for key, text in values.items() if key not in in_form}
    facts = {
        "title": "New run",
        "first": first,
        "groups": groups,
        "values": values,
        "extra": json.dumps(others),
        "base": base,
        "earlier": [] if base else _earlier(site),
    }
    return page(request, "new.html", "kubetune init -o run.yaml", facts)


def _earlier(site: Site) -> list[dict[str, Any]]:
    """Return a few runs that one may begin another as, the newest first. Trials are many and seldom meant."""
    runs = []
    for run in site.records.listed():
        if run["state"] != "damaged" and site.records.sweep_of(Path(run["path"])) is None:
            runs.append(run)
    runs.sort(key=lambda run: run["started"] or "", reverse=True)
    return runs[:_MOST_EARLIER]


def texts_of(site: Site, config: Config) -> dict[str, str]:
    """Return what one would type for this config, with a name that no run has."""
    # Two runs must not write to the same directory.
    settings = config.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    settings.pop("output", None)
    texts = {}
    for key, value in dotted_values(settings):
        texts[key] = _text(value)
    # A section with only defaults has no settings to be typed, so it is named.
    if config.lora is not None:
        texts["lora"] = "true"

    texts["name"] = free_name(site.folder, config.name or "run")
    return texts


def _text(value: Any) -> str:
    """Return a value as one types it. A source without settings is typed as its path."""
    if _is_list_of_paths(value):
        paths = [source["path"] for source in value]
        value = paths if len(paths) > 1 else paths[0]
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _is_list_of_paths(value: Any) -> bool:
    """True for sources that have no settings."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and item.keys() == {"path"} for item in value)


async def plan(request: Request) -> Response:
    """Answer with the run file and the plan of what is typed, or with what is wrong with it."""
    return await act(request, _planned)


def _planned(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run file and the plan of what is typed, as far as they can be made, and all that is wrong with it."""
    typed = typed_values(body)
    needed: list[str] = []
    problems: list[str] = []
    try:
        config: Config | None = config_of(site, body)
    except KubetuneError as error:
        needed, problems = _needed_and_wrong(error)
        config = _config_without(site, body, problems)
    planned: dict[str, Any] = {
        "needed": needed,
        "bad": [],
        "yaml": "",
        "summary": "",
        "facts": [],
        "command": "",
    }
    if config is None:
        return {**planned, **with_fixes(problems, [], typed)}

    is_whole = not problems
    output = Path(str(config.output))
    elsewhere = config
    fixes = []
    if is_whole and output.exists():
        fix = _another_name(site, config.name or "run")
        fixes.append(fix)
        problems.append(fix["of"])
        # Under another name nothing is wrong with how this run differs from the one that is there.
        output = output.parent / (fix["values"]["name"] or "run")
        elsewhere = config.model_copy(update={"output": str(output)})
    warnings: list[str] = []
    try:
        forecast = forecast_run(elsewhere, os.environ)
        shown = _forecast(forecast)
        problems += shown.pop("problems")
        warnings = shown.pop("warnings")
        # A plan without what is wrong would be another run's.
        planned |= shown if is_whole else {}
    except KubetuneError as error:
        problems += lines_of(error)
    planned["on_cluster"] = bool(config.kubernetes)
    if not problems:
        planned["yaml"] = as_yaml(config)
        planned["command"] = command_of(site, config.name, "train")
    else:
        planned["summary"] = ""
    return {**planned, **with_fixes(problems, warnings, typed, fixes)}


def _needed_and_wrong(error: KubetuneError) -> tuple[list[str], list[str]]:
    """Return the labels of fields that are not filled in yet, which is no mistake, and the problems of the others."""
    needed = []
    problems = []
    for line in lines_of(error):
        # A key without a field is missing in what somebody wrote.
        key = _missing_key(line)
        if key in LABELS:
            needed.append(LABELS[key])
        else:
            problems.append(line)
    return needed, problems


def _another_name(site: Site, taken: str) -> dict[str, Any]:
    """Return the button that gives a run another name, since its own is taken."""
    name = free_name(site.folder, taken)
    problem = f"A run is called {taken} already."
    return {"of": problem, "label": f"Call it {name}", "values": {"name": name}}


def _config_without(site: Site, body: Mapping[str, Any], problems: list[str]) -> Config | None:
    """Return the config of what is typed but for the fields that are wrong, so that the others are looked at too.

    None if that is no config either.
    """
    wrong = {field_of(problem, body["values"]) for problem in problems}
    values = {key: text for key, text in body["values"].items() if key not in wrong}
    try:
        return config_of(site, {**body, "values": values})
    except KubetuneError:
        return None


def _forecast(forecast: PlanForecast) -> dict[str, Any]:
    """Return what the page shows of a forecast: facts, problems and warnings, and a summary."""
    facts = []
    texts: dict[str, list[str]] = {
        "error": [for_form(problem) for problem in forecast.problems],
        "warning": [],
    }
    for label, text in forecast.describe():
        # warning: 3 of 20 rows of train repeat another
        severity, _, sentence = text.partition(": ")
        if severity in texts:
            texts[severity].append(sentence)
        elif label == "positions":
            texts["warning"].append(text)
        else:
            facts.append((label, place(text)))

    bad: Sequence[str] = ()
    if forecast.lengths is not None:
        # If all rows were looked at, they are among the problems.
        bad = [line for line in forecast.lengths.bad if line.rstrip(".") not in texts["error"]]
    return {
        "summary": "" if forecast.problems else unbroken(forecast.headline()),
        "card": plan_card(forecast),
        "facts": facts,
        "problems": texts["error"],
        "warnings": texts["warning"],
        "bad": list(bad),
    }


def _missing_key(line: str) -> str:
    """Return the form's key that a line of problems says is missing, "" for other problems."""
    match = re.match("([a-z_.]+): missing;", line)
    if match is None:
        return ""
    return "model.path" if match[1] == "model" else match[1]
