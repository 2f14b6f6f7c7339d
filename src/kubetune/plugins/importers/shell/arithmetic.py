"""Calculations of a shell with whole numbers."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Final

_OPERATIONS: Final[dict[type[ast.AST], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # A shell divides towards zero.
    ast.Div: lambda left, right: int(left / right),
    ast.Mod: lambda left, right: left - right * int(left / right),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _calculated(node: ast.expr) -> int:
    """Return the value of a calculation. Raise ValueError for anything else."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_calculated(left), _calculated(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATIONS:
            return int(_OPERATIONS[type(op)](_calculated(left), _calculated(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculated(operand)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _calculated(operand))
        case ast.BoolOp(op=op, values=values):
            results = [bool(_calculated(value)) for value in values]
            return int(all(results) if isinstance(op, ast.And) else any(results))
    raise ValueError(ast.dump(node))


def calculated(text: str) -> int | None:
    """Return the result of `(64 + 2) / 4`, or None where a part is no number."""
    # The shell's words for and, or, not are not Python's.
    python = text.replace("&&", " and ").replace("||", " or ")
    python = re.sub(r"!(?!=)", " not ", python)
    try:
        return _calculated(ast.parse(python.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return None
