"""Assignments of a script: NAME=value, arrays, `export`, `local` and `unset`."""

from __future__ import annotations

from collections.abc import Sequence

from tree_sitter import Node

from kubetune.plugins.importers.shell.nodes import field_of, text_of
from kubetune.plugins.importers.shell.state import Alternatives, Value, added, doubted
from kubetune.plugins.importers.shell.values import Values

# Variables of a function of the script: their values outside of it.
Outside = dict[str, Value | None]


def assign(node: Node, values: Values) -> None:
    """Follow NAME=value, NAME+=value, NAME=( … ) and NAME+=( … )."""
    name = field_of(node, "name")
    if not name.isidentifier():
        return  # one item of an array
    source = node.child_by_field_name("value")
    value: Value = ""
    if source is not None and source.type == "array":
        value = tuple(values.words(source.named_children))
    elif source is not None:
        value = values.text(source)
    if any(child.type == "+=" for child in node.children):
        value = added(values.get(name) or "", value)
    values.set(name, value, node)


def declare(node: Node, values: Values, functions: Sequence[Outside]) -> None:
    """Follow `export`, `declare`, `local` and `readonly`. `functions`: those that are being called."""
    program = node.children[0].type
    for child in node.named_children:
        name = _name_of(child)
        if not name:
            continue
        if functions and program in ("local", "declare", "typeset"):
            functions[-1].setdefault(name, values.get(name))
        if child.type == "variable_assignment":
            assign(child, values)
        if program == "export":
            values.state.exported |= {name}


def _name_of(node: Node) -> str:
    """Return the variable in a declaration; empty for an option such as -A."""
    if node.type == "variable_name":
        return text_of(node)
    return field_of(node, "name")


def unset(node: Node, values: Values) -> list[str]:
    """Follow `unset NAME`. Return the functions that `unset -f NAME` removes."""
    names = [text_of(child) for child in node.named_children]
    if "-f" in names:
        return names
    for name in names:
        values.state.values.pop(name, None)
    return []


def doubt_all(values: Values, why: str) -> None:
    """Take variables for not certain behind what may set any of them anew."""
    # HOME and a function's arguments are no variables that the script sets in a line.
    for name in values.state.lines.keys() & values.state.values.keys():
        values.state.values[name] = _doubted(values.state.values[name], why)


def _doubted(value: Value, why: str) -> Value:
    """Return a value that may be another one."""
    if isinstance(value, str):
        return Alternatives((value,), why)
    if isinstance(value, tuple):
        return doubted(value, why)
    return value
