"""Conditions of a script, as far as their sides are known.

A condition holds (True), does not (False), or only a running shell knows (None):

    [ small = small ]               True
    [[ Qwen3-8B == Qwen* ]]         True
    (( 4 > 8 ))                     False
    [ -d data ]                     None
    [[ a == b && -d data ]]         False: one side decides
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Final

from tree_sitter import Node

from kubetune.plugins.importers.shell.nodes import field_of, is_known, text_of
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
# Sets such as [[:digit:]], and extended patterns such as @(7|8)b.
_OTHER_PATTERN: Final = re.compile(r"[\[\]\\()]")
_ENDS: Final = {"true": True, ":": True, "false": False}


def tested(node: Node, values: Values) -> bool | None:
    """Return whether [ … ], [[ … ]], (( … )), `test …`, `true` or `false` holds; None where that is not known."""
    if node.type == "test_command":
        if not node.named_children:
            return False
        return _holds(node.named_children[0], values)
    if node.type == "compound_statement" and node.children[0].type == "((":
        number = values.arithmetic(text_of(node)[2:-2])
        if number is None:
            return None
        return number != 0
    if node.type == "command":
        words = [word.text for word in values.words(node.named_children)]
        if len(words) == 1:
            return _ENDS.get(words[0])
        if words[0] == "test" and len(words) == 4:
            return _compared(words[1], words[2], words[3])
    return None


def _holds(node: Node, values: Values) -> bool | None:
    """Return whether what stands in [ … ] or [[ … ]] holds; None where that is not known."""
    if node.type == "parenthesized_expression":
        return _holds(node.named_children[0], values)
    if node.type == "unary_expression":
        return _holds_alone(node, values)
    if node.type != "binary_expression":
        text = values.text(node)
        if not is_known(text):
            return None
        return text != ""

    # `-a` and `-o` are not followed: `[ -z $A -a -z $B ]` is parsed with the operator within the left side.
    left = node.named_children[0]
    right = node.named_children[-1]
    sign = field_of(node, "operator")
    if sign in ("&&", "||"):
        return _together(_holds(left, values), sign, _holds(right, values))
    # `! A = B` is parsed with the sign within the left side.
    if left.type == "unary_expression" and text_of(left.children[0]) == "!":
        text = values.text(left.named_children[-1])
        if right.type in ("extglob_pattern", "regex"):
            return negated(_matches(text, sign, values.pattern(right)))
        return negated(_compared(text, sign, values.text(right)))
    if right.type in ("extglob_pattern", "regex"):
        return _matches(values.text(left), sign, values.pattern(right))
    return _compared(values.text(left), sign, values.text(right))


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
    if holds is None:
        return None
    return not holds


def _splits_words(node: Node) -> bool:
    """Return True within [ … ], where a value without quotes is split into words, unlike within [[ … ]]."""
    around = node.parent
    while around is not None and around.type != "test_command":
        around = around.parent
    return around is None or around.children[0].type == "["


def _holds_alone(node: Node, values: Values) -> bool | None:
    """Return whether `! …`, `-z TEXT` or `-n TEXT` holds."""
    sign = text_of(node.children[0])
    operand = node.named_children[-1]
    is_bare = operand.type in ("simple_expansion", "expansion")
    if sign == "-n" and is_bare and not values.text(operand) and _splits_words(node):
        # [ -n $E ] with an empty value is [ -n ], which holds.
        return True
    if sign == "!":
        return negated(_holds(operand, values))
    text = values.text(operand)
    if not is_known(text):
        return None
    if sign == "-z":
        return text == ""
    if sign == "-n":
        return text != ""
    return None


def _compared(left: str, sign: str, right: str) -> bool | None:
    """Return whether a comparison of texts or numbers holds; None where a side is not known."""
    if not is_certain(left) or not is_certain(right):
        return None
    if sign in _OF_TEXTS:
        return (left == right) == (sign != "!=")
    if sign not in _OF_NUMBERS:
        return None
    try:
        return _OF_NUMBERS[sign](int(left), int(right))
    except ValueError:
        return None


def _matches(left: str, sign: str, pattern: str) -> bool | None:
    """Return whether a text fits a pattern of [[ … ]]; None where that is not known."""
    fits = fits_pattern(left, pattern)
    if fits is None or sign not in _OF_TEXTS:
        return None
    return fits == (sign != "!=")


def is_certain(text: str) -> bool:
    """Return True for a text that is the same wherever the script runs. The home folder is not: here it is `~`."""
    return is_known(text) and "~" not in text


def fits_pattern(text: str, pattern: str) -> bool | None:
    """Return whether a text fits a pattern of letters, `*` and `?`; None for other ones, and what is not known."""
    if not is_certain(text) or not is_certain(pattern) or _OTHER_PATTERN.search(pattern):
        return None
    return fnmatchcase(text, pattern)
