"""Runs of a namespace: a page that is there at once, and is told by `kubetune status` and `watch` as they answer.

Each look is a command line in a process of its own, as for agents: what people see, the page sees.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from kubetune.base import processes
from kubetune.base.humanize import visible
from kubetune.base.logs import scrub
from kubetune.config.schema.cluster import DNS_LABEL
from kubetune.errors import ConfigError
from kubetune.ui.site import page, site_of, templates

_SECONDS = 60.0


def cluster(request: Request) -> Response:
    """The page, on all runs of the namespace or on one of them."""
    name = _name(request)
    words = _words(request, name)
    facts = {"title": name or f"Runs of {site_of(request).namespace}", "name": name}
    return page(request, "cluster.html", f"kubetune {' '.join(words)}", facts)


def part(request: Request) -> Response:
    """The part of the page that changes, as the cluster tells it now."""
    name = _name(request)
    found, problem = _told([*_words(request, name), "--json"])
    text = (
        templates()
        .get_template("cluster_part.html")
        .render(found=found, problem=problem, name=name)
    )
    return HTMLResponse(visible(scrub(text)))


def _name(request: Request) -> str:
    name = request.query_params.get("name", "")
    if name and not re.fullmatch(DNS_LABEL, name):
        raise ConfigError(f"{name}: no name of a run on a cluster")
    return name


def _words(request: Request, name: str) -> list[str]:
    namespace = site_of(request).namespace
    if namespace is None:
        raise ConfigError(
            "this server shows no cluster; start it with `kubetune ui --namespace NAMESPACE`"
        )
    return [*(["watch", name] if name else ["status"]), "--namespace", namespace]


def _told(words: Sequence[str]) -> tuple[Any, str]:
    """The JSON that a command prints, and why there is none."""
    command = processes.module("kubetune", *words)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return None, f"The cluster has not answered in {_SECONDS:g} s."
    try:
        return json.loads(done.stdout), ""
    except ValueError:
        return None, done.stderr.strip() or f"ended with exit code {done.returncode}"
