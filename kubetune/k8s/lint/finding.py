"""One thing that lint found."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """A mistake, and the dotted key of the config to change. Not `fatal`: the run may work, or not for long."""

    key: str
    text: str
    fatal: bool


def error(key: str, text: str) -> Finding:
    """A finding that keeps the run from working."""
    return Finding(key, text, fatal=True)


def advice(key: str, text: str) -> Finding:
    """A finding that the user may know better about."""
    return Finding(key, text, fatal=False)
