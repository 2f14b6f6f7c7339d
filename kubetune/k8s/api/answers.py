"""What an API server answered, taken for an object only where it is one: a login page in between may answer, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import httpx2

from kubetune.errors import EnvironmentFault

Object = dict[str, Any]

_LIST = "List"
# Answers that are about nothing that has a name.
_NAMELESS = ("Status", "SelfSubjectAccessReview")
_SHOWN_CHARACTERS = 500


def object_of(response: httpx2.Response, *kinds: str) -> Object:
    """Return the answer, an object of one of these kinds. Raise EnvironmentFault where something else has answered."""
    answer = _decoded(response)
    kind = answer.get("kind")
    if kind in kinds and (kind in _NAMELESS or is_object(answer)):
        return answer
    raise foreign(response, response.text)


def list_of(response: httpx2.Response) -> Object:
    """Return the answer, a list of objects. Raise EnvironmentFault where something else has answered."""
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
    """Return the error for an answer that no API server gives to what was asked."""
    return EnvironmentFault(
        f"{response.url.copy_with(query=None)} answered with what is no object of Kubernetes "
        f"({text[:_SHOWN_CHARACTERS]!r}); does the kubeconfig's `server` lead to an API server, "
        "and no login page stand in between?"
    )


def status_of(response: httpx2.Response) -> Object:
    """Return the Status of a refusal; what a proxy in between says instead is kept as its message."""
    answer = _decoded(response)
    if answer.get("kind") == "Status" and isinstance(answer.get("details") or {}, dict):
        return answer
    text = answer.get("message") or response.text.strip() or response.reason_phrase
    return {"message": str(text)[:_SHOWN_CHARACTERS]}


def retry_after(response: httpx2.Response) -> float:
    """Return the seconds for which a busy server asks to be spared (RFC 9110, 10.2.3), as API servers write them."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() else 0.0


def warnings_of(response: httpx2.Response) -> list[str]:
    """Return the warnings, `299 - "text"`: that pod security will refuse a pod template shows only here."""
    headers = response.headers.get_list("warning")
    return [header.split(" ", 2)[-1].strip('"').replace('\\"', '"') for header in headers]


def lines_of(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines with their end; only a newline ends one, whatever Unicode thinks of other characters.

    A last line without an end may have been cut off.
    """
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def _decoded(response: httpx2.Response) -> Object:
    try:
        answer = response.json()
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}
