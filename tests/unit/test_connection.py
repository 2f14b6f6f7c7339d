"""A connection to an API server that has just started, or that answers without end, by a server that is told how."""

from __future__ import annotations

import gzip
import io
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest

from kubetune import errors
from kubetune.k8s.api.answers import cut_lines, lines_of
from kubetune.k8s.api.api_errors import ApiCall, Refused
from kubetune.k8s.api.client import Cluster
from kubetune.k8s.api.connection import Connection
from kubetune.k8s.api.credentials import Login
from kubetune.k8s.api.kinds import KINDS

PODS = ApiCall("list", KINDS["Pod"], "fit")
JOBSETS = ApiCall("list", KINDS["JobSet"], "fit")
NO_KIND = "the server could not find the requested resource"
REFUSAL = {
    "kind": "Status",
    "message": 'pods is forbidden: User "dev" cannot list resource "pods" in API group "" in the namespace "fit"',
}


class Server:
    """An API server that is ready, and refuses so many requests for pods."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.connection = Connection(
            Login("http://server", "fit", ssl.create_default_context()), 60.0, lambda text: None
        )
        hooks = self.connection.http.event_hooks
        transport = httpx2.MockTransport(self.answer)
        self.connection.http.close()
        self.connection.http = httpx2.Client(
            base_url="http://server", transport=transport, event_hooks=hooks
        )

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/readyz":
            return httpx2.Response(200)
        if self.refusals == 0:
            return httpx2.Response(200, json={"items": []})
        self.refusals -= 1
        if self.refusals == 1:
            # Before this refusal arrives, another request is refused too, and finds the server ready after that.
            self.connection.send("GET", PODS)
        return httpx2.Response(403, json=REFUSAL)


def test_a_refusal_from_before_the_server_was_ready_is_asked_again() -> None:
    """Another request was refused too, and found the server ready while this one's refusal was on its way."""
    server = Server(refusals=2)
    assert server.connection.send("GET", PODS).json() == {"items": []}


def test_a_server_that_is_ready_is_believed_after_one_more_try() -> None:
    server = Server(refusals=100)
    with pytest.raises(Refused):
        server.connection.send("GET", PODS)
    assert server.refusals == 98


class WithoutKinds(Server):
    """An API server that knows no kind in so many answers, and says by `/readyz` whether it is ready."""

    def __init__(self, refusals: int, *ready: int) -> None:
        super().__init__(refusals)
        self._ready = list(ready)  # the last one again and again
        self.asked = 0

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/readyz":
            code = self._ready.pop(0) if len(self._ready) > 1 else self._ready[0]
            return httpx2.Response(code)
        self.asked += 1
        self.refusals -= 1
        if self.refusals < 0:
            return httpx2.Response(200, json={"items": []})
        return httpx2.Response(404, json={"kind": "Status", "message": NO_KIND})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubetune.k8s.api.startup_doubt._PAUSE_AT_START_SECONDS", 0.0)


@pytest.mark.parametrize("ready", [200, 403, 500])
def test_a_kind_that_each_cluster_has_is_asked_for_until_it_is_there(ready: int) -> None:
    server = WithoutKinds(2, ready)
    assert server.connection.send("GET", PODS).json() == {"items": []}


@pytest.mark.usefixtures("quick")
def test_a_kind_that_a_cluster_may_lack_is_asked_for_until_the_server_is_ready() -> None:
    server = WithoutKinds(3, 500, 500, 200)
    assert server.connection.send("GET", JOBSETS).json() == {"items": []}


@pytest.mark.parametrize(("ready", "asked"), [(200, 2), (403, 1)])
def test_a_cluster_may_lack_a_kind(ready: int, asked: int) -> None:
    """Who may not ask whether the server is ready has to believe it, since many clusters lack some kind."""
    server = WithoutKinds(100, ready)
    with pytest.raises(Refused, match="the cluster has no kind JobSet"):
        server.connection.send("GET", JOBSETS)
    assert server.asked == asked


class Endless(ThreadingHTTPServer):
    """Answers each request with bytes until the other side hangs up, or with content that unpacks to many."""

    daemon_threads = True

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Endless)
        self.status = status
        self.content = content  # packed; empty: without end
        self.encodings_asked_for: list[str] = []


class _Endless(BaseHTTPRequestHandler):
    server: Endless

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.server.encodings_asked_for.append(self.headers["Accept-Encoding"])
        self.send_response(self.server.status)
        if self.server.content:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(self.server.content)
        piece = b" " * 65536
        with suppress(OSError):
            while not self.server.content:
                self.wfile.write(piece)

    do_POST = do_GET


@contextmanager
def endless(folder: Path, status: int, content: bytes = b"") -> Iterator[tuple[Endless, Cluster]]:
    """Yield a server, and what asks it."""
    with Endless(status, content) as server, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        (folder / "config").write_text(
            f"clusters: [{{name: c, cluster: {{server: 'http://127.0.0.1:{server.server_port}'}}}}]\n"
            "contexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n"
        )
        patch.setenv("KUBECONFIG", str(folder / "config"))
        yield server, Cluster(patience_seconds=0.0, tell=lambda text: None)
        server.shutdown()


CALLS: dict[str, Callable[[Cluster], object]] = {
    "get": lambda cluster: cluster.get("Pod", "fit-0"),
    "list": lambda cluster: cluster.list("Pod"),
    "create": lambda cluster: cluster.create({"kind": "Pod", "metadata": {"name": "fit-0"}}),
    "watch": lambda cluster: list(cluster.watch("Pod", seconds=1)),
    "exec": lambda cluster: cluster.exec("fit-0", "t", ["true"], stdout=io.BytesIO(), seconds=9),
}


@pytest.mark.parametrize("status", [200, 401, 403, 500])
@pytest.mark.parametrize("name", CALLS)
def test_an_answer_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, status: int
) -> None:
    for limit in (
        "connection._MOST_BYTES",
        "connection._MOST_BYTES_OF_A_REFUSAL",
        "namespace_objects._MOST_BYTES_OF_AN_OBJECT",
    ):
        monkeypatch.setattr(f"kubetune.k8s.api.{limit}", 100_000)
    with endless(tmp_path, status) as (server, cluster):
        with pytest.raises(errors.EnvironmentFault, match="more than 100,000 bytes"):
            CALLS[name](cluster)
        assert server.encodings_asked_for == ["identity"]


@pytest.mark.parametrize("status", [200, 403])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_packed_is_refused_before_it_is_unpacked(
    tmp_path: Path, name: str, status: int
) -> None:
    with (
        endless(tmp_path, status, gzip.compress(bytes(1 << 20))) as (_, cluster),
        pytest.raises(errors.EnvironmentFault, match="the encoding 'gzip', as no API server does"),
    ):
        CALLS[name](cluster)


def test_lines_are_limited_and_joined_of_many_parts() -> None:
    assert list(lines_of([b"a", b"b\nc\n", b"", b"\nd", b"e"], 3)) == [
        b"ab\n",
        b"c\n",
        b"\n",
        b"de",
    ]
    with pytest.raises(errors.EnvironmentFault, match="a line of more than 3 bytes"):
        list(lines_of([b"a\nbc", b"de"], 3))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_long_line_is_cut_at_the_same_byte_however_it_comes(size: int) -> None:
    whole = b"abc\nabcd\n\nabcdefgh\nab\nabcde"
    cuts = list[None]()
    chunks = [whole[at : at + size] for at in range(0, len(whole), size)]
    lines = list(lines_of(cut_lines(chunks, 3, lambda: cuts.append(None))))
    assert lines == [b"abc\n", b"abc\n", b"\n", b"abc\n", b"ab\n", b"abc"]
    assert len(cuts) == 3


def test_a_line_of_a_log_without_end_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sends a line without its end is told of once, and of its line a first part is kept."""
    monkeypatch.setattr("kubetune.k8s.api.client._MOST_BYTES_OF_A_LOG_LINE", 100_000)
    sentences = list[str]()

    class Enough(Exception):
        pass

    def tell(text: str) -> None:
        sentences.append(text)
        raise Enough

    with endless(tmp_path, 200) as (_, cluster):
        cluster._connection._tell = tell
        with pytest.raises(Enough):
            list(cluster.log("fit-0", "trainer"))
    assert sentences == [
        "a line of the log of Pod fit-0, container trainer, has more than 100,000 bytes; its rest is left out here "
        "(kubectl logs shows it)"
    ]
