"""What a new run can be made of: models and data files of this machine, and a look at the rows of a file.

A look proposes what the form should hold; its buttons fill that in.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kubetune.base.files import known
from kubetune.base.humanize import size
from kubetune.config.data_files import is_read
from kubetune.config.load import read_config
from kubetune.config.naming import RESOLVED, model_label
from kubetune.config.schema import SourceConfig
from kubetune.data.inspect.proposal import Proposal, propose
from kubetune.data.reading.problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.errors import KubetuneError
from kubetune.library.listing import find_runs
from kubetune.plan.model_shapes import hub_folder
from kubetune.ui.fields import TASKS
from kubetune.ui.site import Site, act, answer, site_of

# How many folders deep, and for how many seconds, files below the server's folder are looked for.
_DEPTH = 3
_SECONDS = 0.5
_MOST_SHOWN = 100
_MOST_RUNS = 50  # whose models are proposed again

# A look at data: rows, columns, and characters of a value.
_ROWS = 3
_MOST_COLUMNS = 8
_MOST_CHARACTERS = 200

# Folders that hold a project's tools, not its data.
_SKIPPED = ("node_modules", "site-packages", "__pycache__", "venv")
# JSON files beside these are settings of a model or a program, not records.
_SETTINGS = ("config.json", "package.json")
# What else data are for, by the task that is proposed for them.
_ALSO_FOR = {"preference": ("reward_model",), "causal_lm": ("grpo",)}


def at_hand(request: Request) -> Response:
    """Answer with the models and data files of this machine: what to fill in, and what to show for it."""
    site = site_of(request)
    models, files = _in_folder(Path.cwd())
    choices = {**_of_runs(site), **_in_cache(), **models}
    return answer({"models": _pairs(choices), "data": _pairs(files)})


def _pairs(choices: Mapping[str, str]) -> list[tuple[str, str]]:
    return list(choices.items())[:_MOST_SHOWN]


def _of_runs(site: Site) -> dict[str, str]:
    """Return the models that runs of the folder began with, and those that they made."""
    models = {}
    for run_dir in islice(find_runs(site.folder), _MOST_RUNS):
        try:
            path = read_config(run_dir).model.path
        except KubetuneError:
            continue
        models[path] = f"{model_label(path)} (as in {site.records.name_of(run_dir)})"
        # A checkpoint of adapters has no config.json: it is no model to start from.
        best = run_dir / "checkpoints" / "best"
        if (best / "config.json").is_file():
            models[str(best)] = f"{site.records.name_of(run_dir)}, as trained"
    return models


def _in_cache() -> dict[str, str]:
    """Return the models of the hub's cache that have weights."""
    models = {}
    cache = hub_folder("any", os.environ).parent
    for folder in sorted(cache.glob("models--*")):
        if any(folder.glob("snapshots/*/*.safetensors")):
            name = model_label(str(folder))
            models[name] = f"{name} (downloaded)"
    return models


def _in_folder(top: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the models and the data files below a folder, by their paths; the newest files come first."""
    models = {}
    files = []
    for place, names in _walk(top):
        shown = os.path.relpath(place, top)
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            models[shown] = f"{model_label(shown)} (folder)"
        if any(name in names for name in _SETTINGS):
            continue
        for name in names:
            if is_read(name):
                path = Path(place, name)
                facts = path.stat()
                files.append((facts.st_mtime, os.path.relpath(path, top), facts.st_size))
    files.sort(reverse=True)
    return models, {path: f"{path} ({size(count)})" for _, path, count in files}


def _walk(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield folders below a folder with the names of their plain files: not those of runs, not hidden ones."""
    until = time.monotonic() + _SECONDS
    for place, folders, names in os.walk(top):
        # A home directory may hold a million files.
        if time.monotonic() > until:
            return
        depth = len(Path(place).relative_to(top).parts)
        if RESOLVED in names or depth >= _DEPTH:
            folders.clear()
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in _SKIPPED
        )
        if RESOLVED not in names:
            yield place, [name for name in sorted(names) if Path(place, name).is_file()]


async def look(request: Request) -> Response:
    """Answer with the first rows of the data that are typed, and what they seem to be for."""
    return await act(request, _looked)


def _looked(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return rows, columns, and buttons for what the data seem to need."""
    values = body.get("values")
    seen: dict[str, Any] = {"columns": [], "rows": [], "about": "", "fixes": []}
    if not isinstance(values, dict):
        return seen
    path = values.get("data.train")
    # Data of the hub would have to be fetched, and lists of sources have settings of their own.
    if not isinstance(path, str) or not os.path.exists(_file_of(path)):
        return seen
    source = SourceConfig(path=path)
    problems = Problems()
    try:
        records = list(islice(read_source(source, problems), _ROWS))
        proposal = propose(source)
        # Somebody may want another task that such data are for too.
        if values.get("task") in _ALSO_FOR.get(proposal.task.value, ()):
            proposal = propose(source, values["task"])
    except (KubetuneError, OSError) as error:
        refused = known(error)
        if refused is None:
            raise
        return {**seen, "problems": [str(refused).splitlines()[0]]}

    columns: dict[str, None] = {}
    for record in records:
        columns |= dict.fromkeys(record.value)
    shown = list(columns)[:_MOST_COLUMNS]
    rows = [[_short(record.value.get(column)) for column in shown] for record in records]
    about = f"{TASKS[proposal.task.value]}: {proposal.task.reason}"
    if proposal.rows is not None:
        about = f"{proposal.rows:,} rows. {about}"
    fixes = fixes_for(proposal, values)
    return {**seen, "columns": shown, "rows": rows, "about": about, "fixes": fixes}


def _file_of(path: str) -> str:
    """Return the file of a source: `train.jsonl#64` means the first 64 records of `train.jsonl`."""
    return os.path.expanduser(re.sub(r"#\d+$", "", path))


def _short(value: Any) -> str:
    """Return a value of a record as a cell."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > _MOST_CHARACTERS:
        return text[:_MOST_CHARACTERS] + " …"
    return text


def fixes_for(proposal: Proposal, values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return buttons that make the form fit the data: a label, and the values that it fills in."""
    fixes = []
    task = proposal.task.value
    wanted = {}
    if (values.get("task") or "causal_lm") != task:
        wanted["task"] = task
    if proposal.loss is not None and values.get("preference.loss") != proposal.loss.value:
        wanted["preference.loss"] = proposal.loss.value
    if wanted:
        fixes.append({"label": f"Set task to {TASKS[task]}", "values": wanted})

    # Columns that are mapped already need no button.
    columns = {}
    for expected, choice in proposal.columns.items():
        key = f"data.train.columns.{expected}"
        if values.get(key) != choice.value:
            columns[key] = str(choice.value)
    if columns:
        pairs = [f"{key.rpartition('.')[2]} = {name}" for key, name in columns.items()]
        fixes.append({"label": f"Map columns: {', '.join(pairs)}", "values": columns})
    if proposal.format is not None and values.get("data.train.format") != proposal.format.value:
        shape = proposal.format.value
        fixes.append({"label": f"Read rows as {shape}", "values": {"data.train.format": shape}})
    return fixes
