"""What every part of the walk asks of a node of the parsed script."""

from __future__ import annotations

import re
from typing import Final

from tree_sitter import Node

_NOT_KNOWN: Final = re.compile(r"[$`]")


def is_known(text: str) -> bool:
    """Return True if a text has nothing in it that only a running shell knows."""
    return _NOT_KNOWN.search(text) is None


def text_of(node: Node) -> str:
    """Return the source of a node."""
    return (node.text or b"").decode()


def line_of(node: Node) -> int:
    """Return the line in which a node begins, from 1."""
    return node.start_point.row + 1


def first_line_of(node: Node) -> str:
    """Return the first line of a node's source, shortened."""
    return text_of(node).partition("\n")[0][:80]
