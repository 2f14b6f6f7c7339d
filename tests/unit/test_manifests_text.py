"""Manifests as YAML: every parser reads the same from it, whatever a text holds."""

from __future__ import annotations

import io
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from kubetune.k8s.manifests import dump

TRAPS = [
    "no",
    "Yes",
    "off",
    "NULL",
    "~",
    "",
    " ",
    "1e3",
    "1_000",
    "0o7",
    "007",
    "0x1f",
    "12:30:45",
    "2026-01-01",
    ".inf",
    "<<",
    "=",
    "- a",
    "a: b",
    "a #b",
    "!tag",
    "&a",
    "*a",
    "{a}",
    "[a]",
    "a\n",
    "\na",
    "a\n\n\nb\n",
    " a\nb\n",
    "a \nb\n",
    "\t",
    "a\tb\n",
    "\x85",
    "\u2028",
    "\ufeff",
    "\x00",
    "\x7f",
    "é\n",
    "😀",
    "'",
    '"',
    "\\",
    "%",
    "@",
    "`",
    "---",
    "...",
    "--- a\n",
    "# a\n",
    "a\r\nb\n",
    "y",
    "n",
    "+1",
    "1k",
    "32Gi",
    "100m",
    "1.5",
    "a:b",
    "a:",
    "?",
    "|",
]
texts = st.one_of(
    st.sampled_from(TRAPS),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text("ab \n\t:#-'\"1e"),
)
values = st.recursive(
    st.one_of(
        texts,
        st.integers(-(2**53), 2**53),
        st.booleans(),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """True if two values are equal, also in type: `True == 1` and `1.0 == 1` are not the same manifest."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(st.lists(st.dictionaries(texts, values, min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_dumped_is_read_back_by_every_parser(objects: list[dict[str, Any]]) -> None:
    text = dump(objects)
    first = list(yaml.load_all(text, yaml.SafeLoader))
    two = list(YAML(typ="safe", pure=True).load_all(io.StringIO(text)))
    assert same(first, objects)
    assert same(two, objects)


@pytest.mark.parametrize("trap", TRAPS)
def test_hostile_strings_stay_strings(trap: str) -> None:
    text = dump([{"key": trap, trap: ["x", trap]}])
    for read in (yaml.safe_load(text), YAML(typ="safe", pure=True).load(text)):
        assert same(read, {"key": trap, trap: ["x", trap]}) or trap == "key"
