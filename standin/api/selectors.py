"""Label and field selectors of list and watch requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from standin.state.errors import bad_request
from standin.state.objects import Object, labels_of

Test = Callable[[Object], bool]

_SET = re.compile(r"(\S+)\s+(in|notin)\s*\(([^)]*)\)")
_EQUAL = re.compile(r"([^=!\s]+)\s*(==|=|!=)\s*(\S*)")
_EXISTS = re.compile(r"(!?)\s*([^=!\s,()]+)")
_COMMA_OUTSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")


def selector(query: Mapping[str, str]) -> Test:
    """A predicate for the `labelSelector` and `fieldSelector` of a request; ApiError 400 when one cannot be read."""
    labels = _COMMA_OUTSIDE_PARENTHESES.split(query.get("labelSelector", ""))
    tests = [_label_test(part.strip()) for part in labels if part.strip()]
    tests += [_field_test(part) for part in query.get("fieldSelector", "").split(",") if part]
    return lambda obj: all(test(obj) for test in tests)


def _label_test(text: str) -> Test:
    if match := _SET.fullmatch(text):
        key, inside = match[1], match[2] == "in"
        values = {value.strip() for value in match[3].split(",")}
        return lambda obj: (labels_of(obj).get(key) in values) == inside
    if match := _EQUAL.fullmatch(text):
        key, equal, value = match[1], match[2] != "!=", match[3]
        return lambda obj: (labels_of(obj).get(key) == value) == equal
    if match := _EXISTS.fullmatch(text):
        key, wanted = match[2], not match[1]
        return lambda obj: (key in labels_of(obj)) == wanted
    raise bad_request(f"unable to parse requirement: {text!r}")


def _field_test(text: str) -> Test:
    match = _EQUAL.fullmatch(text)
    if match is None:
        raise bad_request(f"invalid field selector: {text!r}")
    path, equal, want = match[1].split("."), match[2] != "!=", match[3]

    def test(obj: Object) -> bool:
        value: Any = obj
        for part in path:
            value = value.get(part, "") if isinstance(value, dict) else ""
        return (str(value) == want) == equal

    return test
