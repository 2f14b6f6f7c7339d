"""Commands for runs: show a command that was started here, stop a run, continue a run that stopped."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from kubetune.config import consent
from kubetune.config.load import load_config
from kubetune.errors import ConfigError
from kubetune.library.deleting import delete_run, require_deletable
from kubetune.rundir.labels import checked, read_labels, write_labels
from kubetune.rundir.starts import train_again
from kubetune.supervisor.place import holders
from kubetune.ui.jobs import result_job
from kubetune.ui.site import Site, act, answer, find_run, site_of

if TYPE_CHECKING:
    import psutil

_MOST_CHANGED = 1000  # runs, by one request

# One folder of a run's name: it does not begin with a dot, and is valid in a file name.
_PART = r"[^./\0\ud800-\udfff][^/\0\ud800-\udfff]*"


def job(request: Request) -> Response:
    """Answer with the state of a command that was started here, and with its run once there is one.

    `held` is true when the run's process has started.
    """
    site = site_of(request)
    # A name becomes part of a path, so it must not lead out of the folder.
    name = request.query_params.get("name", "")
    if not re.fullmatch(f"{_PART}(/{_PART})*", name):
        raise ConfigError(f"{name!r}: nothing of this name was begun here")

    run_dir = site.records.find(name)
    seen = site.jobs.look(name)
    seen["run"] = None
    seen["held"] = False
    if run_dir is not None:
        seen["run"] = site.records.name_of(run_dir)
        seen["held"] = bool(holders(run_dir))
    return answer(seen)


def launchers(site: Site, run_dir: Path) -> list[psutil.Process]:
    """Return the processes of this machine that train a run: its command, and those that hold it."""
    processes = {process.pid: process for process in holders(run_dir)}
    # The command holds nothing yet while it prepares data.
    started_here = site.jobs.process(site.records.name_of(run_dir))
    if started_here is not None:
        processes[started_here.pid] = started_here
    return list(processes.values())


async def stop(request: Request) -> Response:
    """Ask a run on this machine to save a checkpoint and end."""
    return await act(request, _stop)


def _stop(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    """Send SIGTERM to all processes of a run. Raise ConfigError if there are none."""
    run_dir = find_run(site, str(body.get("dir", "")))
    processes = launchers(site, run_dir)
    if not processes:
        raise ConfigError(
            f"{run_dir} does not run on this machine, or has ended; stop it where it was started"
        )
    for process in processes:
        # As Kubernetes does it: a rank saves at the end of its step, and ends.
        process.send_signal(signal.SIGTERM)
    return {}


def _runs_in(site: Site, body: Mapping[str, Any]) -> list[Path]:
    """Return the runs that a request names in `dirs`. Raise what `find_run` raises, ConfigError if it names none."""
    names = body.get("dirs")
    if not isinstance(names, list) or not names or len(names) > _MOST_CHANGED:
        raise ConfigError(f"dirs: expected a list of 1 to {_MOST_CHANGED} runs")
    return [find_run(site, str(name)) for name in dict.fromkeys(map(str, names))]


async def label(request: Request) -> Response:
    """Change the labels of runs: their name, note, tags, and whether they are archived."""
    return await act(request, _label)


def _label(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    """Write the labels that a request names; those that it leaves out stay as they are."""
    run_dirs = _runs_in(site, body)
    changes = {key: value for key, value in body.items() if key != "dirs"}
    # All are checked before any is written.
    labels = []
    for run_dir in run_dirs:
        before = asdict(read_labels(run_dir))
        labels.append(checked({**before, "tags": list(before["tags"]), **changes}))
    for run_dir, new in zip(run_dirs, labels, strict=True):
        write_labels(run_dir, new)
    return {}


async def delete(request: Request) -> Response:
    """Delete the directories of runs that have ended."""
    return await act(request, _delete)


def _delete(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    """Delete runs for good. Raise ConfigError, before any is deleted, if one of them may still run."""
    run_dirs = _runs_in(site, body)
    for run_dir in run_dirs:
        require_deletable(run_dir)
        name = site.records.name_of(run_dir)
        # A command that was started here holds nothing yet while it prepares data.
        if launchers(site, run_dir):
            raise ConfigError(f"{name} is at work; stop it first. Nothing was deleted")
        if site.jobs.is_running(result_job(name)):
            raise ConfigError(
                f"the result of {name} is being evaluated, exported or pushed; wait for its end. Nothing was deleted"
            )
        if run_dir.resolve() == site.folder.resolve():
            raise ConfigError(
                f"{run_dir} is the folder that this page shows; delete it in a terminal. Nothing was deleted"
            )
    for run_dir in run_dirs:
        delete_run(run_dir)
        site.records.forget(run_dir)
    return {}


async def go_on(request: Request) -> Response:
    """Start `kubetune train` for a run that has stopped: it continues from its newest checkpoint."""
    return await act(request, _go_on)


def _go_on(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    """Start a run again. Return the name of its job, and the command line."""
    # `train RUN_DIR/config.yaml output=RUN_DIR`, and the overrides of the first start.
    run_dir = find_run(site, str(body.get("dir", "")))
    words = train_again(run_dir)
    name = site.records.name_of(run_dir)
    _require_allowed(run_dir, words)
    site.jobs.start(name, words)
    return {"job": name, "command": shlex.join(["kubetune", *words])}


def _require_allowed(run_dir: Path, words: Sequence[str]) -> None:
    """Raise ConfigError if the run would act outside its directory as nobody has allowed here.

    The page cannot ask as a terminal does, and a run directory below its folder may come from
    somebody else. `words` are the arguments of `kubetune`: the verb, the run file, overrides.
    """
    config = load_config(Path(words[1]), overrides=words[2:], environ=os.environ)
    instead = f"go on in a terminal: {shlex.join(['kubetune', *words])}"
    consent.require(consent.effects_of(config), run_dir, instead=instead)
