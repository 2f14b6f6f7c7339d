"""Calculations of a shell with whole numbers."""

from __future__ import annotations

import ast
import operator
import re

_LARGEST = 2**63
# Python reads other characters otherwise than a shell: `16#a` is 10 in a shell.
_CALCULATION = re.compile(r"[\d\s()+*/%-]+")
# By the name of Python's syntax node. A shell rounds towards zero, so both numbers of a division have to be positive.
_OPERATIONS = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.floordiv,
    "Mod": operator.mod,
}


def calculated(text: str) -> str:
    """Return the result of `(64 + 2) / 4`; empty if it is not known."""
    if not _CALCULATION.fullmatch(text):
        return ""
    try:
        return str(_result(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, LookupError, ArithmeticError, RecursionError):
        return ""


def _result(node: ast.expr) -> int:
    """Return the value of a calculation. Raise ValueError or LookupError if a shell may give another one."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.BinOp(left=left, op=sign, right=right):
            name = type(sign).__name__
            numbers = (_result(left), _result(right))
            result = int(_OPERATIONS[name](*numbers))
            is_plain = name not in ("Div", "Mod") or min(numbers) >= 0
            # A shell's numbers have 64 bits, and begin again beyond them.
            if is_plain and abs(result) < _LARGEST:
                return result
    raise ValueError(ast.dump(node))
