"""List and watch: one answer, or a stream of changes with bookmarks from any remembered resourceVersion."""

from __future__ import annotations

import asyncio
import contextlib
import json

from aiohttp import web

from standin.api.responses import flag, hung_up, json_response
from standin.api.selectors import Test, selector
from standin.state.errors import ApiError
from standin.state.objects import Object, namespace_of
from standin.state.resources import Resource
from standin.state.store import Change, Store

_DEFAULT_TIMEOUT_SECONDS = "1800"


def list_objects(
    request: web.Request, store: Store, resource: Resource, namespace: str
) -> web.Response:
    """Answer with the objects that a request's selectors choose."""
    is_chosen = selector(request.query)
    return json_response(
        {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "items": list(filter(is_chosen, store.list(resource.kind, namespace or None))),
            "metadata": {"resourceVersion": str(store.revision)},
        }
    )


async def watch_objects(
    request: web.Request, store: Store, resource: Resource, namespace: str, bookmark_seconds: float
) -> web.StreamResponse:
    """Stream changes until the client hangs up or its timeout is over; ApiError 410 for a forgotten revision."""
    stream = _Stream(request, store, resource, namespace)
    queue: asyncio.Queue[Change] = asyncio.Queue()
    start = stream.start(request.query.get("resourceVersion", ""))
    # With no await in between, or a change would be lost.
    store.watchers.add(queue)
    loop = asyncio.get_running_loop()
    end = loop.time() + float(request.query.get("timeoutSeconds", _DEFAULT_TIMEOUT_SECONDS))
    try:
        await stream.response.prepare(request)
        for change in start:
            await stream.send_change(change)
        if flag(request, "sendInitialEvents"):
            await stream.send_bookmark({"k8s.io/initial-events-end": "true"})
        while (left := end - loop.time()) > 0 and not hung_up(request):
            try:
                change = await asyncio.wait_for(queue.get(), min(left, bookmark_seconds))
                await stream.send_change(change)
            except TimeoutError:
                if flag(request, "allowWatchBookmarks"):
                    await stream.send_bookmark({})
    # The client hung up.
    except ConnectionError:
        pass
    finally:
        store.watchers.discard(queue)
    with contextlib.suppress(ConnectionError):
        await stream.response.write_eof()
    return stream.response


async def refuse_as_too_large(request: web.Request, revision: int) -> web.StreamResponse:
    """Refuse a request as a server does whose cache has not read the newest revision yet: a watch within its stream."""
    message = (
        f"Timeout: Too large resource version: {revision}, current: {revision - 1}; try again later"
    )
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    details = {"causes": [cause], "retryAfterSeconds": 1}
    error = ApiError(504, "Timeout", message, details)
    if not flag(request, "watch"):
        raise error
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(json.dumps({"type": "ERROR", "object": error.status()}).encode() + b"\n")
    await response.write_eof()
    return response


class _Stream:
    """One watch: which changes concern it, and how they are written."""

    def __init__(
        self, request: web.Request, store: Store, resource: Resource, namespace: str
    ) -> None:
        self.response = web.StreamResponse(headers={"Content-Type": "application/json"})
        self._store = store
        self._resource = resource
        self._namespace = namespace
        self._matches: Test = selector(request.query)
        self._from_state = flag(request, "sendInitialEvents")

    def start(self, since: str) -> list[Change]:
        """Return the events to send before the first new change."""
        store = self._store
        if since in ("", "0") or self._from_state:
            objects = store.list(self._resource.kind, self._namespace or None)
            return [Change(0, self._resource, "ADDED", json.dumps(obj), None) for obj in objects]
        if int(since) < store.oldest_revision:
            raise ApiError(
                410, "Expired", f"too old resource version: {since} ({store.oldest_revision})"
            )
        return [change for change in store.history if change.revision > int(since)]

    async def send_change(self, change: Change) -> None:
        """Send a change, if it concerns this watch."""
        if change.resource is not self._resource:
            return
        obj = json.loads(change.text)
        if self._namespace and namespace_of(obj) != self._namespace:
            return
        matched = change.before is not None and self._matches(json.loads(change.before))
        matches = self._matches(obj)
        kind = change.type
        # An object that enters or leaves the selection.
        if kind == "MODIFIED" and matched != matches:
            kind = "ADDED" if matches else "DELETED"
        if matches or (kind == "DELETED" and matched):
            await self._write(kind, obj)

    async def send_bookmark(self, annotations: dict[str, str]) -> None:
        """Send the revision up to which the client knows everything."""
        body = {
            "kind": self._resource.kind,
            "apiVersion": self._resource.api_version,
            "metadata": {
                "resourceVersion": str(self._store.revision),
                "creationTimestamp": None,
                "annotations": annotations,
            },
        }
        await self._write("BOOKMARK", body)

    async def _write(self, type_: str, obj: Object) -> None:
        await self.response.write(json.dumps({"type": type_, "object": obj}).encode() + b"\n")
