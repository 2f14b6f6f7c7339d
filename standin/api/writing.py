"""Admission, create, update, patch and delete: what becomes of an object before it is in the Store."""

from __future__ import annotations

import copy
from typing import Any

from aiohttp import web

from standin.api import access, merge
from standin.api.apply import apply
from standin.api.defaults import fill_defaults
from standin.api.paths import Target
from standin.api.responses import SUCCESS, flag, json_response, object_response
from standin.api.rules import admit_pod, broken_rules, pod_security_violations, restricted
from standin.api.selectors import selector
from standin.api.validation import check_schema
from standin.api.webhooks import Webhooks
from standin.faults import Faults
from standin.settings import Settings
from standin.state.errors import (
    REQUIRED,
    ApiError,
    Cause,
    bad_request,
    invalid,
    modified,
    unsupported_media_type,
)
from standin.state.objects import Object, name_of
from standin.state.store import Store

# What a client cannot change: it stays as it is, whatever is sent.
_IMMUTABLE_METADATA = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "namespace",
    "name",
)
_APPLY = "application/apply-patch+yaml"
_WITH_TEMPLATES = ("Job", "StatefulSet", "Deployment")


class Writer:
    """Writes objects as users ask for it. Each method answers one request, or raises ApiError."""

    def __init__(self, store: Store, faults: Faults, settings: Settings) -> None:
        self._store = store
        self._faults = faults
        self._settings = settings
        self._webhooks = Webhooks(store)

    def create(self, request: web.Request, target: Target, body: Object) -> web.Response:
        """Create an object."""
        body.pop("status", None)
        warnings = self._admit(body, target, request, None)
        created = self._store.create(body, _dry_run(request))
        return object_response(created, 201, warnings)

    def replace(
        self, request: web.Request, target: Target, old: Object, new: Object
    ) -> web.Response:
        """Put an object in the place of another: the common end of update and patch."""
        _keep_identity(old, new, target)
        warnings: list[str] = []
        if target.subresource == "status":
            new = copy.deepcopy(old) | {"status": new.get("status", {})}
        else:
            # A pod's status is the kubelet's: what a client writes there is lost.
            if "status" in target.resource.subresources:
                new.pop("status", None)
                if "status" in old:
                    new["status"] = copy.deepcopy(old["status"])
            warnings = self._admit(new, target, request, old)
        if _dry_run(request):
            return object_response(new, 200, warnings)
        # Controllers and the kubelet hold on to these; equal ones stay the same object.
        for part in ("spec", "status"):
            if part in new and new[part] == old.get(part):
                new[part] = old[part]
        old.clear()
        old.update(new)
        return object_response(self._store.touch(old), 200, warnings)

    def patch(self, request: web.Request, target: Target, body: Any) -> web.Response:
        """Change an object by one of the patch formats."""
        if request.content_type == _APPLY:
            return self._apply(request, target, body)
        old = self._store.require(target.resource, target.namespace, target.name or "")
        match request.content_type:
            case "application/merge-patch+json":
                new = merge.merge_patch(copy.deepcopy(old), body)
            case "application/strategic-merge-patch+json" if not target.resource.custom:
                new = merge.strategic(copy.deepcopy(old), body)
            case other:
                raise unsupported_media_type(
                    f"the body of the request was in an unknown format ({other}) - accepted media types include: "
                    "application/merge-patch+json, application/apply-patch+yaml"
                )
        return self.replace(request, target, old, new)

    def delete(self, request: web.Request, target: Target, options: Object) -> web.Response:
        """Delete an object, or begin to."""
        resource = target.resource
        name = target.name or ""
        obj = self._store.require(resource, target.namespace, name)
        # A client that means an object it has seen, and not another one of its name, gives its uid.
        uid = obj["metadata"]["uid"]
        wanted = (options.get("preconditions") or {}).get("uid", uid)
        if wanted != uid:
            message = (
                f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {uid}"
            )
            raise ApiError(409, "Conflict", message)
        if not _dry_run(request) and "All" not in options.get("dryRun", []):
            self._store.delete(obj, *_delete_options(request, options))
            # It waits for its grace period or its finalizers.
            if (resource, target.namespace, name) in self._store.objects:
                return json_response(obj)
        details = {"name": name, "group": resource.group, "kind": resource.plural, "uid": uid}
        return json_response({**SUCCESS, "details": details})

    def delete_collection(
        self, request: web.Request, target: Target, options: Object
    ) -> web.Response:
        """Delete all objects of a kind that the request's selectors choose."""
        is_chosen = selector(request.query)
        for obj in self._store.list(target.resource.kind, target.namespace or None):
            if is_chosen(obj):
                self._store.delete(obj, *_delete_options(request, options))
        details = {"group": target.resource.group, "kind": target.resource.plural}
        return json_response({**SUCCESS, "details": details})

    def _apply(self, request: web.Request, target: Target, body: Object) -> web.Response:
        """Change an object by server-side apply, or create it."""
        manager = request.query.get("fieldManager")
        if not manager:
            message = "fieldManager: Required value: is required for apply patch"
            raise bad_request(f'PatchOptions.meta.k8s.io "" is invalid: {message}')
        if body.get("metadata", {}).get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        body.setdefault("metadata", {}).setdefault("name", target.name)
        if target.resource.namespaced:
            body["metadata"].setdefault("namespace", target.namespace)
        # To apply what does not exist creates it.
        old = self._store.objects.get((target.resource, target.namespace, target.name or ""))
        new = apply(old, body, manager, flag(request, "force"))
        if old is not None:
            return self.replace(request, target, old, new)
        warnings = self._admit(new, target, request, None)
        created = self._store.create(new, _dry_run(request))
        return object_response(created, 201, warnings)

    def _admit(
        self, obj: Object, target: Target, request: web.Request, old: Object | None
    ) -> list[str]:
        """Fill in defaults and check everything; return warnings, raise ApiError."""
        resource = target.resource
        _check_identity(obj, target)
        # kubectl create warns of unknown fields, apply refuses them, unless told otherwise.
        mode = "Strict" if request.content_type == _APPLY else "Warn"
        mode = request.query.get("fieldValidation", mode)
        warnings, causes = check_schema(obj, self._settings.kubernetes_version, mode)
        causes += broken_rules(obj, old)
        if causes:
            raise invalid(resource, obj["metadata"].get("name", ""), causes)
        fill_defaults(obj)
        # Who may not create may still change what exists.
        if old is None:
            self._faults.check_creation(obj)
            if resource.kind == "RoleBinding":
                access.check_grant(self._store, access.token_of(request), obj)
            if resource.kind == "Pod":
                admit_pod(self._store, obj)
        self._webhooks.admit(obj, old)
        if resource.kind in _WITH_TEMPLATES and restricted(self._store, target.namespace):
            # Such an object is stored all the same; only its pods will be refused.
            violations = pod_security_violations(obj["spec"]["template"]["spec"])
            if violations:
                listed = ", ".join(violations)
                warnings.append(f'would violate PodSecurity "restricted:latest": {listed}')
        return warnings


def _keep_identity(old: Object, new: Object, target: Target) -> None:
    """Carry over what a client cannot change. ApiError 409 if it has seen an older state than the newest."""
    for key in _IMMUTABLE_METADATA:
        if key in old["metadata"]:
            new["metadata"][key] = old["metadata"][key]
    revision = old["metadata"]["resourceVersion"]
    if new["metadata"].get("resourceVersion", revision) != revision:
        raise modified(target.resource, name_of(old))
    new["metadata"]["resourceVersion"] = revision


def _check_identity(obj: Object, target: Target) -> None:
    """Raise ApiError if an object is not of the kind and namespace of the URL, or has no name."""
    resource = target.resource
    if obj.get("kind") != resource.kind or obj.get("apiVersion") != resource.api_version:
        raise bad_request(
            f"the API version in the data ({obj.get('apiVersion')}) does not match the expected API version "
            f"({resource.api_version})"
        )
    meta = obj.setdefault("metadata", {})
    if resource.namespaced:
        namespace = meta.setdefault("namespace", target.namespace)
        if namespace != target.namespace:
            raise bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
    if not meta.get("name") and not meta.get("generateName"):
        message = "Required value: name or generateName is required"
        raise invalid(resource, "", [Cause("metadata.name", message, REQUIRED)])


def _dry_run(request: web.Request) -> bool:
    return "All" in request.query.getall("dryRun", [])


def _delete_options(request: web.Request, options: Object) -> tuple[int | None, str]:
    """Return the grace period in seconds, None for the pod's own, and what becomes of dependents."""
    grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
    propagation = (
        options.get("propagationPolicy") or request.query.get("propagationPolicy") or "Background"
    )
    if grace is not None:
        grace = int(grace)
    return grace, propagation
