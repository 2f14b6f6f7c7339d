"""Commands begun and ended for runs: how one stands, a run asked to stop, and one that stopped continued."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from kubetune.config import consent
from kubetune.config.load import load_config
from kubetune.errors import ConfigError, KubetuneError
from kubetune.rundir.starts import train_again
from kubetune.supervisor.place import holders
from kubetune.ui.site import Site, answer, body_of, find_run, site_of

if TYPE_CHECKING:
    import psutil

_PART = r"[^./\0\ud800-\udfff][^/\0\ud800-\udfff]*"


def job(request: Request) -> Response:
    """State of a command that was begun here; the address of its run, once it is there, and whether it has begun."""
    site, name = site_of(request), request.query_params.get("name", "")
    if not re.fullmatch(f"{_PART}(/{_PART})*", name):
        raise ConfigError(f"{name!r}: nothing of this name was begun here")
    run_dir = site.records.find(name)
    found: dict[str, object] = {"run": None, "held": False}
    if run_dir is not None:
        found = {"run": site.records.name_of(run_dir), "held": bool(holders(run_dir))}
    return answer({**site.jobs.look(name), **found})


def launchers(site: Site, run_dir: Path) -> list[psutil.Process]:
    """Processes of this machine by which a run goes on: its command, if begun here, and those that hold it."""
    begun = site.jobs.process(site.records.name_of(run_dir))
    return list(
        {one.pid: one for one in ([begun] if begun is not None else []) + holders(run_dir)}.values()
    )


async def stop(request: Request) -> Response:
    """Ask a run that goes on on this machine to save a checkpoint and end."""
    asked, site = await body_of(request), site_of(request)

    def ask() -> Response:
        try:
            run_dir = find_run(site, str(asked.get("dir", "")))
            if not (found := launchers(site, run_dir)):
                raise ConfigError(
                    f"{run_dir} does not run on this machine, or has ended; stop it where it was started"
                )
            for process in found:
                process.send_signal(signal.SIGTERM)
        except KubetuneError as error:
            return answer({"problems": [str(error)]})
        return answer({"problems": []})

    return await to_thread.run_sync(ask)


def _require_allowed(run_dir: Path, words: Sequence[str]) -> None:
    """Raise ConfigError for a run that acts outside of its directory as nobody has allowed on this machine.

    The page is no terminal: a run directory below its folder may be somebody else's.
    """
    config = load_config(Path(words[1]), overrides=words[2:], environ=os.environ)
    instead = f"go on in a terminal: {shlex.join(['kubetune', *words])}"
    consent.require(consent.effects_of(config), run_dir, instead=instead)


async def go_on(request: Request) -> Response:
    """Begin `kubetune train` for a run that has stopped: it goes on from its newest checkpoint."""
    asked, site = await body_of(request), site_of(request)

    def begin() -> Response:
        try:
            run_dir = find_run(site, str(asked.get("dir", "")))
            words, name = train_again(run_dir), site.records.name_of(run_dir)
            _require_allowed(run_dir, words)
            site.jobs.start(name, words)
        except KubetuneError as error:
            return answer({"problems": [str(error)]})
        return answer({"problems": [], "job": name, "command": shlex.join(["kubetune", *words])})

    return await to_thread.run_sync(begin)
