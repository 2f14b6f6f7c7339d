"""The only file that talks to an API server: plain dicts in and out, over lightkube's connection.

lightkube speaks exec's protocol. Its typed models are not used, because they drop the fields they do not know, nor its
kubeconfig, which knows only a part of kubectl's (credentials.py). Errors leave here as sentences (api_errors.py).
"""

from __future__ import annotations

import builtins
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, Protocol, TypeGuard

import httpx2
import lightkube
from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError
from lightkube.core.generic_client import BasicRequest
from lightkube.core.websocket import WebsocketDriver

from kubetune.base.logs import scrub
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import (
    NoNamespace,
    Question,
    Refused,
    Unreachable,
    is_doubtful,
    refusal,
)
from kubetune.k8s.api.credentials import Login, not_a_namespace, read_login
from kubetune.k8s.api.kinds import KINDS

Object = dict[str, Any]

MANAGER = "kubetune"
"""Field manager of everything we apply."""

PATIENCE_SECONDS = 60.0
"""Time for which requests are repeated while nothing answers."""

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_TRY_AGAIN = (429, 502, 503, 504)
STARTING_SECONDS = 30.0
"""Time for which rights are asked for again, that an API server refuses before it is ready."""

_READY_SECONDS = 5.0
_PAUSE_AT_START_SECONDS = 0.5
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0
# A connection that died without a word is noticed after this time; nothing is lost by following a log anew.
_SILENCE_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
_SHOWN_CHARACTERS = 500
# A line of a log begins with its time; the text may be empty.
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)(?: |$)")
_LIST = "List"
_NAMELESS = ("Status", "SelfSubjectAccessReview")
_SWITCHED = 101
# Of OpenSSL's message; no patience helps.
_DISTRUST = "CERTIFICATE_VERIFY_FAILED"


class Sink(Protocol):
    """Takes what a command in a pod writes."""

    def write(self, data: bytes, /) -> object:
        """Take bytes as a pod printed them."""


def say(text: str) -> None:
    """Tell the person at the terminal something beside the results."""
    print(scrub(f"kubetune: {text}"), file=sys.stderr, flush=True)


class Cluster:
    """One namespace of the cluster that the kubeconfig points to.

    Requests are repeated for `patience_seconds` while nothing answers. `tell` gets what the user should know:
    warnings of the API server, each once, and that we wait.
    """

    def __init__(
        self,
        namespace: str | None = None,
        *,
        patience_seconds: float | None = None,
        tell: Callable[[str], None] = say,
    ) -> None:
        if namespace and (told := not_a_namespace(namespace)):
            raise ConfigError(told)
        login = read_login(tell)
        self.namespace = namespace or login.namespace
        self.address = login.way
        self._patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        # Who has little patience with many requests has little with the silence after one.
        silence = min(_SILENCE_SECONDS, max(_CONNECT_SECONDS, self._patience_seconds))
        self._silence_of_one = httpx2.Timeout(silence, connect=_CONNECT_SECONDS)
        self._tell = tell
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        # Followed logs hold a connection for each container: they have a client of their own, so that none of the
        # hundreds is waited for by a question.
        self._http, self._streams = self._connected(login), self._connected(login)
        # Until when refusals of rights are doubted, and until when the server counts as ready without being asked.
        self._doubt_until: float | None = None
        self._ready_until = 0.0

    def _connected(self, login: Login) -> httpx2.Client:
        def name_server(request: httpx2.Request) -> None:
            if login.tls_server_name:
                request.extensions["sni_hostname"] = login.tls_server_name

        try:
            client = httpx2.Client(
                base_url=login.server,
                verify=login.verify,
                auth=login.auth,
                headers=login.headers,
                proxy=login.proxy,
                timeout=httpx2.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS),
                # As many at a time as are asked for, where httpx2 would keep the 101st waiting.
                limits=httpx2.Limits(max_connections=None),
                # A refusal is read while its connection is still open: later, exec's is closed, and what it said lost.
                event_hooks={"request": [name_server], "response": [_read_refusal]},
            )
        except (ValueError, httpx2.InvalidURL, ImportError) as error:
            raise EnvironmentFault(f"no connection can be made to {login.way}: {error}") from None
        weakref.finalize(self, client.close)
        return client

    def tell_once(self, text: str) -> None:
        """Tell the user something, however often it comes up."""
        with self._lock:
            is_new = text not in self._warned
            self._warned.add(text)
        if is_new:
            self._tell(text)

    # -- objects
    def get(self, kind: str, name: str) -> Object | None:
        """One object, or None where there is none of that name (or no such kind)."""
        response = self._send(
            "GET", Question("get", KINDS[kind], self.namespace, name), missing_ok=True
        )
        return _object(response, KINDS[kind].name) if response is not None else None

    def list(self, kind: str, labels: Mapping[str, str] | None = None) -> list[Object]:
        """The objects with these labels; none where the kind is not installed."""
        return self.list_with_revision(kind, labels)[0]

    def list_with_revision(
        self,
        kind: str,
        labels: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> tuple[builtins.list[Object], str]:
        """The objects with these labels and fields, and the revision at which it was so, for a watch to go on from."""
        question = Question("list", KINDS[kind], self.namespace)
        response = self._send("GET", question, _selectors(labels, fields), missing_ok=True)
        if response is None:
            return [], ""
        answer = _object(response, _LIST)
        # The items of a list do not say what they are.
        facts = {"apiVersion": KINDS[kind].api_version, "kind": KINDS[kind].name}
        items = [{**facts, **item} for item in answer.get("items") or []]
        return items, str((answer.get("metadata") or {}).get("resourceVersion") or "")

    def require_namespace(self) -> None:
        """Raise NoNamespace where there is no such namespace: it lists as an empty one. Who may not know is let go."""
        question = Question("get", KINDS["Namespace"], "", self.namespace)
        try:
            _object(self._asked("GET", question), "Namespace")
        except Refused as error:
            if isinstance(error, NoNamespace) or error.code != 403:
                raise

    def apply(self, obj: Object, *, dry_run: bool = False) -> Object:
        """Server-side apply, checked strictly: fields the server does not know are errors."""
        question = Question("apply", KINDS[obj["kind"]], self.namespace, obj["metadata"]["name"])
        params = {
            "fieldManager": MANAGER,
            "fieldValidation": "Strict",
            **({"dryRun": "All"} if dry_run else {}),
        }
        return _object(self._asked("PATCH", question, params, obj, _APPLY), obj["kind"])

    def create(self, obj: Object) -> Object:
        """Make an object that must not exist: Refused with code 409 where it does."""
        question = Question("create", KINDS[obj["kind"]], self.namespace, obj["metadata"]["name"])
        return _object(self._asked("POST", question, {"fieldManager": MANAGER}, obj), obj["kind"])

    def merge(self, kind: str, name: str, change: Object) -> Object:
        """Change only the fields that `change` holds."""
        question = Question("patch", KINDS[kind], self.namespace, name)
        return _object(
            self._asked("PATCH", question, {"fieldManager": MANAGER}, change, _MERGE),
            KINDS[kind].name,
        )

    def delete(self, kind: str, name: str, *, grace_seconds: int | None = None) -> bool:
        """Delete an object and then what it owns; False where there was none."""
        options: Object = {"propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        question = Question("delete", KINDS[kind], self.namespace, name)
        response = self._send("DELETE", question, body=options, missing_ok=True)
        return response is not None and bool(_object(response, KINDS[kind].name, "Status"))

    def serves(self, kind: str) -> bool:
        """The API server knows this kind."""
        question = Question("list", KINDS[kind], self.namespace)
        response = self._send("GET", question, {"limit": "1"}, missing_ok=True)
        return response is not None and bool(_object(response, _LIST))

    def may(self, verb: str, kind: str, subresource: str = "") -> bool:
        """We have the right to do this in the namespace, as the API server sees it."""
        found = KINDS[kind]
        attributes = {
            "namespace": self.namespace, "verb": verb, "group": found.group, "resource": found.plural,
            "subresource": subresource,
        }  # fmt: skip
        review = KINDS["SelfSubjectAccessReview"]
        body = {
            "apiVersion": review.api_version,
            "kind": review.name,
            "spec": {"resourceAttributes": attributes},
        }
        answer = _object(
            self._asked("POST", Question("create", review, self.namespace), body=body), review.name
        )
        return bool((answer.get("status") or {}).get("allowed"))

    def watch(
        self,
        kind: str,
        labels: Mapping[str, str] | None = None,
        *,
        seconds: int,
        fields: Mapping[str, str] | None = None,
        since: str | None = None,
    ) -> Iterator[tuple[str, Object]]:
        """All there is, as `("ADDED", object)`, and then each change, for so long. Unreachable when it breaks off.

        With a revision in `since` only what has changed after it, and now and then `("BOOKMARK", object)`, of which
        only the revision counts; Refused with code 410 where the server has forgotten it.
        """
        question = Question("watch", KINDS[kind], self.namespace)
        params = {"watch": "true", "timeoutSeconds": str(seconds), **_selectors(labels, fields)}
        if since is not None:
            params |= {"resourceVersion": since, "allowWatchBookmarks": "true"}
        with self._stream(question, params) as response:
            for line in _lines(response.iter_bytes()):
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    raise Unreachable(
                        f"{question}: the connection broke off within a line"
                    ) from None
                change, obj = (
                    (event.get("type"), event.get("object"))
                    if isinstance(event, dict)
                    else (None, None)
                )
                if (
                    change == "ERROR"
                    and isinstance(obj, dict)
                    and isinstance(obj.get("code", 500), int)
                ):
                    raise refusal(question, obj.get("code", 500), obj)
                if (
                    not isinstance(change, str)
                    or not _is_object(obj)
                    or "resourceVersion" not in obj["metadata"]
                ):
                    raise _foreign(response, line.decode(errors="replace"))
                yield change, obj

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
        """The log of a container, each line after its time. Unreachable when it breaks off, or its node is away.

        What the node says instead of the log has no time, and is told to the user. `since` is a time of whole seconds,
        `tail` a number of lines; `previous` asks for the container's last start.
        """
        question = Question("get", KINDS["Pod"], self.namespace, pod, "log")
        wanted = {
            "sinceTime": since,
            "tailLines": str(tail) if tail is not None else None,
            "follow": "true" if follow else None,
            "previous": "true" if previous else None,
        }
        params = {"container": container, "timestamps": "true"} | {
            k: v for k, v in wanted.items() if v is not None
        }
        with self._stream(question, params) as response:
            for line in _lines(response.iter_bytes()):
                text = line.decode(errors="replace")
                if _LOG_LINE.match(text):
                    yield text
                elif text.strip():
                    # Kubelet answers so where the file of the log has gone.
                    self.tell_once(f"the node of Pod {pod} says of its log: {text}")

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
        """Run a command in a running container; its exit code.

        At least one of the streams is needed. Unreachable when the connection breaks off, or `seconds` are over;
        NoProgram where the container lacks the command; Refused when it may not be, or its node is down.
        """
        if stdin is None and stdout is None and stderr is None:
            raise ValueError("exec needs at least one stream, or the API server refuses it")
        question = Question("exec", KINDS["Pod"], self.namespace, pod, "exec")
        outputs = {
            name: "true"
            for name, sink in (("stdout", stdout), ("stderr", stderr))
            if sink is not None
        }
        params: Any = {"container": container, "command": list(argv), **outputs}
        if stdin is not None:
            params["stdin"] = "true"
        request = BasicRequest("GET", KINDS["Pod"].path(self.namespace, pod, "exec"), params=params)
        sinks: Any = {"stdout": stdout or False, "stderr": stderr or False}
        try:
            driver = self._channel(request, seconds)
            return int(driver.write_and_read(stdin=stdin, **sinks).exit_code)
        except WebSocketUpgradeError as error:
            raise self._declined(question, error.response) from None
        except lightkube.ApiError as error:
            raise refusal(
                question, error.status.code or 500, {"message": error.status.message}
            ) from None
        except TimeoutError:
            raise Unreachable(f"{question}: no answer within {seconds:.0f} s") from None
        except (
            HTTPXWSException,
            httpx2.HTTPError,
            ValueError,
        ) as error:  # ValueError: what came is none of exec's
            raise Unreachable(
                f"{question}: the connection broke off ({str(error) or type(error).__name__})"
            ) from None

    # -- inside
    def _channel(self, request: BasicRequest, seconds: float | None) -> _Channel:
        """Open a connection of exec, again while the API server has just started: nothing has run by then."""
        while True:
            try:
                return _Channel(self._streams, request, seconds)
            except WebSocketUpgradeError as error:
                if not self._is_doubted(error.response):
                    raise

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and again while its refusal is doubted."""
        while True:
            response = self._http.send(request)
            if not self._is_doubted(response):
                return response

    def _is_doubted(self, response: httpx2.Response) -> bool:
        """True if a request is to be asked again, since a server that has just started may have refused it.

        A server that says that it is ready is believed, after one more try. Where it does not, or nobody may ask it,
        refusals are doubted, with a pause after each, for STARTING_SECONDS; then no more, until it has been away.
        """
        message = str(_status(response).get("message"))
        if not is_doubtful(response.status_code, message):
            return False
        now = time.monotonic()
        if now < self._ready_until:
            return False
        if self._doubt_until is None:
            self._doubt_until = now + min(STARTING_SECONDS, self._patience_seconds)
        if now > self._doubt_until:
            return False
        try:
            code = self._http.get("/readyz", timeout=self._silence_of_one).status_code
        except httpx2.HTTPError:
            return True
        if code in (401, 403) or code >= 500:
            self.tell_once(f"{self.address} has just started and knows no rights yet; trying again")
            time.sleep(_PAUSE_AT_START_SECONDS)
        else:
            # It may have become ready since it refused: one more try decides.
            self._ready_until = time.monotonic() + _READY_SECONDS
        return True

    def _note_absence(self) -> None:
        """The server does not answer: whatever comes back may have just started."""
        with self._lock:
            self._doubt_until, self._ready_until = None, 0.0

    def _asked(
        self,
        method: str,
        question: Question,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> httpx2.Response:
        response = self._send(method, question, params, body, content_type)
        assert response is not None
        return response

    def _send(
        self,
        method: str,
        question: Question,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        *,
        missing_ok: bool = False,
    ) -> httpx2.Response | None:
        """One request, repeated while nothing answers; None for a missing object where that is no error."""
        path = question.kind.path(question.namespace, question.name, question.subresource)
        if method == "POST":
            path = question.kind.path(question.namespace)
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if body is not None else {}
        asked: list[float] = []
        for last in self._attempts(asked):
            try:
                response = self._answer(
                    self._http.build_request(
                        method,
                        path,
                        params=params,
                        content=content,
                        headers=headers,
                        timeout=self._silence_of_one,
                    )
                )
            except httpx2.HTTPError as error:
                self._note_absence()
                if last or _DISTRUST in str(error):
                    raise Unreachable(self._silence(error)) from None
                continue
            if response.status_code in _TRY_AGAIN and not last:
                asked.append(_retry_after(response))
                continue
            self._show_warnings(response)
            if response.status_code == 404 and missing_ok and not _is_missing_namespace(response):
                return None
            if response.status_code >= 400:
                raise refusal(question, response.status_code, _status(response))
            return response
        raise AssertionError("the last attempt returns or raises")

    def _attempts(self, asked: builtins.list[float]) -> Iterator[bool]:
        """One item for each attempt, with growing pauses between them: whether it is the last.

        `asked` gets the seconds that the server has asked for since.
        """
        deadline, pause = time.monotonic() + self._patience_seconds, _FIRST_PAUSE_SECONDS
        yield False
        while (left := deadline - time.monotonic()) > 0:
            wanted = asked.pop() if asked else 0.0
            if max(pause, wanted) >= _LONGEST_PAUSE_SECONDS:
                how = f"asks for {wanted:.0f} s without requests" if wanted else "does not answer"
                self.tell_once(f"{self.address} {how}; trying for {self._patience_seconds:.0f} s")
            time.sleep(min(max(pause, wanted), left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            yield False
        yield True

    def _silence(self, error: Exception) -> str:
        if _DISTRUST in str(error):
            return (
                f"{self.address} does not prove who it is: {error}; check certificate-authority and tls-server-name in "
                f"the kubeconfig ({os.environ.get('KUBECONFIG', '~/.kube/config')})"
            )
        return (
            f"{self.address} does not answer: {error or type(error).__name__}; check your network and the kubeconfig "
            f"({os.environ.get('KUBECONFIG', '~/.kube/config')})"
        )

    @contextmanager
    def _stream(self, question: Question, params: Mapping[str, str]) -> Iterator[httpx2.Response]:
        path = question.kind.path(question.namespace, question.name, question.subresource)
        try:
            client = self._http if question.verb == "watch" else self._streams
            with client.stream("GET", path, params=params) as response:
                if response.status_code >= 400:
                    raise self._declined(question, response)
                yield response
        except httpx2.HTTPError as error:
            self._note_absence()
            raise Unreachable(self._silence(error)) from None

    def _declined(self, question: Question, response: httpx2.Response) -> EnvironmentFault:
        """The error for a refused stream: Refused, or Unreachable where another try may do."""
        code, said = response.status_code, str(_status(response).get("message") or "")
        if code in _TRY_AGAIN or self._is_doubted(response):
            told = f"{question}: the API server is not ready ({code}): {said[:_SHOWN_CHARACTERS]}"
            return Unreachable(told, _retry_after(response))
        error = refusal(question, code, _status(response))
        if question.subresource == "log" and code >= 500:
            # The node is away, for a moment or for good; what becomes of its pods will tell.
            return Unreachable(str(error))
        return error

    def _show_warnings(self, response: httpx2.Response) -> None:
        """Warning headers: `299 - "text"`. A pod template that pod security will refuse shows only here."""
        for header in response.headers.get_list("warning"):
            text = header.split(" ", 2)[-1].strip('"').replace('\\"', '"')
            self.tell_once(f"the cluster warns: {text}")


class _Channel(WebsocketDriver):
    """A connection of exec that nobody's silence ends but the server's.

    Answers to pings come in line with what the command prints, so where a reader pauses, as `less` does, they are late;
    a connection that died is noticed by `_SILENCE_SECONDS` all the same.
    """

    def __init__(self, client: httpx2.Client, request: BasicRequest, seconds: float | None) -> None:
        self._timeout = seconds
        self._ws = client.websocket(
            request.url,
            subprotocols=self.PROTOCOLS,
            params=request.params,
            keepalive_ping_timeout_seconds=None,
            timeout=httpx2.Timeout(seconds or _SILENCE_SECONDS, connect=_CONNECT_SECONDS),
        )


def _selectors(
    labels: Mapping[str, str] | None, fields: Mapping[str, str] | None = None
) -> dict[str, str]:
    wanted = {"labelSelector": labels, "fieldSelector": fields}
    return {
        name: ",".join(f"{key}={value}" for key, value in of.items())
        for name, of in wanted.items()
        if of
    }


def _read_refusal(response: httpx2.Response) -> None:
    is_no_channel = (
        "sec-websocket-key" in response.request.headers and response.status_code != _SWITCHED
    )
    if response.status_code >= 400 or is_no_channel:
        response.read()


def _retry_after(response: httpx2.Response) -> float:
    """Seconds for which an overloaded server asks to be spared (RFC 9110, 10.2.3), in the form that API servers use."""
    said = response.headers.get("retry-after", "")
    return float(said) if said.isascii() and said.isdecimal() else 0.0


def _object(response: httpx2.Response, *kinds: str) -> Object:
    """The answer, an object of one of these kinds. Raises EnvironmentFault where something else has answered."""
    answer = _decoded(response)
    kind = str(answer.get("kind"))
    items = answer.get("items") or []
    if (
        _LIST in kinds
        and kind.endswith(_LIST)
        and isinstance(items, list)
        and all(map(_is_object, items))
    ):
        return answer
    if kind in kinds and (kind in _NAMELESS or _is_object(answer)):
        return answer
    raise _foreign(response, response.text)


def _is_object(found: object) -> TypeGuard[Object]:
    return isinstance(found, dict) and isinstance(found.get("metadata"), dict)


def _foreign(response: httpx2.Response, said: str) -> EnvironmentFault:
    """The error for an answer that no API server gives to what was asked."""
    return EnvironmentFault(
        f"{response.url.copy_with(query=None)} answered with what is no object of Kubernetes "
        f"({said[:_SHOWN_CHARACTERS]!r}); does the kubeconfig's `server` lead to an API server, "
        "and no login page stand in between?"
    )


def _decoded(response: httpx2.Response) -> Object:
    try:
        answer = response.json()
    except (ValueError, RecursionError):
        answer = None
    return answer if isinstance(answer, dict) else {}


def _status(response: httpx2.Response) -> Object:
    """The Status of a refusal; what a proxy in between says instead is kept as its message."""
    found = _decoded(response)
    if found.get("kind") == "Status" and isinstance(found.get("details") or {}, dict):
        return found
    said = found.get("message") or response.text.strip() or response.reason_phrase
    return {"message": str(said)[:_SHOWN_CHARACTERS]}


def _is_missing_namespace(response: httpx2.Response) -> bool:
    return "namespaces " in str(_status(response).get("message"))


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their end; only a newline ends one, whatever Unicode thinks of other characters."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest
