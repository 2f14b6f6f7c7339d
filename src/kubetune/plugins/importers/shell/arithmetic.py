"""Calculations of a shell with whole numbers."""

from __future__ import annotations

import ast
import operator
import re

_LARGEST = 2**63


def _divided(left: int, right: int) -> int:
    """Return a quotient, rounded towards zero as a shell does."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


# By the name of Python's syntax node.
_OPERATIONS = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": lambda left, right: _divided(left, right),
    "Mod": lambda left, right: left - right * _divided(left, right),
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
}


def _result(node: ast.expr) -> int:
    """Return the value of a calculation. Raise ValueError or LookupError for anything else."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.BinOp(left=left, op=sign, right=right):
            pass
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            pass
        case _:
            raise ValueError(ast.dump(node))
    return int(_OPERATIONS[type(sign).__name__](_result(left), _result(right)))


# Python reads other characters otherwise than a shell: `16#a` is 10 in a shell.
_CALCULATION = re.compile(r"[\d\s()+*/%<>=!-]+")


def calculated(text: str) -> int | None:
    """Return the result of `(64 + 2) / 4`, or None if a part is no number."""
    if not _CALCULATION.fullmatch(text):
        return None
    try:
        number = _result(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, LookupError, ArithmeticError, RecursionError):
        return None
    # A shell's numbers have 64 bits, and begin again beyond them.
    return number if abs(number) < _LARGEST else None
