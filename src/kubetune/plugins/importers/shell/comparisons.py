"""Conditions of a script, as far as their sides are known.

A condition holds (True), does not (False), or only a running shell knows (None):

    [ small = small ]               True
    (( 4 > 8 ))                     False
    [ -d data ]                     None
    [[ a == b && -d data ]]         False: one side decides
    [[ Qwen3-8B == Qwen* ]]         None: patterns are not followed
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Final

from tree_sitter import Node

from kubetune.plugins.importers.shell.nodes import field_of, is_calculated_test, is_known, text_of
from kubetune.plugins.importers.shell.values import Values

_OF_TEXTS: Final = ("=", "==", "!=")
_OF_NUMBERS: Final[dict[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_PATTERN: Final = re.compile(r"[*?\[\]\\()]")
# Quoted, these are no patterns.
_QUOTED: Final = ("string", "raw_string")
# Others, such as 010, are octal for [[ … ]] and decimal for [ … ].
_DECIMAL: Final = re.compile(r"-?(0|[1-9]\d*)")
_JOINED: Final = re.compile(r"\s-[ao]\s")
_ENDS: Final = {"true": True, ":": True, "false": False}


def tested(node: Node, values: Values) -> bool | None:
    """Return whether [ … ], [[ … ]], (( … )), `true` or `false` holds; None if that is not known."""
    # The signs for `and` and `or` within [ … ] are not followed, nor always parsed as such.
    if node.type == "test_command" and _JOINED.search(text_of(node)):
        return None
    # `[a = b]` calls a program named `[a`.
    if node.type == "test_command" and node.named_children and text_of(node)[1] in "[ \t":
        return _holds(node.named_children[0], values)
    if is_calculated_test(node):
        number = values.arithmetic(text_of(node)[2:-2])
        return None if number is None else number != 0
    return _ENDS.get(text_of(node))


def _holds(node: Node, values: Values) -> bool | None:
    """Return whether what stands in [ … ] or [[ … ]] holds; None if that is not known."""
    sign = field_of(node, "operator")
    if node.type == "parenthesized_expression":
        return _holds(node.named_children[0], values)
    if node.type == "unary_expression":
        operand = node.named_children[-1]
        if sign == "!":
            return negated(_holds(operand, values))
        text = _text(operand, values)
        if text is None or sign not in ("-z", "-n"):
            return None
        return (text == "") == (sign == "-z")
    if node.type != "binary_expression":
        text = _text(node, values)
        return None if text is None else text != ""

    left = node.named_children[0]
    right = node.named_children[-1]
    if sign in ("&&", "||"):
        return _together(_holds(left, values), sign, _holds(right, values))
    # `! A = B` is parsed with the sign within the left side, and not followed.
    if left.type == "unary_expression":
        return None
    return _compared(_text(left, values), sign, _text(right, values))


def _text(node: Node, values: Values) -> str | None:
    """Return what a side of a test stands for; None if that is not known, or is no one word."""
    text = values.text(node)
    # Without quotes a value is split into words in [ … ]: of an empty one nothing is left.
    is_bare = node.type in ("simple_expansion", "expansion") and text.split() != [text]
    is_pattern = node.type not in _QUOTED and _PATTERN.search(text)
    # The home folder is another one on each machine: here it is `~`.
    if is_bare or is_pattern or not is_known(text) or "~" in text:
        return None
    return text


def _together(left: bool | None, sign: str, right: bool | None) -> bool | None:
    """Return whether `left && right` or `left || right` holds."""
    # One side decides where it holds in an `or`, or does not in an `and`.
    deciding = sign == "||"
    if left is deciding or right is deciding:
        return deciding
    if left is None or right is None:
        return None
    return not deciding


def negated(holds: bool | None) -> bool | None:
    """Return whether `! …` holds."""
    return None if holds is None else not holds


def _compared(left: str | None, sign: str, right: str | None) -> bool | None:
    """Return whether a comparison of texts or numbers holds; None if a side is not known."""
    if left is None or right is None:
        return None
    if sign in _OF_TEXTS:
        return (left == right) == (sign != "!=")
    if sign not in _OF_NUMBERS or not _DECIMAL.fullmatch(left) or not _DECIMAL.fullmatch(right):
        return None
    return _OF_NUMBERS[sign](int(left), int(right))
