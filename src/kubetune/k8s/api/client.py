"""Objects of one namespace of a cluster, logs of its containers, and commands in them: plain dicts in and out.

lightkube speaks exec's protocol. Its typed models are not used, because they drop the fields they do not know.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Protocol

import httpx2
import lightkube
from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError
from lightkube.core.generic_client import BasicRequest
from lightkube.core.websocket import WebsocketDriver
from lightkube.models.meta_v1 import Status

from kubetune.errors import ConfigError
from kubetune.k8s.api.answers import (
    Object,
    cut_lines,
    foreign,
    is_object,
    lines_of,
    list_of,
    object_of,
)
from kubetune.k8s.api.api_errors import NoNamespace, Question, Refused, Unreachable, refusal
from kubetune.k8s.api.connection import Connection, say
from kubetune.k8s.api.credentials import not_a_namespace, read_login
from kubetune.k8s.api.kinds import KINDS
from kubetune.k8s.api.kubeconfig import build_decoders
from kubetune.k8s.api.passing import PATIENCE_SECONDS

__all__ = ["PATIENCE_SECONDS", "Cluster", "Object", "Sink", "say"]

# Field manager of everything we apply.
MANAGER = "kubetune"

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_CREATED = 201
# Of a line of a watch. etcd keeps no object of more than 1.5 MiB.
_MOST_BYTES_OF_AN_OBJECT = 16 << 20
# A progress bar that returns to the start of its line never ends it.
_MOST_BYTES_OF_A_LOG_LINE = 1 << 20
# A line of a log begins with its time, and its text may be empty.
# 2026-11-20T10:15:00.123456789Z text
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)(?: |$)")
# The beginning of such a time, where a line was cut off within it.
_TORN_TIME = re.compile(r"\d[\d:.TZ+-]*")

# A command's end is a Status, which lightkube decodes in the thread that asked for the command.
build_decoders(Status)


class Sink(Protocol):
    """Takes what a command in a pod writes."""

    def write(self, data: bytes, /) -> object:
        """Take bytes as a pod printed them."""


class Cluster:
    """One namespace of the cluster that the kubeconfig points to.

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

    # -- objects
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
        question = Question("get", KINDS["Namespace"], "", self.namespace)
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

    # -- pods
    def log(
        self,
        pod: str,
        container: str,
        *,
        since: str | None = None,
        tail: int | None = None,
        follow: bool = False,
        previous: bool = False,
    ) -> Iterator[str]:
        """Yield the log of a container, each line after its time.

        A last line without a newline may be cut off: where a kubelet stops, the API server ends its answer within a
        line, as if that were all. `since` is a time of whole seconds, `tail` a number of lines, and `previous` asks for
        the container's last start. Of a very long line the first part is yielded, and the user told. Raise Unreachable
        when the connection breaks off, or the node is away.
        """
        params = {"container": container, "timestamps": "true"}
        if since is not None:
            params["sinceTime"] = since
        if tail is not None:
            params["tailLines"] = str(tail)
        if follow:
            params["follow"] = "true"
        if previous:
            params["previous"] = "true"

        def tell_of_cut() -> None:
            self.tell_once(
                f"a line of the log of Pod {pod}, container {container}, has more than {_MOST_BYTES_OF_A_LOG_LINE:,} "
                "bytes; its rest is left out here (kubectl logs shows it)"
            )

        question = self._question("get", "Pod", pod, "log")
        with self._connection.stream(question, params) as response:
            chunks = cut_lines(response.iter_bytes(), _MOST_BYTES_OF_A_LOG_LINE, tell_of_cut)
            for line in lines_of(chunks):
                text = line.decode(errors="replace")
                if _LOG_LINE.match(text) or _TORN_TIME.fullmatch(text):
                    yield text
                elif text.strip():
                    # A line without a time is kubelet's message in place of the log, such as that its file is gone.
                    self.tell_once(f"the node of Pod {pod} says of its log: {text.rstrip()}")

    def exec(
        self,
        pod: str,
        container: str,
        argv: Sequence[str],
        *,
        stdin: BinaryIO | None = None,
        stdout: Sink | None = None,
        stderr: Sink | None = None,
        seconds: float | None = None,
    ) -> int:
        """Run a command in a running container and return its exit code. It needs at least one stream.

        Raise Unreachable when the connection breaks off, or `seconds` are over, NoProgram where the container lacks
        the command, and Refused when we may not, or the node is down.
        """
        params: Any = {"container": container, "command": list(argv)}
        for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
            if stream is not None:
                params[name] = "true"

        question = self._question("exec", "Pod", pod, "exec")
        request = BasicRequest("GET", question.path, params=params)
        sinks: Any = {"stdout": stdout or False, "stderr": stderr or False}
        tries = self._connection.tries(seconds)
        try:
            while True:
                # A client of its own: its silence ends this command, and no other.
                with self._connection.client(seconds) as http:
                    driver = WebsocketDriver(http, request, seconds)
                    try:
                        return int(driver.write_and_read(stdin=stdin, **sinks).exit_code)
                    except WebSocketUpgradeError as error:
                        declined = self._connection.declined(question, error.response)
                # The command has not run yet, so it can be asked for again.
                tries.wait_or_raise(declined)
        # lightkube's error of the final Status, such as of a program that does not exist.
        except lightkube.ApiError as error:
            status = error.status
            raise refusal(question, status.code or 500, {"message": status.message}) from None
        # A ValueError: the answer does not follow exec's protocol.
        except (HTTPXWSException, httpx2.HTTPError, ValueError) as error:
            if isinstance(error, httpx2.TimeoutException) and seconds is not None:
                raise Unreachable(f"{question}: no answer within {seconds:.0f} s") from None
            reason = str(error) or type(error).__name__
            raise Unreachable(f"{question}: the connection broke off ({reason})") from None

    # -- inside
    def _question(self, verb: str, kind: str, name: str = "", subresource: str = "") -> Question:
        """Return what is asked for in this namespace, which messages name."""
        return Question(verb, KINDS[kind], self.namespace, name, subresource)

    def _send_or_none(
        self,
        method: str,
        question: Question,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
    ) -> httpx2.Response | None:
        """Return the answer to a request, or None for a missing object. A missing namespace is an error."""
        try:
            return self._connection.send(method, question, params, body)
        except Refused as error:
            if error.code == 404 and not isinstance(error, NoNamespace):
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


def _change(question: Question, response: httpx2.Response, line: bytes) -> tuple[str, Object]:
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
