"""Answers, as they leave the server, and bodies, as they come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml
from aiohttp import web

from standin.state.errors import bad_request, unsupported_media_type
from standin.state.objects import Object

SUCCESS = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


def json_response(body: Object, status: int = 200) -> web.Response:
    """Answer with JSON."""
    # Exactly a real server's header: aiohttp would add a charset, which hides errors from clients that compare it.
    headers = {"Content-Type": "application/json"}
    return web.Response(body=json.dumps(body).encode(), status=status, headers=headers)


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


async def read_body(request: web.Request) -> Any:
    """Return the body of a request; ApiError where it is neither JSON nor YAML."""
    if "protobuf" in request.content_type:
        advice = "use apply or create -f instead of a typed command such as `kubectl create job`"
        raise unsupported_media_type(f"this server reads JSON and YAML: {advice}")
    text = await request.text()
    try:
        if "yaml" in request.content_type:
            return yaml.safe_load(text)
        return json.loads(text or "null")
    except ValueError as error:
        raise bad_request(f"couldn't read the request's body: {error}") from error


def hung_up(request: web.Request) -> bool:
    """True if nobody waits for the answer any more."""
    return request.transport is None or request.transport.is_closing()


def flag(request: web.Request, name: str) -> bool:
    """Return a boolean query parameter."""
    return request.query.get(name) in ("true", "1")
