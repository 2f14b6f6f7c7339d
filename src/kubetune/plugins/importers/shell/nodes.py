"""What every part of the walk asks of a node of the parsed script."""

from __future__ import annotations

import tree_sitter_bash
from tree_sitter import Language, Node, Parser


def parsed(text: str) -> Node:
    """Return the tree of a script."""
    language = Language(tree_sitter_bash.language())
    return Parser(language).parse(text.encode()).root_node


def is_known(text: str) -> bool:
    """Return True if a text has nothing in it that only a running shell knows."""
    return "$" not in text and "`" not in text


def is_calculated_test(node: Node) -> bool:
    """Return True for (( … ))."""
    return node.type == "compound_statement" and node.children[0].type == "(("


def text_of(node: Node) -> str:
    """Return the source of a node."""
    return (node.text or b"").decode()


def field_of(node: Node, name: str) -> str:
    """Return the source of one part of a node; empty where it has none of that name."""
    part = node.child_by_field_name(name)
    if part is None:
        return ""
    return text_of(part)


def line_of(node: Node) -> int:
    """Return the line in which a node begins, from 1."""
    return node.start_point.row + 1


def first_line_of(node: Node) -> str:
    """Return the first line of a node's source, shortened."""
    return text_of(node).partition("\n")[0][:80]
