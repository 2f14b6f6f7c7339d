"""The page for a new run: a form, the plan of what is typed, the run file, and its start here or on a cluster."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from kubetune.base.files import known, write_atomic
from kubetune.config import consent
from kubetune.config.load import as_yaml, dotted_values, load_config, read_config
from kubetune.config.schema import Config
from kubetune.errors import ConfigError, KubetuneError
from kubetune.library.plan_forecast import forecast_run
from kubetune.ui.fields import LABELS, form
from kubetune.ui.site import Site, answer, body_of, page, run_of, site_of

Values = Mapping[str, str]


def new_run(request: Request) -> Response:
    """The form, empty or with the settings of a run that is to be run again."""
    site, values, base = site_of(request), dict[str, str](), ""
    if "dir" in request.query_params:
        run_dir = run_of(request)
        base = site.records.name_of(run_dir)
        values = _typed(site, read_config(run_dir))
    first, groups = form()
    shown = {
        field.key for field in (*first, *(field for group in groups for field in group.fields))
    }
    facts = {
        "title": "New run",
        "first": first,
        "groups": groups,
        "values": values,
        "extra": json.dumps({key: text for key, text in values.items() if key not in shown}),
        "base": base,
    }
    return page(request, "new.html", "kubetune init -o run.yaml", facts)


def _typed(site: Site, config: Config) -> dict[str, str]:
    """Texts that one would type for this config, under a name that is free."""
    given = config.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    given.pop("output", None)
    found = {key: _text(value) for key, value in dotted_values(given)}
    if config.lora is not None:
        found["lora"] = "true"
    stem = (config.name or "run")[:36].rstrip("-")
    names = (f"{stem}-{number}" for number in range(2, 1000))
    found["name"] = next((name for name in names if not (site.folder / name).exists()), "")
    return found


def _text(value: Any) -> str:
    """A value as one types it; sources that are but a path by that."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(one, dict) and one.keys() == {"path"} for one in value)
    ):
        value = [one["path"] for one in value] if len(value) > 1 else value[0]["path"]
    return value if isinstance(value, str) else json.dumps(value)


async def plan(request: Request) -> Response:
    """The run file and the plan of what is typed, or what is wrong with it."""
    asked = await body_of(request)
    return await to_thread.run_sync(lambda: answer(_planned(site_of(request), asked)))


def _planned(site: Site, asked: Mapping[str, Any]) -> dict[str, Any]:
    nothing = {"problems": [], "needed": [], "bad": [], "yaml": "", "facts": [], "command": ""}
    try:
        config = _config(site, asked)
    except KubetuneError as error:
        found = _listed(error)
        # What nobody has come to yet is no mistake.
        needed = [LABELS.get(key, key) for line in found if (key := _missing(line))]
        return {
            **nothing,
            "problems": [line for line in found if not _missing(line)],
            "needed": needed,
        }
    command, on_cluster = _command(site, config, "train"), bool(config.kubernetes)
    shown = {**nothing, "yaml": as_yaml(config), "command": command, "on_cluster": on_cluster}
    try:
        # Target modules in doubt need the model built, with torch: the run looks at them before it begins.
        ahead = forecast_run(config, os.environ, builds=False)
    except KubetuneError as error:
        return {**shown, "problems": _listed(error)}
    bad = list(ahead.lengths.bad) if ahead.lengths is not None else []
    return {**shown, "facts": list(ahead.describe()), "bad": bad}


def _missing(line: str) -> str:
    """The key that a line of problems misses, as the form has it; nothing for other problems."""
    found = re.match("([a-z_.]+): missing;", line)
    return "" if found is None else "model.path" if found[1] == "model" else found[1]


def _listed(error: KubetuneError) -> list[str]:
    """Its lines, without where a terminal's words would stand: here they were typed into the form."""
    lines = (re.sub("^(override|command line): ", "", line) for line in str(error).splitlines())
    return [line for line in lines if line.strip()]


def _config(site: Site, asked: Mapping[str, Any]) -> Config:
    """The config of what is typed. Raises ConfigError, also for settings that have code run."""
    typed, base = asked.get("values"), asked.get("base") or ""
    if not isinstance(typed, dict) or not all(isinstance(text, str) for text in typed.values()):
        raise ConfigError("values: expected texts by key")
    typed = {key: text for key, text in typed.items() if text.strip()}
    of_lora = [key for key in typed if key.startswith("lora.")]
    if of_lora and not typed.pop("lora", ""):
        raise ConfigError(
            f"{', '.join(of_lora)}: for LoRA only, and the method is full fine-tuning; empty them or change it"
        )
    config = load_config(None, overrides=[f"{key}={text}" for key, text in typed.items()])
    run_dir = site.records.find(str(base)) if base else None
    _require_no_code(config, read_config(run_dir) if run_dir is not None else None)
    if config.output is None:
        config = config.model_copy(
            update={"output": str((site.folder / (config.name or "run")).absolute())}
        )
    return config


def _require_no_code(config: Config, base: Config | None) -> None:
    """Raise ConfigError for settings that have code run.

    Unless the run that is repeated has the same, and the user has allowed that code on this machine.
    """
    typed = set(consent.CODE) if base is None else set(consent.changed(config, base))
    for code in consent.code_of(config):
        if code.key in typed or not consent.is_allowed(code):
            raise ConfigError(
                f"{code.key} has code run ({code.what}): write it into a run file, and start that in a terminal"
            )


def _command(site: Site, config: Config, verb: str) -> str:
    return shlex.join(["kubetune", verb, str(_file(site, config))])


def _file(site: Site, config: Config) -> Path:
    return site.folder / f"{config.name or 'run'}.yaml"


async def start(request: Request) -> Response:
    """Write the run file and begin the run: here, or on the cluster by `kubetune submit`."""
    asked = await body_of(request)
    return await to_thread.run_sync(lambda: answer(_started(site_of(request), asked)))


def _started(site: Site, asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        config = _config(site, asked)
        if (name := config.name) is None:
            raise ConfigError(
                "name: left out; a run that is begun here needs one, such as support-bot"
            )
        verb, file = "submit" if asked.get("on") == "cluster" else "train", _file(site, config)
        forecast_run(config, os.environ, builds=False)
        site.folder.mkdir(parents=True, exist_ok=True)
        if verb == "train":
            config = config.model_copy(update={"kubernetes": None}) if config.kubernetes else config
            if (place := Path(str(config.output))).exists():
                raise ConfigError(f"{place} is there already; choose another name")
        if is_new := not file.exists() or site.jobs.has_failed_with(name, file):
            write_atomic(file, as_yaml(config))
        elif file.read_text("utf-8") != as_yaml(config):
            raise ConfigError(f"{file} is there already, with other settings; choose another name")
        try:
            site.jobs.start(name, [verb, str(file)])
        except (KubetuneError, OSError):
            if is_new:
                file.unlink()  # of a run that was never begun
            raise
    except (KubetuneError, OSError) as error:
        if (refused := known(error)) is None:
            raise
        return {"problems": _listed(refused)}
    return {"problems": [], "job": name, "command": _command(site, config, verb)}
