"""The HTTP side: routing, admission, create, update, patch, delete. Everything ends in the Store."""

from __future__ import annotations

import copy
import json
from typing import Any

import yaml
from aiohttp import web

from standin import faults
from standin.api import access, discovery, merge
from standin.api.apply import apply
from standin.api.defaults import fill_defaults
from standin.api.exec import run_exec
from standin.api.logs import send_fake_log, send_log
from standin.api.portforward import forward_ports
from standin.api.responses import flag, json_response, object_response
from standin.api.rules import admit_pod, broken_rules, pod_security_violations, restricted
from standin.api.selectors import selector
from standin.api.validation import check_schema
from standin.api.watch import list_objects, watch_objects
from standin.injection import inject
from standin.node.fake import is_fake
from standin.node.kubelet import Kubelet
from standin.settings import Settings
from standin.state.errors import (
    REQUIRED,
    ApiError,
    Cause,
    bad_request,
    invalid,
    modified,
    no_such_path,
    unsupported_media_type,
)
from standin.state.objects import Object, containers_of, name_of, namespace_of, phase
from standin.state.resources import Target, parse_path
from standin.state.store import Store

_LARGEST_BODY_BYTES = 8 << 20
_IMMUTABLE_METADATA = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "namespace",
    "name",
)
_WRITE_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}
_APPLY = "application/apply-patch+yaml"
_SUCCESS = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


class Api:
    def __init__(
        self, store: Store, kubelet: Kubelet, faults_in_force: faults.Faults, settings: Settings
    ) -> None:
        self._store, self._kubelet, self._faults, self._settings = (
            store,
            kubelet,
            faults_in_force,
            settings,
        )
        self._version = f"v{settings.kubernetes_version}.0-standin"

    def application(self) -> web.Application:
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
                major, minor = self._settings.kubernetes_version.split(".")
                body = {
                    "major": major,
                    "minor": minor,
                    "gitVersion": self._version,
                    "platform": "linux/amd64",
                }
                return json_response(body)
            case ["readyz"] if self._faults.is_starting():
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
            case ["api"] | ["apis"] if version := discovery.aggregated_version(
                request.headers.get("Accept", "")
            ):
                body = discovery.aggregated(self._faults.served(), version, core=parts == ["api"])
                return json_response(
                    body, content_type=discovery.AGGREGATED_TYPE.format(version=version)
                )
            case ["api"] | ["api", _] | ["apis"] | ["apis", _] | ["apis", _, _]:
                return json_response(discovery.document(self._faults.served(), parts))
            case ["api" | "apis", *_]:
                return await self._serve(request, parse_path(parts))
        raise no_such_path()

    async def _inject(self, request: web.Request, name: str) -> web.Response:
        try:
            inject(self._faults, self._store, self._kubelet, name, await request.json())
        except (KeyError, TypeError) as error:
            raise bad_request(str(error)) from error
        return json_response(_SUCCESS)

    async def _serve(self, request: web.Request, target: Target) -> web.StreamResponse:
        """Requests about objects and their subresources."""
        store, resource, namespace = self._store, target.resource, target.namespace
        if resource not in self._faults.served():
            raise no_such_path()
        verb = _verb(request, target)
        # only users bring a token: what the tests themselves ask is asked of a healthy server
        plural = (
            f"{resource.plural}/{target.subresource}" if target.subresource else resource.plural
        )
        asked = f"{verb} {plural}"
        if (
            _token(request)
            and (met := await self._faults.meet(request, asked, target.name or "")) is not None
        ):
            return met
        access.check(store, _token(request), verb, target, self._faults.is_starting)
        if target.subresource not in (None, "status"):
            if target.subresource not in resource.subresources:
                raise no_such_path()
            obj = store.require(resource, namespace, target.name or "")
            if target.subresource == "scale":
                return await self._scale(request, obj)
            return await self._pod_subresource(request, obj, target)
        match verb:
            case "list":
                return list_objects(request, store, resource, namespace)
            case "watch":
                seconds = self._settings.bookmark_seconds
                return await watch_objects(request, store, resource, namespace, seconds)
            case "get":
                return object_response(store.require(resource, namespace, target.name or ""))
        body = await _read_body(request)
        match verb:
            case "create":
                return self._create(request, target, body)
            case "update":
                old = store.require(resource, namespace, target.name or "")
                return self._replace(request, target, old, body)
            case "patch":
                return self._patch(request, target, body)
            case "delete":
                return self._delete(request, target, body or {})
        return self._delete_collection(request, target, body or {})

    # -- writing
    def _admit(
        self, obj: Object, target: Target, request: web.Request, old: Object | None
    ) -> list[str]:
        """Fill in defaults and check everything; returns warnings, raises ApiError."""
        resource = target.resource
        if obj.get("kind") != resource.kind or obj.get("apiVersion") != resource.api_version:
            found, wanted = obj.get("apiVersion"), resource.api_version
            raise bad_request(
                f"the API version in the data ({found}) does not match the expected API version ({wanted})"
            )
        meta = obj.setdefault("metadata", {})
        if (
            resource.namespaced
            and meta.setdefault("namespace", target.namespace) != target.namespace
        ):
            raise bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        if not meta.get("name") and not meta.get("generateName"):
            cause = Cause(
                "metadata.name", "Required value: name or generateName is required", REQUIRED
            )
            raise invalid(resource, "", [cause])
        mode = request.query.get(
            "fieldValidation", "Strict" if request.content_type == _APPLY else "Warn"
        )
        warnings, causes = check_schema(obj, self._settings.kubernetes_version, mode)
        causes += broken_rules(obj, old)
        if causes:
            raise invalid(resource, meta.get("name", ""), causes)
        fill_defaults(obj)
        if old is None:
            self._faults.check_creation(obj)
            if resource.kind == "Pod":
                admit_pod(self._store, obj)
        if resource.kind in ("Job", "StatefulSet", "Deployment") and restricted(
            self._store, target.namespace
        ):
            # such an object is stored all the same; only its pods will be refused
            violations = pod_security_violations(obj["spec"]["template"]["spec"])
            if violations:
                warnings.append(
                    'would violate PodSecurity "restricted:latest": ' + ", ".join(violations)
                )
        return warnings

    def _create(self, request: web.Request, target: Target, body: Object) -> web.Response:
        if target.resource.kind == "SelfSubjectAccessReview":
            return json_response(access.review(self._store, _token(request), body), 201)
        body.pop("status", None)
        warnings = self._admit(body, target, request, None)
        created = self._store.create(body, _dry_run(request))
        return object_response(created, 201, warnings)

    def _replace(
        self, request: web.Request, target: Target, old: Object, new: Object
    ) -> web.Response:
        """The common end of update and patch. A pod's status is the kubelet's: what a client writes there is lost."""
        for key in _IMMUTABLE_METADATA:
            if key in old["metadata"]:
                new["metadata"][key] = old["metadata"][key]
        revision = old["metadata"]["resourceVersion"]
        if new["metadata"].get("resourceVersion", revision) != revision:
            raise modified(target.resource, name_of(old))
        new["metadata"]["resourceVersion"] = revision
        warnings: list[str] = []
        if target.subresource == "status":
            new = copy.deepcopy(old) | {"status": new.get("status", {})}
        else:
            if "status" in target.resource.subresources:
                new.pop("status", None)
                new |= {"status": copy.deepcopy(old["status"])} if "status" in old else {}
            warnings = self._admit(new, target, request, old)
        if _dry_run(request):
            return object_response(new, 200, warnings)
        for part in (
            "spec",
            "status",
        ):  # controllers and the kubelet hold on to these; equal ones stay the same object
            if part in new and new[part] == old.get(part):
                new[part] = old[part]
        old.clear()
        old.update(new)
        return object_response(self._store.touch(old), 200, warnings)

    def _patch(self, request: web.Request, target: Target, body: Any) -> web.Response:
        resource, name = target.resource, target.name or ""
        if request.content_type == _APPLY:
            return self._apply(request, target, body)
        old = self._store.require(resource, target.namespace, name)
        match request.content_type:
            case "application/json-patch+json":
                new = merge.json_patch(old, body)
            case "application/merge-patch+json":
                new = merge.merge_patch(copy.deepcopy(old), body)
            case "application/strategic-merge-patch+json" if not resource.custom:
                new = merge.strategic(copy.deepcopy(old), body)
            case other:
                raise unsupported_media_type(
                    f"the body of the request was in an unknown format ({other}) - accepted media types include: "
                    "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
                )
        return self._replace(request, target, old, new)

    def _apply(self, request: web.Request, target: Target, body: Object) -> web.Response:
        manager = request.query.get("fieldManager")
        if not manager:
            message = "fieldManager: Required value: is required for apply patch"
            raise bad_request(f'PatchOptions.meta.k8s.io "" is invalid: {message}')
        if body.get("metadata", {}).get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        body.setdefault("metadata", {}).setdefault("name", target.name)
        if target.resource.namespaced:
            body["metadata"].setdefault("namespace", target.namespace)
        old = self._store.objects.get((target.resource, target.namespace, target.name or ""))
        new = apply(old, body, manager, flag(request, "force"))
        if old is not None:
            return self._replace(request, target, old, new)
        warnings = self._admit(new, target, request, None)
        created = self._store.create(new, _dry_run(request))
        return object_response(created, 201, warnings)

    def _delete(self, request: web.Request, target: Target, options: Object) -> web.Response:
        resource, name = target.resource, target.name or ""
        obj = self._store.require(resource, target.namespace, name)
        uid = obj["metadata"]["uid"]
        wanted = (options.get("preconditions") or {}).get("uid", uid)
        if wanted != uid:
            message = (
                f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {uid}"
            )
            raise ApiError(409, "Conflict", message)
        if not _dry_run(request) and "All" not in options.get("dryRun", []):
            self._store.delete(obj, *_delete_options(request, options))
            if (resource, target.namespace, name) in self._store.objects:
                return json_response(obj)
        details = {"name": name, "group": resource.group, "kind": resource.plural, "uid": uid}
        return json_response(_SUCCESS | {"details": details})

    def _delete_collection(
        self, request: web.Request, target: Target, options: Object
    ) -> web.Response:
        matches = selector(request.query)
        chosen = [
            obj
            for obj in self._store.list(target.resource.kind, target.namespace or None)
            if matches(obj)
        ]
        for obj in chosen:
            self._store.delete(obj, *_delete_options(request, options))
        return json_response(
            _SUCCESS | {"details": {"group": target.resource.group, "kind": target.resource.plural}}
        )

    async def _scale(self, request: web.Request, obj: Object) -> web.Response:
        """The replica count by itself, as `kubectl scale` reads and changes it."""
        if request.method != "GET":
            obj["spec"]["replicas"] = (await _read_body(request))["spec"]["replicas"]
            self._store.touch(obj)
        scale = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": obj["metadata"]}
        replicas = {"replicas": obj["spec"]["replicas"]}
        return json_response(
            scale | {"spec": replicas, "status": {"replicas": obj["status"]["replicas"]}}
        )

    # -- pods
    async def _pod_subresource(
        self, request: web.Request, pod: Object, target: Target
    ) -> web.StreamResponse:
        worker = self._kubelet.worker(pod)
        if target.subresource == "eviction":
            options = (await _read_body(request)).get("deleteOptions") or {}
            faults.evict(self._store, pod, options.get("gracePeriodSeconds"))
            return json_response(_SUCCESS | {"code": 201}, 201)
        if target.subresource == "portforward":
            if worker is None or worker.task.done():
                raise bad_request(
                    f"unable to forward port because pod is not running. Current status={phase(pod)}"
                )
            return await forward_ports(request, worker.sandbox_pid)
        self._faults.require_kubelet(pod, target.subresource or "")
        names = [container["name"] for container in containers_of(pod["spec"])]
        name = request.query.get("container") or pod["spec"]["containers"][0]["name"]
        if name not in names:
            raise bad_request(f"container {name} is not valid for pod {name_of(pod)}")
        container = worker.containers[name] if worker else None
        if target.subresource == "log" and is_fake(self._store, pod):
            return await send_fake_log(request, pod)
        if target.subresource == "log":
            return await send_log(
                request, pod, name, container, lambda: self._faults.is_kubelet_away(pod)
            )
        if container is None or container.pid is None:
            where = f"{namespace_of(pod)}/{name_of(pod)}"
            raise bad_request(
                f"cannot exec into container {name} of pod {where}: it is not running ({phase(pod)})"
            )
        return await run_exec(request, container)


def _verb(request: web.Request, target: Target) -> str:
    if request.method == "GET":
        return "get" if target.name else "watch" if flag(request, "watch") else "list"
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    if request.method not in _WRITE_VERBS:
        raise ApiError(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    return _WRITE_VERBS[request.method]


def _token(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _dry_run(request: web.Request) -> bool:
    return "All" in request.query.getall("dryRun", [])


def _delete_options(request: web.Request, options: Object) -> tuple[int | None, str]:
    grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
    propagation = (
        options.get("propagationPolicy") or request.query.get("propagationPolicy") or "Background"
    )
    return None if grace is None else int(grace), propagation


async def _read_body(request: web.Request) -> Any:
    if "protobuf" in request.content_type:
        advice = "use apply or create -f instead of a typed command such as `kubectl create job`"
        raise unsupported_media_type(f"this server reads JSON and YAML: {advice}")
    text = await request.text()
    try:
        return (
            yaml.safe_load(text) if "yaml" in request.content_type else json.loads(text or "null")
        )
    except ValueError as error:
        raise bad_request(f"couldn't read the request's body: {error}") from error
