"""Conditions of a gate: what a metric must reach for a run to be a success, as a run file writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_WRITTEN: Final = re.compile(r"(>=|<=|>|<)\s*([+-]?)(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*(%?)")


@dataclass(frozen=True)
class Condition:
    """`>= 0.9`, a value; `>= +0.05`, a change against the base model; `<= +2%`, a change as a share of it."""

    comparison: str
    number: float
    is_change: bool = False
    is_share: bool = False

    @classmethod
    def parse(cls, text: str) -> Condition:
        """A condition from a run file. Raises ValueError."""
        found = _WRITTEN.fullmatch(text.strip())
        if found is None or (found[4] and not found[2]):
            raise ValueError(
                f"found {text!r}; expected a comparison and a number such as '>= 0.9', or a change against the base "
                "model such as '>= +0.05' or '<= +2%'"
            )
        number = float(found[3]) * (-1 if found[2] == "-" else 1)
        return cls(found[1], number / 100 if found[4] else number, bool(found[2]), bool(found[4]))
