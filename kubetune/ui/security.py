"""The guard of the server: in come those who have the token, from a page of this server, by a name that is ours.

A page of another site in the same browser can send requests here, and by DNS rebinding even read the answers. So each
request must name a host that is known or an address, whose owner no name server decides; what comes from another origin
is refused; and a cookie that the token brought about is needed for all but the looks of the page.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable, Collection
from html import escape
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SAFE = {"GET", "HEAD"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
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
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
"""A Host header: an IPv6 address in brackets, or a name or IPv4 address; then maybe a port."""
_HTTP_PORT: Final = 80


class Guard:
    """The server behind its checks. `names`: hosts it may be called by, besides localhost and addresses.

    `is_open`: True of a path that shows nothing of any run, so that it needs no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        names: Collection[str] = (),
        is_open: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._app, self._token, self._is_open = app, token, is_open
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        request = HTTPConnection(scope)
        answer = self._refusal(scope["method"], request) or self._entry(scope["method"], request)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if not self._is_open(scope["path"]):
                    headers["cache-control"] = "no-store"
            await send(message)

        await (answer or self._app)(scope, receive, guarded)

    def _refusal(self, method: str, request: HTTPConnection) -> Response | None:
        """Answer to a request from elsewhere; None for one of ours."""
        host = request.headers.get("host", "")
        if not self._is_known(host):
            return _refused(
                421,
                f"This server is not {host}; kubetune ui --allow-host NAME lets it be called so.",
            )
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return _refused(403, "A page of another site asked for this.")
        if method not in SAFE and origin is None:
            return _refused(403, "Nothing says which page asks for this change.")
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site") and (
            method not in SAFE or request.headers.get("sec-fetch-mode") != "navigate"
        ):
            return _refused(403, "A page of another site asked for this.")
        return None

    def _is_known(self, host: str) -> bool:
        """True if a Host header has the form of one, and names this server or any address."""
        parts = _HOST.fullmatch(host)
        if parts is None:
            return False
        name = (parts[1] or parts[2]).lower()
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _entry(self, method: str, request: HTTPConnection) -> Response | None:
        """Answer to somebody who comes with the token, or has none; None for those who are in."""
        # What the server will look up. A URL would be built from the Host header too, which anybody may write.
        path = request.scope["path"]
        if method in SAFE and self._is_open(path):
            return None
        host = _HOST.fullmatch(request.headers.get("host", ""))
        port = int(host[3] or _HTTP_PORT) if host is not None else _HTTP_PORT
        cookie = f"kubetune-{port}"
        if (
            path == "/"
            and method in SAFE
            and (given := request.query_params.get("token")) is not None
        ):
            if not self._is_token(given):
                return _refused(401, _NO_TOKEN)
            # A page, not a redirect: the browser keeps a strict cookie to itself while another site sends it on.
            answer = HTMLResponse(_ENTRY)
            answer.set_cookie(cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        return None if self._is_token(request.cookies.get(cookie, "")) else _refused(401, _NO_TOKEN)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())


_ENTRY = '<!doctype html><title>kubetune</title><link rel="icon" href="data:,"><meta http-equiv="refresh" content="0;url=/">'
_NO_TOKEN = "Open the address that kubetune ui has printed: it has the token with which this page lets you in."


def _refused(status: int, text: str) -> Response:
    if status != 401:
        return PlainTextResponse(f"{text}\n", status)
    title = HTTPStatus(status).phrase
    return HTMLResponse(
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>{title}</title><link rel="stylesheet" href="/static/style.css">'
        f'<main><header><p class="kind">kubetune</p><h1>No token</h1></header><p>{escape(text)}</p></main></html>',
        status,
    )
