r"""Conditions of a script, as far as their sides are known.

A condition holds (True), does not (False), or only a running shell knows (None):

    [ small = small ]               True
    [ 10 \> 9 ]                     False: as texts, 1 comes before 9
    (( 4 > 8 ))                     False
    [ -d data ]                     None
    [[ a == b && -d data ]]         False: one side decides
    [[ Qwen3-8B == Qwen* ]]         None: patterns are not followed
    [[ 10 > 9 ]]                    None: the user's language decides which comes first
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tree_sitter import Node

from kubetune.plugins.importers.shell.nodes import field_of, is_calculated_test, is_known, text_of
from kubetune.plugins.importers.shell.values import Values

_OF_TEXTS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
# In [ … ] the bytes decide. In [[ … ]] the user's language does.
_ORDERED = {**_OF_TEXTS, "<": operator.lt, ">": operator.gt}
_OF_NUMBERS: dict[str, Callable[[Any, Any], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_PATTERN = re.compile(r"[*?\[\]\\(){]")
# Quoted, these are no patterns.
_QUOTED = ("string", "raw_string")
# Others, such as 010, are octal for [[ … ]] and decimal for [ … ].
_DECIMAL = re.compile(r"-?(0|[1-9]\d*)")
_ENDS = {"true": True, ":": True, "false": False}


def tested(node: Node, values: Values) -> bool | None:
    """Return whether [ … ], test …, [[ … ]], (( … )), `true` or `false` holds; None if that is not known."""
    # `[[a = b]]` calls a program named `[[a`.
    if node.type == "test_command" and re.match(r"\[\[\s", text_of(node)):
        return _holds(node.named_children[0], values)
    if is_calculated_test(node):
        number = values.arithmetic(text_of(node)[2:-2])
        return None if number is None else number != 0
    program = field_of(node, "name")
    if program in values.doubts.functions:
        return None
    if node.type == "command" and program in ("[", "test"):
        words = _words(node, values)
        return None if words is None else _words_hold(words)
    return _ENDS.get(text_of(node))


def _words(node: Node, values: Values) -> list[str] | None:
    """Return the words that `[` or `test` gets; None if one of them is not known."""
    first = node.children[0]
    last = node.children[-1]
    arguments = node.children[1:]
    if text_of(first) == "[":
        arguments = arguments[:-1]
    # NAME=value stands before the name, or the bracket is not closed.
    if first.type != "command_name" or (text_of(first) == "[") != (text_of(last) == "]"):
        return None
    words: list[str] = []
    for child in arguments:
        # The parser takes `==` for no word.
        if not child.is_named:
            words.append(text_of(child))
            continue
        for word in values.words([child]):
            if word.why or not _is_certain(child, word.text):
                return None
            words.append(word.text)
    return words


def _words_hold(words: Sequence[str]) -> bool | None:
    """Return whether `[ … ]` holds. The number of its words decides what they mean; of five and more nobody can be sure."""
    match words:
        case []:
            return False
        case [text]:
            return text != ""
        case ["-z" | "-n" as sign, text]:
            return (text == "") == (sign == "-z")
        case [left, sign, right] if sign in _ORDERED or sign in _OF_NUMBERS:
            return _compared(left, sign, right, _ORDERED)
        case ["!", _] | ["!", _, _] | ["!", _, _, _]:
            return negated(_words_hold(words[1:]))
    return None


def _holds(node: Node, values: Values) -> bool | None:
    """Return whether what stands in [[ … ]] holds; None if that is not known."""
    sign = field_of(node, "operator")
    if node.type == "parenthesized_expression":
        return _holds(node.named_children[0], values)
    if node.type == "unary_expression":
        operand = node.named_children[-1]
        if sign == "!":
            return negated(_holds(operand, values))
        text = _text(operand, values)
        return None if text is None else _words_hold([sign, text])
    if node.type != "binary_expression":
        text = _text(node, values)
        return None if text is None else _words_hold([text])

    left = node.named_children[0]
    right = node.named_children[-1]
    if sign in ("&&", "||"):
        return _together(_holds(left, values), sign, _holds(right, values))
    # `! A = B` is parsed with the sign within the left side, and not followed.
    if left.type == "unary_expression":
        return None
    return _compared(_text(left, values), sign, _text(right, values), _OF_TEXTS)


def _text(node: Node, values: Values) -> str | None:
    """Return what a side of [[ … ]] stands for; None if that is not known."""
    text = values.text(node)
    return text if _is_certain(node, text) else None


def _is_certain(node: Node, text: str) -> bool:
    """Return True if a node stands for this text alone, on any machine."""
    is_pattern = node.type not in _QUOTED and _PATTERN.search(text)
    # The home folder is another one on each machine: here it is `~`.
    return not is_pattern and is_known(text) and "~" not in text


def _together(left: bool | None, sign: str, right: bool | None) -> bool | None:
    """Return whether `left && right` or `left || right` holds."""
    # One side decides where it holds in an `or`, or does not in an `and`.
    deciding = sign == "||"
    if deciding in (left, right):
        return deciding
    return None if None in (left, right) else not deciding


def negated(holds: bool | None) -> bool | None:
    """Return whether `! …` holds."""
    return None if holds is None else not holds


def _compared(
    left: str | None,
    sign: str,
    right: str | None,
    of_texts: Mapping[str, Callable[[Any, Any], bool]],
) -> bool | None:
    """Return whether a comparison of texts or numbers holds; None if a side is not known."""
    if left is None or right is None:
        return None
    if sign in of_texts:
        return of_texts[sign](left, right)
    if sign not in _OF_NUMBERS or not _DECIMAL.fullmatch(left) or not _DECIMAL.fullmatch(right):
        return None
    return _OF_NUMBERS[sign](int(left), int(right))
