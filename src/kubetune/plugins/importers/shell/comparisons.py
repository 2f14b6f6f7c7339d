"""Comparisons in [ … ] and [[ … ]], as far as their sides are known."""

from __future__ import annotations

import operator
from fnmatch import fnmatchcase

from tree_sitter import Node

from kubetune.plugins.importers.shell.nodes import is_known, text_of
from kubetune.plugins.importers.shell.values import Values


def tested(node: Node, values: Values) -> bool | None:
    """Return whether what stands in [ … ] or [[ … ]] holds; None where that is not known."""
    if node.type == "parenthesized_expression":
        return tested(node.named_children[0], values)
    if node.type == "unary_expression":
        return _tested_alone(node, values)
    if node.type != "binary_expression":
        text = values.text(node)
        return bool(text) if is_known(text) else None
    # `[ -z $A -a -z $B ]` is parsed with the operator within the left side: that is not followed.
    left, right = node.named_children[0], node.named_children[-1]
    sign_node = node.child_by_field_name("operator")
    sign = "" if sign_node is None else text_of(sign_node)
    if sign in ("&&", "||", "-a", "-o"):
        is_and = sign in ("&&", "-a")
        sides = (tested(left, values), tested(right, values))
        if (not is_and) in sides:
            return not is_and
        return None if None in sides else is_and
    if right.type in ("extglob_pattern", "regex"):
        return _matches(values.text(left), sign, values.pattern(right))
    return compared(values.text(left), sign, values.text(right))


def _tested_alone(node: Node, values: Values) -> bool | None:
    """Return whether `! …`, `-z TEXT` or `-n TEXT` holds."""
    sign = text_of(node.children[0])
    value = node.named_children[-1]
    if sign == "!":
        holds = tested(value, values)
        return None if holds is None else not holds
    text = values.text(value)
    if sign not in ("-z", "-n") or not is_known(text):
        return None
    return (text == "") == (sign == "-z")


def compared(left: str, sign: str, right: str) -> bool | None:
    """Return whether a comparison of texts or numbers holds; None where a side is not known."""
    if not is_known(left) or not is_known(right):
        return None
    if sign in ("=", "==", "!="):
        return (left == right) == (sign != "!=")
    signs = {
        "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
        "-ge": operator.ge,
    }  # fmt: skip
    if sign in signs and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
        return bool(signs[sign](int(left), int(right)))
    return None


def _matches(left: str, sign: str, pattern: str) -> bool | None:
    """Return whether a text fits a pattern of [[ … ]]; None where that is not known."""
    if not is_known(left) or not is_known(pattern) or sign not in ("=", "==", "!="):
        return None
    return fnmatchcase(left, pattern) == (sign != "!=")
