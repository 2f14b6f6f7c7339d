"""A mistake, or a doubt, that lint reports."""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """A mistake, and the dotted key of the config to change. With one that is not `fatal` the run may work."""

    key: str
    text: str
    fatal: bool


def error(key: str, text: str) -> Mistake:
    """Return a finding that keeps the run from working."""
    return Mistake(key, text, fatal=True)


def advice(key: str, text: str) -> Mistake:
    """Return a finding that the user may have good reasons to ignore."""
    return Mistake(key, text, fatal=False)
