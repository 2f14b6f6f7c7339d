"""Label and field selectors of list and watch requests.

app=web  app!=web  tier in (a, b)  tier notin (a, b)  app  !app        labels
metadata.name=fit  type!=Normal                                        fields
"""

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
    """Return a test for the `labelSelector` and `fieldSelector` of a request; ApiError 400 when one cannot be read."""
    tests: list[Test] = []
    for part in _COMMA_OUTSIDE_PARENTHESES.split(query.get("labelSelector", "")):
        if part.strip():
            tests.append(_label_test(part.strip()))
    for part in query.get("fieldSelector", "").split(","):
        if part:
            tests.append(_field_test(part))
    return lambda obj: all(test(obj) for test in tests)


def _label_test(text: str) -> Test:
    """Return the test for one requirement of labels."""
    if match := _SET.fullmatch(text):
        key = match[1]
        is_inside = match[2] == "in"
        values = {value.strip() for value in match[3].split(",")}
        return lambda obj: (labels_of(obj).get(key) in values) == is_inside
    if match := _EQUAL.fullmatch(text):
        key = match[1]
        is_equal = match[2] != "!="
        value = match[3]
        return lambda obj: (labels_of(obj).get(key) == value) == is_equal
    if match := _EXISTS.fullmatch(text):
        key = match[2]
        is_wanted = not match[1]
        return lambda obj: (key in labels_of(obj)) == is_wanted
    raise bad_request(f"unable to parse requirement: {text!r}")


def _field_test(text: str) -> Test:
    """Return the test for one requirement of fields."""
    match = _EQUAL.fullmatch(text)
    if match is None:
        raise bad_request(f"invalid field selector: {text!r}")
    path = match[1].split(".")
    is_equal = match[2] != "!="
    wanted = match[3]

    def test(obj: Object) -> bool:
        value: Any = obj
        for part in path:
            value = value.get(part, "") if isinstance(value, dict) else ""
        return (str(value) == wanted) == is_equal

    return test
