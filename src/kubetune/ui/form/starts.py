"""Starts of runs from the page: of the form, of a run that failed with what mends it, and of the demo."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kubetune.base.faults import known
from kubetune.base.files import write_atomic
from kubetune.config import consent
from kubetune.config.resolved import as_yaml, read_config
from kubetune.errors import ConfigError, KubetuneError
from kubetune.k8s.manifests import local_files, sent_from_outside
from kubetune.rundir.exit_status import read_exit_status
from kubetune.ui.form.fixes import for_failure
from kubetune.ui.form.new_run import texts_of
from kubetune.ui.form.typed_config import (
    IN_A_TERMINAL,
    command_of,
    config_of,
    lines_of,
    run_file,
    typed_values,
    with_fixes,
)
from kubetune.ui.site import Site, act, find_run

_DEMO = "demo"  # folder next to the runs, as `kubetune demo` has it


async def start(request: Request) -> Response:
    """Write the run file and start the run: here, or on the cluster with `kubetune submit`."""
    return await act(request, _started)


def _started(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    """Start the run. Return its job, or the problems."""
    verb = "submit" if body.get("on") == "cluster" else "train"
    try:
        config = config_of(site, body)
        name = config.name
        if name is None:
            raise ConfigError(
                "name: left out; a run that is begun here needs one, such as support-bot"
            )
        # Files that the cluster would get from this machine.
        if verb == "submit":
            sent = sent_from_outside(local_files(config), Path.cwd())
            consent.require(sent, run_file(site, name), instead=IN_A_TERMINAL)
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
        return with_fixes(lines_of(refused), [], typed_values(body))

    return {"problems": [], "job": name, "command": command_of(site, name, verb)}


def _write_and_start(site: Site, text: str, name: str, verb: str) -> None:
    """Write the run file, and start the job. Without a start, no new run file stays."""
    # A file that is left of a start that failed may be replaced; another one is somebody's work.
    file = run_file(site, name)
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
