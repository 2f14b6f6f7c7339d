"""The server: its addresses, its answers to errors, and its start."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kubetune.base.cpu import heap
from kubetune.base.faults import known
from kubetune.errors import ConfigError, EnvironmentFault, KubetuneError
from kubetune.reporting.look.style import style
from kubetune.ui import cluster, data, live, rollouts_page, run_commands, run_pages, sweeps
from kubetune.ui.chat import chat_page as chat
from kubetune.ui.form import at_hand, look, new_run, starts
from kubetune.ui.log_file import log_file
from kubetune.ui.result import pages as results
from kubetune.ui.security import Guard
from kubetune.ui.site import Missing, Site, problem, templates

if TYPE_CHECKING:
    import uvicorn

_SCRIPT = "text/javascript; charset=utf-8"
_STYLE = "text/css; charset=utf-8"

# Files that the pages link, each with its package. No name in a request becomes a path on the disk.
_STATIC = {
    "charts.js": ("kubetune.reporting", "templates/charts.js", _SCRIPT),
    "tables.js": ("kubetune.reporting", "templates/tables.js", _SCRIPT),
    "sweep.js": ("kubetune.reporting", "templates/sweep.js", _SCRIPT),
    "uPlot.js": ("kubetune.reporting", "vendor/uPlot.iife.min.js", _SCRIPT),
    "uPlot.css": ("kubetune.reporting", "vendor/uPlot.min.css", _STYLE),
    "ui.js": ("kubetune.ui", "static/ui.js", _SCRIPT),
    "new.js": ("kubetune.ui", "static/new.js", _SCRIPT),
    "runs.js": ("kubetune.ui", "static/runs.js", _SCRIPT),
    "pick.js": ("kubetune.ui", "static/pick.js", _SCRIPT),
    "chat.js": ("kubetune.ui", "static/chat.js", _SCRIPT),
    "result.js": ("kubetune.ui", "static/result.js", _SCRIPT),
    "data.js": ("kubetune.ui", "static/data.js", _SCRIPT),
    "inter.woff2": ("kubetune.reporting", "vendor/inter.woff2", "font/woff2"),
    "ui.css": ("kubetune.ui", "static/ui.css", _STYLE),
}
_COMMON_STYLE = "style.css"
_HEALTH = "/healthz"
# Paths that show nothing of any run.
_OPEN = {_HEALTH, f"/static/{_COMMON_STYLE}", *(f"/static/{name}" for name in _STATIC)}
_PAGES = (  # and what they ask for
    Route("/", run_pages.all_runs),
    Route("/run", run_pages.one_run),
    Route("/run/log", log_file),
    Route("/curves", run_pages.curves),
    Route("/compare", run_pages.compare),
    Route("/sweep", sweeps.sweep),
    Route("/new", new_run.new_run),
    Route("/new/at-hand", at_hand.at_hand),
    Route("/new/look", look.look, methods=["POST"]),
    Route("/new/plan", new_run.plan, methods=["POST"]),
    Route("/new/start", starts.start, methods=["POST"]),
    Route("/new/demo", starts.demo, methods=["POST"]),
    Route("/new/job", run_commands.job),
    Route("/run/result", results.result),
    Route("/run/result/command", results.command, methods=["POST"]),
    Route("/run/result/start", results.start, methods=["POST"]),
    Route("/run/result/cancel", results.cancel, methods=["POST"]),
    Route("/run/stop", run_commands.stop, methods=["POST"]),
    Route("/run/label", run_commands.label, methods=["POST"]),
    Route("/run/delete", run_commands.delete, methods=["POST"]),
    Route("/run/mend", starts.mend, methods=["POST"]),
    Route("/run/continue", run_commands.go_on, methods=["POST"]),
    Route("/rollouts", rollouts_page.rollouts),
    Route("/chat", chat.chat),
    Route("/chat/stay", chat.stay),
    Route("/chat/say", chat.say, methods=["POST"]),
    Route("/data", data.data),
    Route("/data/bad", data.bad),
    Route("/data/check", data.check, methods=["POST"]),
    Route("/data/prepare", data.prepare, methods=["POST"]),
    Route("/cluster", cluster.cluster),
    Route("/cluster/part", cluster.part),
    Route("/news", live.all_news),
    Route("/news/run", live.run_news),
    Route("/news/sweep", live.sweep_news),
)


def application(
    site: Site,
    token: str,
    names: Sequence[str] = (),
) -> ASGIApp:
    """Return the site behind its guard. `names`: its host names besides localhost."""
    routes = [
        *_PAGES,
        Route("/static/{name}", _static),
        Route(_HEALTH, lambda _: PlainTextResponse("ok\n")),
    ]
    # `_refused` answers errors that a user can fix, `_unknown` answers bugs.
    app = Starlette(
        routes=routes, exception_handlers={Exception: _unknown, HTTPException: _no_page}
    )
    app.add_exception_handler(KubetuneError, _refused)
    app.add_exception_handler(OSError, _refused)
    app.add_exception_handler(ClientDisconnect, _gone)

    # Pages find the site by their request.
    app.state.site = site
    return Guard(app, token, names, _OPEN.__contains__)


def _static(request: Request) -> Response:
    """Return a file that pages link."""
    # The style sheet of all pages is made of parts, the others are files.
    name = request.path_params["name"]
    if name == _COMMON_STYLE:
        return _file(style("/static/inter.woff2"), _STYLE)
    if name not in _STATIC:
        raise HTTPException(404)
    return _file(*_content(name))


def _file(content: str | bytes, media_type: str) -> Response:
    """Return a file. It may change with the next version, so that it is kept for a minute only."""
    return Response(content, media_type=media_type, headers={"cache-control": "max-age=60"})


@cache
def _content(name: str) -> tuple[bytes, str]:
    """Return the content of a file and its media type."""
    package, path, media_type = _STATIC[name]
    return resources.files(package).joinpath(path).read_bytes(), media_type


def _no_page(request: Request, error: Exception) -> Response:
    """Answer a request for a page that does not exist, or with a method that it does not take."""
    # Starlette raises one class for pages that are missing and methods that are wrong.
    status = 500
    if isinstance(error, HTTPException):
        status = error.status_code
    text = f"There is no page {request.scope['path']}."
    if status == 405:
        text = f"{request.scope['path']} takes no {request.method}."
    return problem(request, text, status)


def _gone(request: Request, error: Exception) -> Response:
    """Answer a client that went away while it sent its request. Nobody reads the answer."""
    return PlainTextResponse("", 400)


def _refused(request: Request, error: Exception) -> Response:
    """Answer with what the user can fix. Another error of the system is a bug, and raised again."""
    known_error = known(error)
    if known_error is None:
        raise error
    status = 404 if isinstance(error, Missing) else 400
    return problem(request, known_error, status)


def _unknown(request: Request, error: Exception) -> Response:
    """Answer a request in which kubetune itself failed."""
    text = "This is a bug in kubetune; the terminal of kubetune ui has the details."
    return problem(request, text, 500)


def serve(
    folder: Path,
    host: str,
    port: int,
    token: str,
    names: Sequence[str] = (),
    namespace: str | None = None,
) -> None:
    """Print the address and serve until a signal. Raise EnvironmentFault if the port is taken."""
    import uvicorn

    heap.give_back()
    # The port is taken before anything is printed, so that the address is true.
    listening = _listening(host, port)
    site = Site.of(folder, namespace)
    app = application(site, token, [*names, host])

    config = server_settings(app)
    shown = f"[{host}]" if ":" in host else host
    port_of_address = listening.getsockname()[1]  # with --port 0, the one that was free
    address = f"http://{shown}:{port_of_address}/?token={quote(token)}"
    print(f"{folder} at {address}", flush=True)
    print("Ctrl-C ends it; runs go on.", flush=True)

    # The address is printed at once; templates and the list of runs are read while the browser opens.
    threading.Thread(target=_warm, args=(site,), daemon=True).start()

    server = uvicorn.Server(config)
    # At the end, the streams of open pages are cut. That is not reported as an error.
    logging.getLogger("uvicorn.error").addFilter(lambda _: not server.should_exit)

    with listening:
        server.run(sockets=[listening])


def server_settings(app: ASGIApp) -> uvicorn.Config:
    """Return the settings of uvicorn: no log of requests, and no wait for requests that never come."""
    import uvicorn

    from kubetune.ui.connections import ImpatientProtocol

    return uvicorn.Config(
        app,
        http=ImpatientProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )


def _warm(site: Site) -> None:
    """Do now what the first page would wait for."""
    with suppress(KubetuneError, OSError):  # the page that shows it says what cannot be read
        site.records.listed()
    for name in templates().list_templates(extensions=["html"]):
        templates().get_template(name)


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections.

    Raise ConfigError for a number that is no port, EnvironmentFault if the port cannot be had.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}; expected a number from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = getattr(error, "strerror", None) or error
        raise EnvironmentFault(
            f"port {port} of {host} cannot be opened: {reason}; name another one, such as --port {port + 1}"
        ) from None
