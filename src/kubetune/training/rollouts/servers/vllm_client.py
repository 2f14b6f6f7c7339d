"""Talk to one vLLM server over HTTP, by vLLM's OpenAI-compatible API (vLLM 0.11 to 0.33).

Every call ends by the time it is given: it returns what the server answered, or raises ServerTrouble, or a kind of it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final
from urllib.parse import urlsplit

# A node that has gone without a word is noticed after 15 + 3 × 5 seconds, and not when the time is up.
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))

# More than 1,000 answers of 100,000 tokens, each token as id and log-probability.
_MOST_BYTES: Final = 4 * 2**30

_PIECE: Final = 2**20

_MESSAGE_CHARACTERS: Final = 300

# What does not become right by being asked again: the request itself, or the key.
_FINAL: Final = (400, 401, 403, 405, 407, 413, 422)


class ServerTrouble(Exception):
    """What a server did instead of its work. It may do it when it is asked again."""


class Refused(ServerTrouble):
    """A server that will say the same to the same request again."""


class NotApi(ServerTrouble):
    """A server, or what is in front of it, that answers a page, half an object, or another one."""


class Failed(ServerTrouble):
    """A server that fails at this request, by a status of 500. It may answer others."""


class Unknown(ServerTrouble):
    """A server that does not know the adapter or the address that it was asked for."""


class Server:
    """One vLLM server. Threads may share it: each call has a connection of its own."""

    def __init__(self, url: str) -> None:
        """`url`: such as `http://10.0.0.7:8000`."""
        self.url = url
        parts = urlsplit(url)
        self._path = parts.path.rstrip("/")
        self._host = parts.hostname or ""
        self._port = parts.port
        self._is_secure = parts.scheme == "https"

    def complete(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Return what the server answers to a request for completions. `deadline`: on the monotonic clock."""
        return self.ask("/v1/completions", request, deadline)

    def ask(self, path: str, request: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
        """Return the JSON object that the server answers at a path; without a request, to GET."""
        method = "GET" if request is None else "POST"
        text = self._asked(method, path, request, deadline)
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError):
            raise NotApi(f"answered {path} with what is not JSON: {_message_of(text)}") from None
        if not isinstance(reply, dict):
            raise NotApi(f"answered {path} with JSON that is no object")
        return reply

    def load(self, name: str, folder: str, deadline: float) -> None:
        """Have the server load an adapter from a folder that it sees too. It may have it already."""
        request = {"lora_name": name, "lora_path": folder}
        try:
            self._asked("POST", "/v1/load_lora_adapter", request, deadline)
        except Refused as error:
            # The name says what is in the file, so an adapter of that name is the right one.
            if "already been loaded" not in str(error):
                raise

    def unload(self, name: str, deadline: float) -> None:
        """Have the server forget an adapter. It may have forgotten it already."""
        try:
            self._asked("POST", "/v1/unload_lora_adapter", {"lora_name": name}, deadline)
        except Unknown:
            return

    def models(self, deadline: float) -> list[str]:
        """Return the names of the models and adapters that the server has."""
        cards = cards_of(self.ask("/v1/models", None, deadline))
        return [str(card["id"]) for card in cards]

    def card(self, deadline: float) -> dict[str, Any]:
        """Return what the server says of its model: `id`, and `max_model_len` if it names it."""
        for card in cards_of(self.ask("/v1/models", None, deadline)):
            # An adapter has a parent.
            if card.get("parent") is None:
                return card
        raise ServerTrouble("named no model")

    def _asked(
        self,
        method: str,
        path: str,
        request: dict[str, Any] | None,
        deadline: float,
    ) -> bytes:
        """Return the body of a good answer."""
        # A connection for each call: a kept one may be to a server that has gone since.
        connection = self._connection(_left(deadline))
        try:
            body = None if request is None else json.dumps(request).encode()
            connection.connect()
            _keep_alive(connection.sock)
            connection.request(method, self._path + path, body, self._headers())
            connection.sock.settimeout(_left(deadline))
            with _shut_at(connection.sock, deadline):
                response = connection.getresponse()
            _left(deadline)
            # A response that is not read to its end keeps its socket.
            with closing(response):
                text = _read(connection, response, deadline)
        except TimeoutError:
            raise ServerTrouble(f"did not answer {path}, and the time is up") from None
        except (OSError, HTTPException) as error:
            if time.monotonic() >= deadline:
                raise ServerTrouble(f"did not answer {path}, and the time is up") from None
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerTrouble(f"broke off {path}: {reason}") from None
        finally:
            connection.close()
        if response.status == 200:
            return text
        what = f"answered {response.status} to {path}: {_message_of(text)}"
        if 300 <= response.status < 400:
            raise Refused(f"{what} (it leads to {response.getheader('Location')})")
        if response.status == 401:
            raise Refused(f"{what}. Set the variable VLLM_API_KEY to the server's key")
        # An adapter or model that is unknown, or a server without that address at all.
        if response.status == 404:
            raise Unknown(what)
        if response.status in _FINAL:
            raise Refused(what)
        if response.status == 500:
            raise Failed(what)
        raise ServerTrouble(what)

    def _connection(self, seconds: float) -> HTTPConnection:
        kind = HTTPSConnection if self._is_secure else HTTPConnection
        return kind(self._host, self._port, timeout=seconds)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        # The variable that vLLM itself takes its key from. A run file would show the key to everybody.
        key = os.environ.get("VLLM_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        return headers


def cards_of(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the models of an answer to /v1/models. Raise ServerTrouble if it has another form."""
    cards = reply.get("data")
    if not isinstance(cards, list):
        raise NotApi("answered no list of models at /v1/models")
    for card in cards:
        if not isinstance(card, dict) or "id" not in card:
            raise NotApi(f"answered {card!r} for a model")
    return cards


def _left(deadline: float) -> float:
    """Return the seconds to a deadline. Raise TimeoutError where none are left."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the time is up")
    return seconds


@contextmanager
def _shut_at(connected: socket.socket, deadline: float) -> Iterator[None]:
    """Shut a connection at a deadline, as the time limit of a socket begins anew with each byte of the headers."""

    def shut() -> None:
        with suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_left(deadline), shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _keep_alive(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, number in _KEEPALIVE:
        option = getattr(socket, name, None)
        if option is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, number)


def _read(connection: HTTPConnection, response: HTTPResponse, deadline: float) -> bytes:
    """Return the whole body. A server that sends a byte now and then does not go beyond the deadline."""
    pieces = []
    size = 0
    while True:
        if connection.sock is not None:
            connection.sock.settimeout(_left(deadline))
        piece = response.read1(_PIECE)
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
        if size > _MOST_BYTES:
            raise ServerTrouble(f"answered more than {_MOST_BYTES >> 30} GiB")
        _left(deadline)
    # `read1` says nothing of a body that ends too early.
    if response.length:
        raise ServerTrouble(f"broke off {response.length} bytes before the end of its answer")
    return b"".join(pieces)


def _message_of(text: bytes) -> str:
    """Return what the body of an error says, in short."""
    message = text.decode(errors="replace")
    try:
        reply = json.loads(text)
        # vLLM: {"error": {"message": …}}; older ones {"message": …}; a path that does not exist: {"detail": …}
        error = reply.get("error", reply)
        message = error.get("message") or reply.get("detail") or message
    except (ValueError, AttributeError, RecursionError):
        pass
    return " ".join(str(message).split())[:_MESSAGE_CHARACTERS]
