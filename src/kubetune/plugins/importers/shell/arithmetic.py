"""Calculations of a shell with whole numbers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Final


def _divided(left: int, right: int) -> int:
    """Return a quotient as a shell does, which rounds towards zero."""
    quotient = abs(left) // abs(right)
    if (left < 0) != (right < 0):
        return -quotient
    return quotient


def _remainder(left: int, right: int) -> int:
    """Return what a division leaves over."""
    return left - right * _divided(left, right)


# By the name of Python's syntax node.
_OPERATIONS: Final[dict[str, Callable[[int, int], int]]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": _divided,
    "Mod": _remainder,
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
}


def _calculated(node: ast.expr) -> int:
    """Return the value of a calculation. Raise ValueError or LookupError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return _applied(node.op, node.left, node.right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_applied(node.ops[0], node.left, node.comparators[0]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculated(node.operand)
    raise ValueError(ast.dump(node))


def _applied(sign: ast.AST, left: ast.expr, right: ast.expr) -> int:
    """Return what an operation makes of two calculations."""
    operation = _OPERATIONS[type(sign).__name__]
    return operation(_calculated(left), _calculated(right))


def calculated(text: str) -> int | None:
    """Return the result of `(64 + 2) / 4`, or None where a part is no number."""
    try:
        return _calculated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, LookupError, ArithmeticError, RecursionError):
        return None
