"""The site: what its pages share, and how one of them is answered."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shlex import quote
from typing import Any, Self

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from kubetune.base.humanize import visible
from kubetune.base.logs import scrub
from kubetune.errors import ConfigError
from kubetune.reporting.rendering import environment
from kubetune.rundir.machine import versions
from kubetune.ui.jobs import Jobs
from kubetune.ui.records import Records
from kubetune.ui.talkers import Talkers

_MOST_BYTES = 1 << 20
BODY_SECONDS = 30.0
"""Time for the body of a request to arrive."""


class Missing(ConfigError):
    """No run of a name."""


@dataclass(frozen=True)
class Site:
    """All that the server knows."""

    records: Records
    jobs: Jobs
    talkers: Talkers
    namespace: str | None = None
    """Of a cluster whose runs are shown too."""

    @classmethod
    def of(cls, folder: Path, namespace: str | None = None) -> Self:
        """The site of a folder, there or not."""
        return cls(Records(folder), Jobs(folder), Talkers(), namespace)

    @property
    def folder(self) -> Path:
        """The folder whose runs are shown."""
        return self.records.folder


@cache
def templates() -> Environment:
    """The templates of the site; where both have one of a name, as `base.html`, it goes before that of the reports."""
    made = environment(PackageLoader("kubetune.ui", "templates"))
    made.filters["spans"] = spans
    return made


def spans(text: str) -> Markup:
    """A text whose words between backticks are code, all of it escaped."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def site_of(request: Request) -> Site:
    """The site that a request is for."""
    found: Site = request.app.state.site
    return found


def page(
    request: Request, template: str, verb: str, facts: Mapping[str, Any], status: int = 200
) -> Response:
    """A page of the site, without any secret. `verb`: the command line that does the same."""
    site = site_of(request)
    given = {
        "has_charts": False,
        "data": "",
        **facts,
        "verb": verb,
        "version": versions()["kubetune"],
    }
    text = (
        templates()
        .get_template(template)
        .render(**given, folder=site.folder, namespace=site.namespace, place=request.scope["path"])
    )
    return HTMLResponse(visible(scrub(text)), status)


def problem(request: Request, error: Exception | str, status: int = 400) -> Response:
    """A page that says what is wrong, in the words of the command line."""
    found = {
        "title": "Not found" if status == 404 else "This cannot be shown",
        "text": str(error),
        "status": status,
    }
    return page(
        request,
        "problem.html",
        f"kubetune runs {quote(str(site_of(request).folder))}",
        found,
        status,
    )


def answer(found: Any, status: int = 200) -> Response:
    """An answer to a script of the site, without any secret."""
    return Response(scrub(json.dumps(found)), status, media_type=JSONResponse.media_type)


async def body_of(request: Request) -> dict[str, Any]:
    """The object that a script of the site sends. Raises ConfigError for anything else."""
    if request.headers.get("content-type", "").partition(";")[0] != JSONResponse.media_type:
        raise ConfigError(f"content-type: expected {JSONResponse.media_type}")
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
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError("the request is no JSON object")
    return found


def run_of(request: Request, key: str = "dir") -> Path:
    """The run directory that a request names. Raises Missing where the folder holds none."""
    return find_run(site_of(request), request.query_params.get(key, ""))


def runs_of(request: Request, key: str = "dir") -> list[Path]:
    """All run directories that a request names. Raises Missing for one that is not in the folder."""
    return [
        find_run(site_of(request), name)
        for name in dict.fromkeys(request.query_params.getlist(key))
    ]


def find_run(site: Site, name: str) -> Path:
    """The run directory of this name. Raises Missing."""
    run_dir = site.records.find(name)
    if run_dir is None:
        raise Missing(f"{name}: no run of this name in {site.folder}")
    return run_dir
