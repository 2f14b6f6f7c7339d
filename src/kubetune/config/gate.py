"""Conditions of a gate: what a metric must reach for a run to succeed, as a run file writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_WRITTEN: Final = re.compile(r"(>=|<=|>|<)\s*([+-]?)(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*(%?)")


@dataclass(frozen=True)
class Condition:
    """What a metric must reach.

    - `>= 0.9`: the value itself;
    - `>= +0.05`: the change from the base model's value;
    - `<= +2%`: that change as a share of the base model's value.
    """

    comparison: str  # >=, <=, > or <
    number: float  # 2% is 0.02
    is_change: bool = False
    is_share: bool = False

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Return the condition that a run file writes. Raise ValueError."""
        match = _WRITTEN.fullmatch(text.strip())
        # A share needs a sign: `<= 2%` could mean the value 0.02 or a change of 2 %.
        if match is None or (match[4] and not match[2]):
            raise ValueError(
                f"found {text!r}; expected a comparison and a number such as '>= 0.9', or a change against the base "
                "model such as '>= +0.05' or '<= +2%'"
            )
        comparison, sign, digits, percent = match.groups()
        number = float(digits)
        if sign == "-":
            number = -number
        if percent:
            number /= 100
        return cls(comparison, number, is_change=bool(sign), is_share=bool(percent))
