"""Objects of one namespace of a cluster, asked for and changed: plain dicts in and out."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Iterator, Mapping

import httpx2

from kubetune.errors import ConfigError
from kubetune.k8s.api.answers import (
    Object,
    foreign,
    is_object,
    lines_of,
    list_of,
    object_of,
)
from kubetune.k8s.api.api_errors import ApiCall, NoNamespace, Refused, Unreachable, refusal
from kubetune.k8s.api.connection import Connection, say
from kubetune.k8s.api.credentials import not_a_namespace, read_login
from kubetune.k8s.api.kinds import KINDS

# Field manager of everything we apply.
MANAGER = "kubetune"

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_CREATED = 201
# Bytes of a line of a watch. etcd keeps no object of more than 1.5 MiB.
_MOST_BYTES_OF_AN_OBJECT = 16 << 20


class NamespaceObjects:
    """The objects of one namespace of the cluster that the kubeconfig points to.

    Requests are repeated for `patience_seconds` while nothing answers. `tell` shows the user warnings of the API
    server, each once, and that we wait.
    """

    def __init__(
        self,
        namespace: str | None = None,
        *,
        patience_seconds: float | None = None,
        tell: Callable[[str], None] = say,
    ) -> None:
        if namespace:
            problem = not_a_namespace(namespace)
            if problem:
                raise ConfigError(problem)
        login = read_login(tell)
        self.namespace = namespace or login.namespace
        self._connection = Connection(login, patience_seconds, tell)
        self.address = self._connection.address

    def tell_once(self, text: str) -> None:
        """Tell the user something, however often it comes up."""
        self._connection.tell_once(text)

    def get(self, kind: str, name: str) -> Object | None:
        """Return one object, or None where the namespace has none of that name, or the cluster no such kind."""
        response = self._send_or_none("GET", self._question("get", kind, name))
        if response is None:
            return None
        return object_of(response, KINDS[kind].name)

    def list(self, kind: str, labels: Mapping[str, str] | None = None) -> list[Object]:
        """Return the objects with these labels; none where the kind is not installed."""
        objects, _ = self.list_with_revision(kind, labels)
        return objects

    def list_with_revision(
        self,
        kind: str,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> tuple[builtins.list[Object], str]:
        """Return the objects with these labels and fields, and the revision from which a watch can go on."""
        params = _selectors(labels, fields)
        response = self._send_or_none("GET", self._question("list", kind), params)
        if response is None:
            return [], ""
        answer = list_of(response)

        # The items of a list do not say what they are.
        facts = {"apiVersion": KINDS[kind].api_version, "kind": KINDS[kind].name}
        items = [{**facts, **item} for item in answer.get("items") or []]
        metadata = answer.get("metadata") or {}
        return items, str(metadata.get("resourceVersion") or "")

    def require_namespace(self) -> None:
        """Raise NoNamespace if the namespace does not exist, since a list of its objects is just empty.

        Users without the right to read namespaces pass.
        """
        question = ApiCall("get", KINDS["Namespace"], "", self.namespace)
        try:
            object_of(self._connection.send("GET", question), "Namespace")
        except Refused as error:
            if isinstance(error, NoNamespace) or error.code != 403:
                raise

    def apply(self, obj: Object, *, dry_run: bool = False) -> bool:
        """Apply an object on the server; return True if it is new there. Fields that the server does not know are errors."""
        params = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        if dry_run:
            params["dryRun"] = "All"
        question = self._question("apply", obj["kind"], obj["metadata"]["name"])
        response = self._connection.send("PATCH", question, params, obj, _APPLY)
        return bool(object_of(response, obj["kind"])) and response.status_code == _CREATED

    def create(self, obj: Object) -> Object:
        """Create an object. Raise Refused with code 409 where it exists."""
        question = self._question("create", obj["kind"], obj["metadata"]["name"])
        response = self._connection.send("POST", question, {"fieldManager": MANAGER}, obj)
        return object_of(response, obj["kind"])

    def merge(self, kind: str, name: str, change: Object) -> Object:
        """Change only the fields that `change` holds."""
        question = self._question("patch", kind, name)
        params = {"fieldManager": MANAGER}
        response = self._connection.send("PATCH", question, params, change, _MERGE)
        return object_of(response, KINDS[kind].name)

    def delete(self, kind: str, name: str, *, grace_seconds: int | None = None) -> bool:
        """Delete an object and then what it owns. Return False where it did not exist."""
        question = self._question("delete", kind, name)
        options: Object = {"propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        response = self._send_or_none("DELETE", question, body=options)
        # The answer is the object as it was, or a Status where nothing is left of it.
        return response is not None and bool(object_of(response, KINDS[kind].name, "Status"))

    def serves(self, kind: str) -> bool:
        """True if the API server knows this kind."""
        # One object is enough, and an empty list is an answer too.
        question = self._question("list", kind)
        response = self._send_or_none("GET", question, {"limit": "1"})
        return response is not None and bool(list_of(response))

    def may(self, verb: str, kind: str, subresource: str = "") -> bool:
        """True if the API server lets us do this in the namespace."""
        attributes = {
            "namespace": self.namespace,
            "verb": verb,
            "group": KINDS[kind].group,
            "resource": KINDS[kind].plural,
            "subresource": subresource,
        }
        review = KINDS["SelfSubjectAccessReview"]
        body = {
            "apiVersion": review.api_version,
            "kind": review.name,
            "spec": {"resourceAttributes": attributes},
        }
        question = self._question("create", review.name)
        response = self._connection.send("POST", question, body=body)
        status = object_of(response, review.name).get("status") or {}
        return bool(status.get("allowed"))

    def watch(
        self,
        kind: str,
        labels: Mapping[str, str] | None = None,
        *,
        seconds: int,
        fields: Mapping[str, str] | None = None,
        since: str | None = None,
    ) -> Iterator[tuple[str, Object]]:
        """Yield all objects as `("ADDED", object)`, then each change, for that many seconds.

        With a revision in `since` yield only later changes, and now and then `("BOOKMARK", object)`, of which only the
        revision counts. Raise Unreachable when the connection breaks off, and Refused with code 410 where the server
        has forgotten the revision.
        """
        question = self._question("watch", kind)
        params = {"watch": "true", "timeoutSeconds": str(seconds), **_selectors(labels, fields)}
        # Bookmarks keep the revision recent, so that a watch can go on though nothing of ours has changed.
        if since is not None:
            params["resourceVersion"] = since
            params["allowWatchBookmarks"] = "true"
        with self._connection.stream(question, params) as response:
            for line in lines_of(response.iter_bytes(), _MOST_BYTES_OF_AN_OBJECT):
                yield _change(question, response, line)

    def _question(self, verb: str, kind: str, name: str = "", subresource: str = "") -> ApiCall:
        """Return what is asked for in this namespace, which messages name."""
        return ApiCall(verb, KINDS[kind], self.namespace, name, subresource)

    def _send_or_none(
        self,
        method: str,
        question: ApiCall,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
    ) -> httpx2.Response | None:
        """Return the answer to a request, or None for a missing object.

        A missing namespace is an error, and a missing kind where each cluster has it.
        """
        try:
            return self._connection.send(method, question, params, body)
        except Refused as error:
            is_last_word = not isinstance(error, NoNamespace) and not error.again_seconds
            if error.code == 404 and is_last_word:
                return None
            raise


def _selectors(
    labels: Mapping[str, str] | None, fields: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the parameters by which an API server chooses objects."""
    params = {}
    if labels:
        params["labelSelector"] = _joined(labels)
    if fields:
        params["fieldSelector"] = _joined(fields)
    return params


def _joined(selected: Mapping[str, str]) -> str:
    """Return a selector of all of these: `app=kubetune,run=fit`."""
    return ",".join(f"{key}={value}" for key, value in selected.items())


def _change(question: ApiCall, response: httpx2.Response, line: bytes) -> tuple[str, Object]:
    """Return a change from a line of a watch. Raise the error that the server sends in place of one."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        raise Unreachable(f"{question}: the connection broke off within a line") from None
    if isinstance(event, dict):
        change = event.get("type")
        obj = event.get("object")
        if change == "ERROR" and isinstance(obj, dict):
            # A Status: 410 says that the revision is too old.
            code = obj.get("code", 500)
            if isinstance(code, int):
                refused = refusal(question, code, obj)
                if refused.again_seconds:
                    raise Unreachable(str(refused), refused.pause_seconds)
                raise refused
        if isinstance(change, str) and is_object(obj) and "resourceVersion" in obj["metadata"]:
            return change, obj
    raise foreign(response, line.decode(errors="replace"))
