"""The page for a new run: a form, the plan of what is typed, the run file, and the start of the run."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kubetune.base.faults import known
from kubetune.base.files import write_atomic
from kubetune.base.humanize import place
from kubetune.config import consent
from kubetune.config.load import load_config
from kubetune.config.resolved import as_yaml, dotted_values, read_config
from kubetune.config.schema import Config
from kubetune.errors import ConfigError, KubetuneError
from kubetune.k8s.manifests import local_files, sent_from_outside
from kubetune.library.plan_forecast import PlanForecast, forecast_run
from kubetune.reporting.look.line_breaks import unbroken
from kubetune.rundir.exit_status import read_exit_status
from kubetune.ui.form.field_sentences import field_sentence
from kubetune.ui.form.fixes import field_of, for_failure, for_problems
from kubetune.ui.form.form_fields import LABELS, form
from kubetune.ui.form.plan_card import plan_card
from kubetune.ui.form.suited import free_name, suited_texts
from kubetune.ui.site import Site, act, find_run, page, run_of, site_of

_MOST_EARLIER = 4  # runs that a new one may begin as

# Remedies for what the page refuses.
_IN_A_TERMINAL = "write it into a run file, and start that in a terminal"
_DEMO = "demo"  # folder next to the runs, as `kubetune demo` has it


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
    # Settings without a field, such as those of a list of sources, are kept as they are.
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
    typed = _typed(body)
    planned: dict[str, Any] = {
        "needed": [],
        "bad": [],
        "yaml": "",
        "summary": "",
        "facts": [],
        "command": "",
    }
    problems = []
    try:
        config: Config | None = _config(site, body)
    except KubetuneError as error:
        for line in _lines_of(error):
            # A field that nobody has filled in yet is no mistake; another key is missing in what somebody wrote.
            key = _missing_key(line)
            if key in LABELS:
                planned["needed"].append(LABELS[key])
            else:
                problems.append(line)
        config = _config_without(site, body, problems)
    if config is None:
        return {**planned, **_with_fixes(problems, [], typed)}

    is_whole = not problems
    output = Path(str(config.output))
    elsewhere = config
    fixes = []
    if output.exists() and is_whole:
        problem = f"A run is called {config.name} already."
        name = free_name(site.folder, config.name or "run")
        problems.append(problem)
        fixes.append({"of": problem, "label": f"Call it {name}", "values": {"name": name}})
        # Under another name nothing is wrong with how this run differs from the one that is there.
        elsewhere = config.model_copy(update={"output": str(output.parent / (name or "run"))})
    warnings: list[str] = []
    try:
        forecast = forecast_run(elsewhere, os.environ)
        shown = _forecast(forecast)
        problems += shown.pop("problems")
        warnings = shown.pop("warnings")
        # A plan without what is wrong would be another run's.
        planned |= shown if is_whole else {}
    except KubetuneError as error:
        problems += _lines_of(error)
    planned["on_cluster"] = bool(config.kubernetes)
    if not problems:
        planned["yaml"] = as_yaml(config)
        planned["command"] = _command(site, config.name, "train")
    else:
        planned["summary"] = ""
    return {**planned, **_with_fixes(problems, warnings, typed, fixes)}


def _config_without(site: Site, body: Mapping[str, Any], problems: list[str]) -> Config | None:
    """Return the config of what is typed but for the fields that are wrong, so that the others are looked at too.

    None if that is no config either.
    """
    wrong = {field_of(problem, body["values"]) for problem in problems}
    values = {key: text for key, text in body["values"].items() if key not in wrong}
    try:
        return _config(site, {**body, "values": values})
    except KubetuneError:
        return None


def _with_fixes(
    problems: Sequence[str],
    warnings: Sequence[str],
    typed: Mapping[str, str],
    known: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return problems and warnings with the buttons that fix them, and the fields that they are about.

    `known`: fixes of problems whose words do not say them.
    """
    fixes = [*for_problems([*problems, *warnings], typed), *known]
    fields = {text: field_of(text, typed) for text in (*problems, *warnings)}
    # What is known to fix a problem is where it is seen to.
    for fix in fixes:
        fields[fix["of"]] = fields[fix["of"]] or next(iter(fix["values"]))
    return {
        "problems": list(problems),
        "warnings": list(warnings),
        "fixes": fixes,
        "fields": fields,
        "sentences": {text: field_sentence(text, key) for text, key in fields.items()},
    }


def _forecast(forecast: PlanForecast) -> dict[str, Any]:
    """Return what the page shows of a forecast: facts, problems and warnings, and a summary."""
    facts = []
    texts: dict[str, list[str]] = {
        "error": [_for_form(problem) for problem in forecast.problems],
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


def _lines_of(error: KubetuneError) -> list[str]:
    """Return the lines of an error, without the place: everything was typed into the form."""
    lines = []
    for line in str(error).splitlines():
        text = re.sub("^(override|command line): ", "", line)
        # The count of a list that is shown whole, and a reminder that nobody needs next to a form.
        if re.fullmatch(r"[\d,]+ problems\. Nothing was written\.", text):
            continue
        if text.strip():
            lines.append(_for_form(text))
    return lines


def _for_form(text: str) -> str:
    """Return a problem without what to write into a file, if a button does it."""
    return re.sub(r"; other names are given so: .*? proposes them", "", text)


def _config(site: Site, body: Mapping[str, Any]) -> Config:
    """Return the config of what is typed. Raise ConfigError, also for settings that run code."""
    typed = _typed(body)

    # The method is a field of its own. "true" stands for a section with defaults, which any of its keys makes too.
    of_lora = [key for key in typed if key.startswith("lora.")]
    if of_lora and not typed.pop("lora", ""):
        raise ConfigError(
            f"{', '.join(of_lora)}: for LoRA only, and the method is full fine-tuning; empty them or change it"
        )

    # As on a command line, so that a field takes what an override takes.
    # A section comes before its settings: `data.train=FILE` after `data.train.columns.text=review` would undo it.
    overrides = [f"{key}={text}" for key, text in sorted(typed.items())]
    config = load_config(None, overrides=overrides)

    base = body.get("base")
    run_dir = None
    if base:
        run_dir = site.records.find(str(base))

    _require_allowed(config, run_dir)
    if config.output is None:
        output = (site.folder / (config.name or "run")).absolute()
        config = config.model_copy(update={"output": str(output)})
    return config


def _typed(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that are filled in. Raise ConfigError for anything else."""
    values = body.get("values")
    if not isinstance(values, dict) or not all(isinstance(text, str) for text in values.values()):
        raise ConfigError("values: expected texts by key")
    return {key: text for key, text in values.items() if text.strip()}


def _require_allowed(config: Config, run_dir: Path | None) -> None:
    """Raise ConfigError for code that was typed, and for what the repeated run brings that nobody has allowed here.

    `run_dir`: the run that is repeated. It may be somebody else's, though its settings are in the form.
    """
    typed: Sequence[str] = consent.EFFECTS
    if run_dir is not None:
        typed = consent.changed(config, read_config(run_dir))
    typed_code = [key for key in consent.CODE if key in typed]
    for code in consent.effects_of(config, typed_code):
        raise ConfigError(f"{code.key} has code run ({code.what}): {_IN_A_TERMINAL}")
    # Other values come from the repeated run.
    if run_dir is not None:
        brought = [key for key in consent.EFFECTS if key not in typed]
        consent.require(consent.effects_of(config, brought), run_dir, instead=_IN_A_TERMINAL)


def _command(site: Site, name: str | None, verb: str) -> str:
    """Return the command line that does with the run file what the page does."""
    return shlex.join(["kubetune", verb, str(_file(site, name))])


def _file(site: Site, name: str | None) -> Path:
    """Return the run file of a new run, which is next to the runs."""
    return site.folder / f"{name or 'run'}.yaml"


async def start(request: Request) -> Response:
    """Write the run file and start the run: here, or on the cluster with `kubetune submit`."""
    return await act(request, _started)


def _started(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    """Start the run. Return its job, or the problems."""
    verb = "submit" if body.get("on") == "cluster" else "train"
    try:
        config = _config(site, body)
        name = config.name
        if name is None:
            raise ConfigError(
                "name: left out; a run that is begun here needs one, such as support-bot"
            )
        # Files that the cluster would get from this machine.
        if verb == "submit":
            sent = sent_from_outside(local_files(config), Path.cwd())
            consent.require(sent, _file(site, name), instead=_IN_A_TERMINAL)
        # The command finds everything else that keeps the run from training, and the page shows its words.
        site.folder.mkdir(parents=True, exist_ok=True)
        if verb == "train":
            if config.kubernetes is not None:
                config = config.model_copy(update={"kubernetes": None})
            output = Path(str(config.output))
            if output.exists():
                raise ConfigError(f"{output} is there already; choose another name")

        _write_and_start(site, as_yaml(config), name, verb)
    except (KubetuneError, OSError) as error:
        refused = known(error)
        if refused is None:
            raise
        return _with_fixes(_lines_of(refused), [], _typed(body))

    return {
        "problems": [],
        "job": name,
        "command": _command(site, config.name, verb),
    }


def _write_and_start(
    site: Site,
    text: str,
    name: str,
    verb: str,
) -> None:
    """Write the run file, and start the job. Without a start, no new run file stays."""
    # A file that is left of a start that failed may be replaced; another one is somebody's work.
    file = _file(site, name)
    is_new = not file.exists() or site.jobs.has_failed_with(name, file)
    if is_new:
        write_atomic(file, text)
    elif file.read_text("utf-8") != text:
        raise ConfigError(f"{file} is there already, with other settings; choose another name")

    try:
        site.jobs.start(name, [verb, str(file)])
    except (KubetuneError, OSError):
        if is_new:
            file.unlink()
        raise


async def mend(request: Request) -> Response:
    """Start a run that failed again, under another name, with the values that mend it."""
    return await act(request, _mended)


def _mended(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    """Start a failed run with what mends it. Raise ConfigError if nothing is known to."""
    run_dir = find_run(site, str(body.get("dir", "")))
    ended = read_exit_status(run_dir)
    texts = texts_of(site, read_config(run_dir))
    fix = for_failure(ended.reason, texts) if ended is not None else None
    if fix is None:
        raise ConfigError("what would mend this run is not known; change it in the form")
    values = {**texts, **fix[1]}
    return _started(site, {"values": values, "base": site.records.name_of(run_dir)})


async def demo(request: Request) -> Response:
    """Start `kubetune demo`, which brings its own model and data."""
    return await act(request, _demo)


def _demo(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    """Start the demo next to the runs. Raise ConfigError if it is being run already."""
    folder = site.folder / _DEMO
    words = ["demo", "--output", str(folder)]
    # The job has the name of the demo's run, so that the page finds that.
    name = f"{_DEMO}/run"
    site.jobs.start(name, words)
    return {"job": name, "command": shlex.join(["kubetune", *words])}
