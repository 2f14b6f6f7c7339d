"""The HTTP side: routing, and requests about objects. Writes go through writing.py into the Store."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from standin import faults
from standin.api import access, discovery
from standin.api.paths import Target, parse_path
from standin.api.pods import serve_subresource
from standin.api.responses import SUCCESS, flag, json_response, object_response, read_body
from standin.api.watch import list_objects, refuse_as_too_large, watch_objects
from standin.api.writing import Writer
from standin.injection import inject
from standin.node.kubelet import Kubelet
from standin.settings import Settings
from standin.state.errors import ApiError, bad_request, no_such_path
from standin.state.store import Store

_LARGEST_BODY_BYTES = 8 << 20
_WRITE_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


class Api:
    """Answers all requests of users and tests."""

    def __init__(
        self, store: Store, kubelet: Kubelet, faults_in_force: faults.Faults, settings: Settings
    ) -> None:
        self._store = store
        self._kubelet = kubelet
        self._faults = faults_in_force
        self._settings = settings
        self._writer = Writer(store, faults_in_force, settings)
        self._version = f"v{settings.kubernetes_version}.0-standin"

    def application(self) -> web.Application:
        """Return the application to serve."""
        application = web.Application(client_max_size=_LARGEST_BODY_BYTES)
        application.router.add_route("*", "/{path:.*}", self._answer)
        return application

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._route(request, [part for part in request.path.split("/") if part])
        except ApiError as error:
            return json_response(error.status(), error.code)

    async def _route(self, request: web.Request, parts: list[str]) -> web.StreamResponse:
        match parts:
            case ["version"]:
                return json_response(self._version_info())
            case ["readyz"] if self._faults.take_refusal_at_start():
                text = "[-]informer-sync failed: reason withheld\nreadyz check failed\n"
                return web.Response(text=text, status=500)
            case ["healthz" | "readyz" | "livez"]:
                return web.Response(text="ok")
            case ["openapi", "v3", *rest]:
                return json_response(discovery.openapi(self._faults.served(), rest, self._version))
            case ["standin", "faults", name]:
                return await self._inject(request, name)
            case ["standin", "asked"]:
                return json_response({"asked": self._faults.asked})
            case ["api"] | ["api", _] | ["apis"] | ["apis", _] | ["apis", _, _]:
                return json_response(discovery.document(self._faults.served(), parts))
            case ["api" | "apis", *_]:
                return await self._serve(request, parse_path(parts))
        raise no_such_path()

    def _version_info(self) -> dict[str, str]:
        major, minor = self._settings.kubernetes_version.split(".")
        return {
            "major": major,
            "minor": minor,
            "gitVersion": self._version,
            "platform": "linux/amd64",
        }

    async def _inject(self, request: web.Request, name: str) -> web.Response:
        try:
            inject(self._faults, self._store, self._kubelet, name, await request.json())
        except (KeyError, TypeError) as error:
            raise bad_request(str(error)) from error
        return json_response(SUCCESS)

    async def _serve(self, request: web.Request, target: Target) -> web.StreamResponse:
        """Answer a request about objects or their subresources."""
        resource = target.resource
        if resource not in self._faults.served():
            raise no_such_path()
        verb = _verb(request, target)
        token = access.token_of(request)
        plural = resource.plural
        if target.subresource:
            plural += f"/{target.subresource}"
        # Only users bring a token: what the tests themselves ask is asked of a healthy server.
        if token:
            met = await self._faults.meet(request, f"{verb} {plural}", target.name or "")
            if met is not None:
                return met
        # A subresource is a right of its own: `pods/exec`.
        access.check(self._store, token, verb, target, self._faults.take_refusal_at_start)
        if target.subresource not in (None, "status"):
            if target.subresource not in resource.subresources:
                raise no_such_path()
            pod = self._require(target)
            return await serve_subresource(
                request, self._store, self._kubelet, self._faults, pod, target.subresource or ""
            )
        is_of_many = verb in ("list", "watch")
        if token and is_of_many and self._faults.take_refusal_when_behind():
            return await refuse_as_too_large(request, self._store.revision)
        match verb:
            case "list":
                return list_objects(request, self._store, resource, target.namespace)
            case "watch":
                seconds = self._settings.bookmark_seconds
                return await watch_objects(
                    request, self._store, resource, target.namespace, seconds
                )
            case "get":
                return object_response(self._require(target))
        return self._write(request, verb, target, await read_body(request))

    def _write(self, request: web.Request, verb: str, target: Target, body: Any) -> web.Response:
        match verb:
            case "create" if target.resource.kind == "SelfSubjectAccessReview":
                return json_response(
                    access.review(self._store, access.token_of(request), body), 201
                )
            case "create":
                return self._writer.create(request, target, body)
            case "update":
                return self._writer.replace(request, target, self._require(target), body)
            case "patch":
                return self._writer.patch(request, target, body)
            case "delete":
                return self._writer.delete(request, target, body or {})
        return self._writer.delete_collection(request, target, body or {})

    def _require(self, target: Target) -> dict[str, Any]:
        """Return the object that a request names; ApiError 404 if there is none."""
        return self._store.require(target.resource, target.namespace, target.name or "")


def _verb(request: web.Request, target: Target) -> str:
    """Return what a request wants to do, in the words of Roles."""
    if request.method == "GET" and target.name:
        return "get"
    if request.method == "GET":
        return "watch" if flag(request, "watch") else "list"
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    if request.method not in _WRITE_VERBS:
        message = "the server does not allow this method on the requested resource"
        raise ApiError(405, "MethodNotAllowed", message)
    return _WRITE_VERBS[request.method]
