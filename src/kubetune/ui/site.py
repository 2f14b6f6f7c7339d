"""The site: what its pages share, and how a page or a script of a page is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any, Self

from anyio import to_thread
from jinja2 import Environment, PackageLoader
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from kubetune.base.humanize import visible
from kubetune.base.logs import scrub
from kubetune.errors import ConfigError, KubetuneError
from kubetune.reporting.rendering import environment
from kubetune.rundir.machine import versions
from kubetune.ui.chat.talkers import Talkers
from kubetune.ui.jobs import Jobs
from kubetune.ui.run_index import Records

_MOST_BYTES = 1 << 20  # of the body of a request
BODY_SECONDS = 30.0  # for the body of a request to arrive


class Missing(ConfigError):
    """There is no run of this name."""


@dataclass(frozen=True)
class Site:
    """All that the server knows."""

    records: Records
    jobs: Jobs
    talkers: Talkers
    namespace: str | None = None  # of a cluster from which runs are shown too

    @classmethod
    def of(cls, folder: Path, namespace: str | None = None) -> Self:
        """Return the site of a folder, which need not exist."""
        return cls(Records(folder), Jobs(folder), Talkers(), namespace)

    @property
    def folder(self) -> Path:
        """The folder of the runs that are shown."""
        return self.records.folder


@cache
def templates() -> Environment:
    """Return the templates of the site and of reports. The site's come first, such as `base.html`."""
    # A page of a report that extends `base.html` gets the site's head and links in this way.
    return environment(PackageLoader("kubetune.ui", "templates"))


def site_of(request: Request) -> Site:
    """Return the site that a request is for."""
    site: Site = request.app.state.site
    return site


def page(
    request: Request,
    template: str,
    verb: str,
    facts: Mapping[str, Any],
    status: int = 200,
) -> Response:
    """Return a page of the site. `verb` is the command line that does the same."""
    # A template that has charts gets their data from its own facts.
    site = site_of(request)
    all_facts = {
        "has_charts": False,
        "data": "",
        **facts,
        "verb": verb,
        "version": versions()["kubetune"],
        "folder": site.folder,
        "namespace": site.namespace,
        "place": request.scope["path"],
    }
    return html(template, all_facts, status)


def html(
    template: str,
    facts: Mapping[str, Any],
    status: int = 200,
) -> Response:
    """Return a template, without secrets and characters that could hide text."""
    # Names, logs and errors come from runs, which may be received ones.
    text = templates().get_template(template).render(**facts)
    return HTMLResponse(visible(scrub(text)), status)


def problem(
    request: Request,
    error: Exception | str,
    status: int = 400,
) -> Response:
    """Return a page that says what is wrong, in the words of the command line."""
    # The same words as in a terminal, on a page.
    facts = {
        "title": "Not found" if status == 404 else "This cannot be shown",
        "text": str(error),
        "status": status,
    }
    # No command shows a page that there is not.
    verb = ""
    if status != 404:
        verb = f"kubetune runs {quote(str(site_of(request).folder))}"
    return page(request, "problem.html", verb, facts, status)


def answer(facts: Any) -> Response:
    """Return an answer to a script of the site, without secrets."""
    return Response(scrub(json.dumps(facts)), media_type=JSONResponse.media_type)


async def act(
    request: Request, action: Callable[[Site, dict[str, Any]], Mapping[str, Any]]
) -> Response:
    """Do what a script of the site asks for. Answer with its facts, and with its problems.

    The action gets the body of the request. It runs in a thread, since it may read and write files.
    """
    body = await body_of(request)
    site = site_of(request)

    # Problems are an answer, which the script shows next to the form, and no error page.
    def work() -> Response:
        try:
            return answer({"problems": [], **action(site, body)})
        except KubetuneError as error:
            return answer({"problems": [str(error)]})

    return await to_thread.run_sync(work)


async def body_of(request: Request) -> dict[str, Any]:
    """Return the object that a script of the site sends. Raise ConfigError for anything else."""
    # A form of another site can send texts, but not this type: the browser asks us first.
    if request.headers.get("content-type", "").partition(";")[0] != JSONResponse.media_type:
        raise ConfigError(f"content-type: expected {JSONResponse.media_type}")

    # A client that sends without end, or never to the end, is cut off.
    content = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > _MOST_BYTES:
                    raise ConfigError(f"the request has more than {_MOST_BYTES:,} bytes")
    except TimeoutError:
        raise ConfigError(f"the request did not arrive within {BODY_SECONDS:.0f} s") from None

    try:
        body = json.loads(content)
    # `[[[[…` nests deeper than Python can go.
    except (ValueError, RecursionError):
        body = None

    if not isinstance(body, dict):
        raise ConfigError("the request is no JSON object")
    return body


def run_of(request: Request) -> Path:
    """Return the run directory that a request names. Raise Missing if it is not in the folder."""
    return find_run(site_of(request), request.query_params.get("dir", ""))


def runs_of(request: Request) -> list[Path]:
    """Return all run directories that a request names, each once. Raise Missing like `run_of`."""
    # A browser may send a name twice: a dict has each once, in its order.
    site = site_of(request)
    names = dict.fromkeys(request.query_params.getlist("dir"))
    return [find_run(site, name) for name in names]


def find_run(site: Site, name: str) -> Path:
    """Return the run directory of this name. Raise Missing if it is not in the folder."""
    run_dir = site.records.find(name)
    if run_dir is None:
        raise Missing(f"{name}: no run of this name in {site.folder}")
    return run_dir
