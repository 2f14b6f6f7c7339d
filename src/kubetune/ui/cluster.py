"""Runs of a namespace: a page that is shown at once, and filled when the cluster answers.

It asks by `kubetune status` and `watch`, each a process, so that it shows what people see in a terminal.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kubetune.base import processes
from kubetune.config.schema.quantities import DNS_LABEL
from kubetune.errors import ConfigError
from kubetune.ui.site import html, page, site_of

_SECONDS = 60.0  # in which the cluster has to answer


def cluster(request: Request) -> Response:
    """Show the page of all runs of the namespace, or of one of them."""
    name = _name(request)
    words = _words(request, name)
    facts = {"title": name or f"Runs of {site_of(request).namespace}", "name": name}
    return page(request, "cluster.html", f"kubetune {' '.join(words)}", facts)


def part(request: Request) -> Response:
    """Show the part of the page that changes, as the cluster answers now."""
    name = _name(request)
    # The page itself is there already, so a slow cluster keeps nobody waiting before an empty window.
    status, problem = _ask([*_words(request, name), "--json"])
    return html("cluster_part.html", {"status": status, "problem": problem, "name": name})


def _name(request: Request) -> str:
    """Return the run that the address names, or "". Raise ConfigError if no run can have this name."""
    # It becomes a word of a command line, so it must not begin with a dash.
    name = request.query_params.get("name", "")
    if name and not re.fullmatch(DNS_LABEL, name):
        raise ConfigError(f"{name}: no name of a run on a cluster")
    return name


def _words(request: Request, name: str) -> list[str]:
    """Return the command of kubetune that shows the run, or all runs without a name."""
    namespace = site_of(request).namespace
    if namespace is None:
        raise ConfigError(
            "this server shows no cluster; start it with `kubetune ui --namespace NAMESPACE`"
        )
    words = ["watch", name] if name else ["status"]
    return [*words, "--namespace", namespace]


def _ask(words: Sequence[str]) -> tuple[Any, str]:
    """Return the JSON that a command prints, or None and the reason."""
    command = processes.module("kubetune", *words)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None, f"The cluster has not answered in {_SECONDS:g} s."

    # Anything but JSON is an error, which the command has explained on stderr.
    try:
        return json.loads(done.stdout), ""
    except ValueError:
        return None, done.stderr.strip() or f"ended with exit code {done.returncode}"
