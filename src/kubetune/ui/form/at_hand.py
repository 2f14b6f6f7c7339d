"""Models and data files of this machine, for the lists of the form."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kubetune.base.humanize import size
from kubetune.config.data_files import is_read
from kubetune.config.naming import RESOLVED, model_label
from kubetune.config.resolved import read_config
from kubetune.errors import KubetuneError
from kubetune.library.listing import find_runs
from kubetune.library.sweep.sweep_record import SWEEP
from kubetune.plan.model_shapes import hub_folder
from kubetune.ui.site import Site, answer, site_of

# How many folders deep, and for how many seconds, files below the server's folder are looked for.
_DEPTH = 3
_SECONDS = 0.5
# So many are sent. The page shows fewer of them, and looks for words in all.
_MOST_SENT = 2000

# Folders that hold a project's tools, not its data.
_SKIPPED = ("node_modules", "site-packages", "__pycache__", "venv")
# JSON files next to these are settings of a model or a program, not records.
_SETTINGS = ("config.json", "package.json")
# Words in the names of files that are held out: nobody trains on them.
_HELD_OUT = {"dev", "eval", "evaluation", "held", "heldout", "test", "val", "valid", "validation"}


@dataclass
class _TimeLimit:
    """A limit of the time that a search for files may take."""

    until: float  # of the monotonic clock, in seconds
    ran_out: bool = False  # if so, there may be more than was found

    @classmethod
    def start(cls) -> _TimeLimit:
        return cls(time.monotonic() + _SECONDS)

    def has_time(self) -> bool:
        """True until the time is over."""
        self.ran_out = self.ran_out or time.monotonic() > self.until
        return not self.ran_out


def at_hand(request: Request) -> Response:
    """Answer with the models and data files of this machine: what to fill in, and what to show for it."""
    site = site_of(request)
    of_runs = _TimeLimit.start()
    bases, trained, trained_on = _of_runs(site, of_runs)
    in_folder = _TimeLimit.start()
    models, files = _in_folder(Path.cwd(), in_folder, trained_on)
    choices = {**trained, **_in_cache(), **models}
    of_bases = _once_each(bases, choices)
    choices = {**of_bases, **choices, **of_bases}
    return answer(
        {
            "models": _listed(choices, in_folder.ran_out or of_runs.ran_out),
            "data": _listed(files, in_folder.ran_out),
        }
    )


def _listed(choices: Mapping[str, str], ran_out: bool) -> dict[str, Any]:
    """Return choices for a list of the page. It says how many were left out, and whether there may be more."""
    sent = list(choices.items())[:_MOST_SENT]
    return {
        "choices": sent,
        "left_out": len(choices) - len(sent),
        "ran_out": ran_out,
    }


def _of_runs(
    site: Site, limit: _TimeLimit
) -> tuple[dict[str, list[str]], dict[str, str], set[str]]:
    """Return what the runs of the folder began with, by its path with their names, what they made, and their data."""
    bases: dict[str, list[str]] = {}
    made = {}
    trained_on: set[str] = set()
    for run_dir in find_runs(site.folder):
        if not limit.has_time():
            break
        try:
            begun = read_config(run_dir)
        except KubetuneError:
            continue
        trained_on.update(os.path.abspath(source.path) for source in begun.data.train)
        name = site.records.name_of(run_dir)
        bases.setdefault(begun.model.path, []).append(name)
        # A checkpoint of adapters has no config.json: it is no model to start from.
        best = run_dir / "checkpoints" / "best"
        config = best / "config.json"
        if config.is_file():
            made[str(best)] = f"{name} (as trained)"
    return bases, made, trained_on


def _once_each(bases: Mapping[str, list[str]], others: Collection[str]) -> dict[str, str]:
    """Return the models that runs began with. Of its copies a model has one, if possible among the others at hand."""
    copies = {_copy(path): path for path in others}
    runs: dict[str, list[str]] = {}
    for path, names in bases.items():
        first = copies.setdefault(_copy(path), path)
        runs.setdefault(first, []).extend(names)
    listed = {}
    for path, names in runs.items():
        of_what = names[0] if len(names) == 1 else f"{len(names)} runs"
        listed[path] = f"{model_label(path)} (base of {of_what})"
    return listed


def _copy(path: str) -> tuple[str, int]:
    """Return what the copies of a model have in common: its name, and how long its weights are."""
    weights = [file for file in Path(path).glob("*.safetensors") if file.is_file()]
    return model_label(path), sum(file.stat().st_size for file in weights)


def _in_cache() -> dict[str, str]:
    """Return the models of the hub's cache that have weights."""
    models = {}
    cache = hub_folder("any", os.environ).parent
    for folder in sorted(cache.glob("models--*")):
        if any(folder.glob("snapshots/*/*.safetensors")):
            name = model_label(str(folder))
            models[name] = f"{name} (downloaded)"
    return models


def _in_folder(
    top: Path, limit: _TimeLimit, trained_on: Collection[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the models and the data files below a folder, by their paths.

    Files that runs were trained on come first, those that are held out by their names last, and else the newest first.
    """
    models = {}
    facts: dict[Path, os.stat_result] = {}
    for folder, names in _walk(top, limit):
        shown = os.path.relpath(folder, top)
        has_weights = any(name.endswith(".safetensors") for name in names)
        if has_weights and "config.json" in names:
            models[shown] = f"{model_label(shown)} (folder)"
        if any(name in names for name in _SETTINGS):
            continue
        for name in names:
            if is_read(name):
                path = folder / name
                facts[path] = path.stat()

    def place(path: Path) -> tuple[bool, bool, float]:
        words = re.split(r"[^a-z]+", path.stem.lower())
        is_held_out = not _HELD_OUT.isdisjoint(words)
        return is_held_out, str(path) not in trained_on, -facts[path].st_mtime

    listed = {}
    for path in sorted(facts, key=place):
        shown = os.path.relpath(path, top)
        listed[shown] = f"{shown} ({size(facts[path].st_size)})"
    return models, listed


def _walk(top: Path, limit: _TimeLimit) -> Iterator[tuple[Path, list[str]]]:
    """Yield folders below a folder with the names of their plain files: none of runs or sweeps, no hidden ones."""
    for place, folders, names in os.walk(top):
        # A home directory may hold a million files.
        if not limit.has_time():
            return
        folder = Path(place)
        is_result = RESOLVED in names or SWEEP in names
        depth = len(folder.relative_to(top).parts)
        # `os.walk` goes into the folders that are left in its list.
        deeper = []
        if not is_result and depth < _DEPTH:
            for name in sorted(folders):
                if not name.startswith(".") and name not in _SKIPPED:
                    deeper.append(name)
        folders[:] = deeper
        if not is_result:
            plain = [name for name in sorted(names) if (folder / name).is_file()]
            yield folder, plain
