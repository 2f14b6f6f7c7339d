"""Answers of an API server, checked to be objects of Kubernetes: a login page in between may answer in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import httpx2

from kubetune.errors import EnvironmentFault

Object = dict[str, Any]

_LIST = "List"
# Answers without the metadata of an object.
_NAMELESS = ("Status", "SelfSubjectAccessReview")
_SHOWN_CHARACTERS = 500


def object_of(response: httpx2.Response, *kinds: str) -> Object:
    """Return the answer, an object of one of these kinds. Raise EnvironmentFault if something else answered."""
    answer = _decoded(response)
    kind = answer.get("kind")
    if kind in kinds and (kind in _NAMELESS or is_object(answer)):
        return answer
    raise foreign(response, response.text)


def list_of(response: httpx2.Response) -> Object:
    """Return the answer, a list of objects. Raise EnvironmentFault if something else answered."""
    answer = _decoded(response)
    items = answer.get("items") or []
    is_list = str(answer.get("kind")).endswith(_LIST) and isinstance(items, list)
    if is_list and all(is_object(item) for item in items):
        return answer
    raise foreign(response, response.text)


def is_object(value: object) -> TypeGuard[Object]:
    """True if a value has what every object of Kubernetes has."""
    return isinstance(value, dict) and isinstance(value.get("metadata"), dict)


def foreign(response: httpx2.Response, text: str) -> EnvironmentFault:
    """Return the error for an answer that no API server gives to such a request."""
    return EnvironmentFault(
        f"{response.url.copy_with(query=None)} answered with what is no object of Kubernetes "
        f"({text[:_SHOWN_CHARACTERS]!r}); does the kubeconfig's `server` lead to an API server, "
        "and no login page stand in between?"
    )


def status_of(response: httpx2.Response) -> Object:
    """Return the Status of a refusal, or one whose message is the text of a proxy in between."""
    answer = _decoded(response)
    if answer.get("kind") == "Status" and isinstance(answer.get("details") or {}, dict):
        return answer
    text = answer.get("message") or response.text.strip() or response.reason_phrase
    return {"message": str(text)[:_SHOWN_CHARACTERS]}


def retry_after(response: httpx2.Response) -> float:
    """Return the seconds without requests that a busy server asks for (RFC 9110, 10.2.3)."""
    text = response.headers.get("retry-after", "")
    if text.isascii() and text.isdecimal():
        return float(text)
    return 0.0


def warnings_of(response: httpx2.Response) -> list[str]:
    """Return the texts of the warnings. Only they say that pod security will refuse the pods of a template."""
    texts = []
    for header in response.headers.get_list("warning"):
        # 299 - "text with \"quotes\""
        text = header.split(" ", 2)[-1].strip('"')
        texts.append(text.replace('\\"', '"'))
    return texts


def lines_of(chunks: Iterable[bytes], most: int | None = None) -> Iterator[bytes]:
    """Yield lines with their newline. Nothing else ends a line, unlike in str.splitlines.

    A last line without a newline may have been cut off. Raise EnvironmentFault for a line of more than `most` bytes.
    """
    begun: list[bytes] = []  # parts of a line without its end
    length = 0
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end, b"\n"])
            begun = []
            length = 0
        if rest:
            begun.append(rest)
            length += len(rest)
        if most is not None and length > most:
            raise EnvironmentFault(
                f"the cluster sent a line of more than {most:,} bytes, where an object was expected; does the "
                "kubeconfig's `server` lead to an API server, and no proxy stand in between?"
            )
    if begun:
        yield b"".join(begun)


def cut_lines(
    chunks: Iterable[bytes], most: int, tell_of_cut: Callable[[], None]
) -> Iterator[bytes]:
    """Yield the chunks, of each line its first `most` bytes at most. Call `tell_of_cut` where a line is longer.

    How the bytes come in chunks makes no difference: a line that is sent twice is cut at the same byte.
    """
    length = 0
    for chunk in chunks:
        kept = []
        for number, part in enumerate(chunk.split(b"\n")):
            if number > 0:
                kept.append(b"\n")
                length = 0
            room = max(0, most - length)
            if length <= most < length + len(part):
                tell_of_cut()
            kept.append(part[:room])
            length += len(part)
        yield b"".join(kept)


def _decoded(response: httpx2.Response) -> Object:
    try:
        answer = response.json()
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}
