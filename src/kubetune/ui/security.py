"""The guard of the server: it lets in requests with the token, from the server's own pages.

A page of another site in the same browser can send requests here, and by DNS rebinding even read the
answers. Three checks keep it out:

    Host header     a known name or an IP address; a name that an attacker's DNS points here is refused
    Origin header   the server's own; the browser sets it, and the other site cannot change it
    cookie          was set for the token; needed for all but style sheets and scripts
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable, Collection
from html import escape
from http import HTTPStatus
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Methods that change nothing.
SAFE = {"GET", "HEAD"}

# No script, style or picture of another server, and nothing inline.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
# A Host header: an IPv6 address in brackets, or a name or IPv4 address; then maybe a port.
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
_HTTP_PORT: Final = 80


class Guard:
    """The server behind its checks.

    `names` are host names that it may have besides localhost. `is_open` returns True for a path that
    shows nothing of any run, and so needs no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        names: Collection[str] = (),
        is_open: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._app = app
        self._token = token
        self._is_open = is_open
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        # No page uses web sockets.
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        request = HTTPConnection(scope)
        method = scope["method"]
        # An answer of the guard, or none, and then the site answers.
        answer = self._refusal(method, request) or self._entry(method, request)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                # Pages show runs, which nobody should find in a browser's cache.
                if not self._is_open(scope["path"]):
                    headers["cache-control"] = "no-store"

            await send(message)

        await (answer or self._app)(scope, receive, guarded)

    def _refusal(self, method: str, request: HTTPConnection) -> Response | None:
        """Return an answer to a request from another site; None for a request of ours."""
        host = request.headers.get("host", "")
        if not self._is_known(host):
            return _refused(
                421,
                f"This server is not {host}; kubetune ui --allow-host NAME lets it be called so.",
            )

        origin = request.headers.get("origin")
        # By https where a proxy stands in front. A browser says of a page of another scheme that it is foreign.
        origins = (f"http://{host}".lower(), f"https://{host}".lower())
        if origin is not None and origin.lower() not in origins:
            return _refused(403, "A page of another site asked for this.")
        if method not in SAFE and origin is None:
            return _refused(403, "Nothing says which page asks for this change.")
        # A link on another site may open a page here, but nothing else.
        is_foreign = request.headers.get("sec-fetch-site") in ("cross-site", "same-site")
        is_link = method in SAFE and request.headers.get("sec-fetch-mode") == "navigate"
        if is_foreign and not is_link:
            return _refused(403, "A page of another site asked for this.")
        return None

    def _is_known(self, host: str) -> bool:
        """True if a Host header has the form of one, and names this server or any address."""
        parts = _HOST.fullmatch(host)
        if parts is None:
            return False
        # Names of hosts have no case.
        name = (parts[1] or parts[2]).lower()
        if name in self._names:
            return True
        try:
            # Nobody's DNS can make an address of ours out of a name of theirs.
            ipaddress.ip_address(name)
        except ValueError:
            return False

        return True

    def _entry(self, method: str, request: HTTPConnection) -> Response | None:
        """Return an answer to a request with the token, or without cookie; None if the cookie is right."""
        # The path that the server looks up. request.url is made of the Host header too, which anybody
        # can write.
        path = request.scope["path"]
        if method in SAFE and self._is_open(path):
            return None
        # Cookies do not tell ports apart, so two servers need two names.
        port = _HTTP_PORT
        host = _HOST.fullmatch(request.headers.get("host", ""))
        if host is not None and host[3]:
            port = int(host[3])
        cookie = f"kubetune-{port}"
        token = request.query_params.get("token")
        if token is not None and path == "/" and method in SAFE:
            if not self._is_token(token):
                return _refused(401, _NO_TOKEN)
            # A page, not a redirect: a browser that comes from another site does not send a strict
            # cookie along a redirect.
            answer = HTMLResponse(_ENTRY)
            answer.set_cookie(
                cookie,
                self._token,
                httponly=True,
                samesite="strict",
                path="/",
            )
            return answer

        if not self._is_token(request.cookies.get(cookie, "")):
            return _refused(401, _NO_TOKEN)
        return None

    def _is_token(self, text: str) -> bool:
        """True if a text is the token."""
        # In constant time, so that the time says nothing about the token.
        return hmac.compare_digest(text.encode(errors="replace"), self._token.encode())


_ENTRY = '<!doctype html><title>kubetune</title><link rel="icon" href="data:,"><meta http-equiv="refresh" content="0;url=/">'
_NO_TOKEN = "Open the address that kubetune ui has printed: it has the token with which this page lets you in."


def _refused(status: int, text: str) -> Response:
    """Return a refusal: a page for people without a token, else a line of text."""
    if status != 401:
        return PlainTextResponse(f"{text}\n", status)
    title = HTTPStatus(status).phrase
    return HTMLResponse(
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>{title}</title><link rel="stylesheet" href="/static/style.css">'
        f'<main><header><p class="kind">kubetune</p><h1>No token</h1></header><p>{escape(text)}</p></main></html>',
        status,
    )
