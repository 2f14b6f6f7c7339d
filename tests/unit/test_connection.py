"""A connection to an API server that has just started, by a server that answers as it is told."""

from __future__ import annotations

import ssl

import httpx2
import pytest

from kubetune.k8s.api.api_errors import Question, Refused
from kubetune.k8s.api.connection import Connection
from kubetune.k8s.api.credentials import Login
from kubetune.k8s.api.kinds import KINDS

PODS = Question("list", KINDS["Pod"], "fit")
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
