"""Requests to an API server: repeated while it is away or starts, its warnings shown.

httpx2 sends them, as it does for lightkube, whose own client is not used: it does not have what is applied checked
strictly, knows no bookmarks of watches and no `sinceTime` of logs, repeats nothing, and drops the server's warnings.
kr8s has no server-side apply.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx2
from lightkube import ConfigError as LightkubeError

from kubetune.base.logs import scrub
from kubetune.errors import EnvironmentFault
from kubetune.k8s.api.answers import Object, retry_after, status_of, warnings_of
from kubetune.k8s.api.api_errors import (
    ApiCall,
    ApiError,
    Distrusted,
    NotLoggedIn,
    Unreachable,
    refusal,
)
from kubetune.k8s.api.credentials import Login
from kubetune.k8s.api.passing import PATIENCE_SECONDS, passing_refusal
from kubetune.k8s.api.startup_doubt import SENT, StartupDoubt

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
# A connection that died without a word is noticed after this time; nothing is lost by following a log anew.
_SILENCE_SECONDS = 60.0
_CONNECT_SECONDS = 10.0
_SHOWN_CHARACTERS = 500
_SWITCHED = 101
# Extension of a request: its answer goes on, as a log does.
_GOES_ON = "kubetune_goes_on"
# Bytes of the body of an answer. The longest are lists of pods, about 10 kB each.
_MOST_BYTES = 128 << 20
_MOST_BYTES_OF_A_REFUSAL = 1 << 20
# Part of OpenSSL's message.
_DISTRUST = "CERTIFICATE_VERIFY_FAILED"


def say(text: str) -> None:
    """Tell the person at the terminal something beside the results."""
    print(scrub(f"kubetune: {text}"), file=sys.stderr, flush=True)


class _Client(httpx2.Client):
    """Client whose websockets do not end because we read slowly.

    Answers to pings come in line with what a command prints, so where a reader pauses, as `less` does, they are late.
    """

    # `Any`: lightkube calls this with options of httpx2's that are not ours to name.
    def websocket(self, *args: Any, **options: Any) -> Any:
        return super().websocket(*args, keepalive_ping_timeout_seconds=None, **options)


class Tries:
    """The tries of one request: again after longer and longer pauses, for as long as its refusal is worth it."""

    def __init__(self, seconds: float, tell: Callable[[ApiError, float], None]) -> None:
        self._seconds = seconds
        self._tell = tell
        self._began = time.monotonic()
        self._pause = _FIRST_PAUSE_SECONDS

    def wait_or_raise(self, error: ApiError) -> None:
        """Wait until the next try. Raise the error where none is worth it, or time is up."""
        seconds = min(self._seconds, error.again_seconds)
        left = self._began + seconds - time.monotonic()
        if left <= 0:
            raise error
        pause = max(self._pause, error.pause_seconds)
        # The login program has explained itself, and the server is not to blame.
        if pause >= _LONGEST_PAUSE_SECONDS and not isinstance(error, NotLoggedIn):
            self._tell(error, seconds)
        time.sleep(min(pause, left))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)


class Connection:
    """Requests to one API server. `tell` gets what the user should know, each sentence once."""

    def __init__(
        self, login: Login, patience_seconds: float | None, tell: Callable[[str], None]
    ) -> None:
        self.address = login.way
        self._login = login
        if patience_seconds is None:
            patience_seconds = PATIENCE_SECONDS
        self._patience_seconds = patience_seconds
        self._tell = tell
        self._texts_told: set[str] = set()
        self._lock = threading.Lock()
        # Who has little patience with many requests has little with the silence after one.
        silence = min(_SILENCE_SECONDS, max(_CONNECT_SECONDS, self._patience_seconds))
        self.http = self.client(silence)
        # Followed logs hold a connection for each container: no question waits for one of the hundreds.
        self._streams = self.client()
        for client in (self.http, self._streams):
            weakref.finalize(self, client.close)
        self._doubt = StartupDoubt(patience_seconds)

    def client(self, silence_seconds: float | None = None) -> httpx2.Client:
        """Return a client that gives up after so much silence."""
        login = self._login

        def note(request: httpx2.Request) -> None:
            request.extensions[SENT] = time.monotonic()
            if login.tls_server_name:
                request.extensions["sni_hostname"] = login.tls_server_name

        try:
            return _Client(
                base_url=login.server,
                verify=login.verify,
                auth=login.auth,
                headers=[*login.headers, ("Accept-Encoding", "identity")],
                proxy=login.proxy,
                timeout=httpx2.Timeout(
                    silence_seconds or _SILENCE_SECONDS, connect=_CONNECT_SECONDS
                ),
                # As many at a time as are asked for, where httpx2 would keep the 101st waiting.
                limits=httpx2.Limits(max_connections=None),
                event_hooks={"request": [note], "response": [_limit]},
            )
        except (ValueError, httpx2.InvalidURL, ImportError) as error:
            raise EnvironmentFault(f"no connection can be made to {login.way}: {error}") from None

    def tell_once(self, text: str) -> None:
        """Tell the user something, however often it comes up."""
        with self._lock:
            is_new = text not in self._texts_told
            self._texts_told.add(text)
        if is_new:
            self._tell(text)

    def _say_started(self, meaning: str) -> None:
        self.tell_once(f"{self.address}: {meaning}; trying again")

    def send(
        self,
        method: str,
        question: ApiCall,
        params: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> httpx2.Response:
        """Return the answer to a request, repeated while nothing answers. Raise Refused, or Unreachable without one."""
        content = None
        headers = {}
        if body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = content_type
        request = self.http.build_request(
            method, question.path, params=params, content=content, headers=headers
        )
        tries = self.tries()
        while True:
            try:
                return self._attempt(question, request)
            except ApiError as error:
                tries.wait_or_raise(error)

    def tries(self, seconds: float | None = None) -> Tries:
        """Return the tries of one request, for so long at most."""
        if seconds is None:
            seconds = self._patience_seconds
        return Tries(min(seconds, self._patience_seconds), self._tell_of_waiting)

    def _attempt(self, question: ApiCall, request: httpx2.Request) -> httpx2.Response:
        """Send a request once, or until a refusal can be believed. Raise the error for a refusal."""
        with self._errors_explained():
            response = self.http.send(request)
            while self._doubt.holds(question, response, self.http, self._say_started):
                response = self.http.send(request)
        for warning in warnings_of(response):
            self.tell_once(f"the cluster warns: {warning}")
        if response.status_code >= 400:
            raise refusal(
                question, response.status_code, status_of(response), retry_after(response)
            )
        return response

    def _tell_of_waiting(self, error: ApiError, seconds: float) -> None:
        """Tell the user that a request is repeated for so many seconds."""
        problem = "does not answer"
        if error.pause_seconds:
            problem = f"asks for {error.pause_seconds:.0f} s without requests"
        elif error.code:
            problem = f"refuses for now ({error.code})"
        self.tell_once(f"{self.address} {problem}; trying for {seconds:.0f} s")

    @contextmanager
    def stream(
        self, question: ApiCall, params: Mapping[str, str], *, waits_for_node: bool = False
    ) -> Iterator[httpx2.Response]:
        """Open an answer that goes on, such as a log. Raise Unreachable when it breaks off.

        A log that is refused for the moment is asked for again. A watch is not: who watches can list meanwhile.
        """
        client = self._streams
        if question.verb == "watch":
            client = self.http
        timeout = self._streams.timeout
        tries = self.tries()
        while True:
            with (
                self._errors_explained(),
                client.stream(
                    "GET",
                    question.path,
                    params=params,
                    timeout=timeout,
                    extensions={_GOES_ON: True},
                ) as response,
            ):
                if response.status_code < 400:
                    yield response
                    return
                error = self.declined(question, response, waits_for_node=waits_for_node)
            if question.verb == "watch":
                raise error
            tries.wait_or_raise(error)

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Turn errors of httpx2 and lightkube into ours, which say what to do."""
        try:
            yield
        except httpx2.HTTPError as error:
            self._doubt.begin()
            reason = str(error) or type(error).__name__
            file = os.environ.get("KUBECONFIG", "~/.kube/config")
            if _DISTRUST in reason:
                raise Distrusted(
                    f"{self.address} does not prove who it is: {reason}; check certificate-authority and "
                    f"tls-server-name in the kubeconfig ({file})"
                ) from None
            raise Unreachable(
                f"{self.address} does not answer: {reason}; check your network and the kubeconfig ({file})"
            ) from None
        except LightkubeError as error:
            raise EnvironmentFault(str(error)) from None

    def declined(
        self, question: ApiCall, response: httpx2.Response, *, waits_for_node: bool
    ) -> ApiError:
        """Return the error for a refused stream or command: Refused, or Unreachable where another try may do.

        `waits_for_node`: no other pod can answer, so a node that cannot be asked is asked again too.
        """
        code = response.status_code
        status = status_of(response)
        error: ApiError = refusal(question, code, status, retry_after(response))
        if waits_for_node:
            message = str(status.get("message"))
            row = passing_refusal(code, message, question.kind, question.subresource)
            if row is not None and row.believed == "where another pod may answer":
                error.again_seconds = row.seconds
        if self._doubt.holds(question, response, self.http, self._say_started):
            return Unreachable(str(error))
        # A node that is away, for a moment or for good: its pods' status will show which.
        is_node_away = question.subresource == "log" and code >= 500
        if error.again_seconds or is_node_away:
            unreachable = Unreachable(str(error), error.pause_seconds)
            unreachable.again_seconds = error.again_seconds
            unreachable.code = code
            return unreachable
        return error


class _Limited(httpx2.SyncByteStream):
    """The body of an answer, which ends with an error where it is longer than an API server's are."""

    def __init__(self, response: httpx2.Response, most: int) -> None:
        assert isinstance(response.stream, httpx2.SyncByteStream)
        self._stream = response.stream
        self._url = response.url
        self._most = most

    def __iter__(self) -> Iterator[bytes]:
        received = 0
        for chunk in self._stream:
            received += len(chunk)
            if received > self._most:
                raise _no_api_server(self._url, f"more than {self._most:,} bytes")
            yield chunk

    def close(self) -> None:
        self._stream.close()


def _limit(response: httpx2.Response) -> None:
    """Limit the body of an answer before it is read. Read a refusal at once.

    The connection of exec is closed afterwards, and the text of its refusal would be lost.
    """
    if response.status_code == _SWITCHED:
        return
    # None was asked for. What is packed may be a thousand times as large as what is sent.
    coding = response.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise _no_api_server(response.url, f"the encoding {coding[:_SHOWN_CHARACTERS]!r}")

    request = response.request
    if response.status_code >= 400 or "sec-websocket-key" in request.headers:
        response.stream = _Limited(response, _MOST_BYTES_OF_A_REFUSAL)
        response.read()
    elif _GOES_ON not in request.extensions:
        response.stream = _Limited(response, _MOST_BYTES)


def _no_api_server(url: httpx2.URL, body: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{url.copy_with(query=None)} answered with {body}, as no API server does; does the kubeconfig's `server` lead "
        "to one, and no proxy or login page stand in between?"
    )
