"""Answers, as they leave the server."""

from __future__ import annotations

import json
from collections.abc import Sequence

from aiohttp import web

from standin.state.objects import Object


def json_response(
    body: Object, status: int = 200, content_type: str = "application/json"
) -> web.Response:
    # exactly a real server's header: aiohttp would add a charset, which hides errors from clients that compare it
    return web.Response(
        body=json.dumps(body).encode(), status=status, headers={"Content-Type": content_type}
    )


def object_response(
    obj: Object,
    status: int = 200,
    warnings: Sequence[str] = (),
) -> web.Response:
    """Answer with one object, its warnings as headers."""
    response = json_response(obj, status)
    for warning in warnings:
        quoted = warning.replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{quoted}"')
    return response


def hung_up(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def flag(request: web.Request, name: str) -> bool:
    """A boolean query parameter."""
    return request.query.get(name) in ("true", "1")
