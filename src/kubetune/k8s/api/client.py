"""One namespace of a cluster: its objects, logs of its containers, and commands in them.

lightkube speaks exec's protocol. Its typed models are not used, because they drop the fields they do not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Protocol

import httpx2
import lightkube
from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError
from lightkube.core.generic_client import BasicRequest
from lightkube.core.websocket import WebsocketDriver
from lightkube.models.meta_v1 import Status

from kubetune.k8s.api.answers import (
    Object,
    cut_lines,
    lines_of,
)
from kubetune.k8s.api.api_errors import Unreachable, refusal
from kubetune.k8s.api.connection import say
from kubetune.k8s.api.kubeconfig import build_decoders
from kubetune.k8s.api.namespace_objects import NamespaceObjects
from kubetune.k8s.api.passing import PATIENCE_SECONDS

__all__ = ["PATIENCE_SECONDS", "Cluster", "Object", "Sink", "say"]

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


class Cluster(NamespaceObjects):
    """A namespace with its objects and what runs in its containers."""

    def log(
        self,
        pod: str,
        container: str,
        *,
        since: str | None = None,
        tail: int | None = None,
        follow: bool = False,
        previous: bool = False,
        waits_for_node: bool = False,
        on_open: Callable[[], None] = lambda: None,
    ) -> Iterator[str]:
        """Yield the log of a container, each line after its time.

        A last line without a newline may be cut off: where a kubelet stops, the API server ends its answer within a
        line, as if that were all. `since` is a time of whole seconds, `tail` a number of lines, and `previous` asks for
        the container's last start. `waits_for_node`: ask for some seconds while the node cannot be asked. `on_open` is
        called once the server begins to answer. The first part of a very long line is yielded, and the user told. Raise
        Unreachable when the connection breaks off, or the node is away.
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
        stream = self._connection.stream(question, params, waits_for_node=waits_for_node)
        with stream as response:
            on_open()
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
        waits_for_node: bool = False,
    ) -> int:
        """Run a command in a running container and return its exit code. It needs at least one stream.

        `waits_for_node`: while the node cannot be asked, ask again for some seconds, since no other pod will do.
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
                        declined = self._connection.declined(
                            question, error.response, waits_for_node=waits_for_node
                        )
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
