"""Conditions of a gate: what a metric must reach for a run to be a success, as a run file writes it."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Final

COMPARISONS: Final = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
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

    def limit(self, base: float | None) -> float:
        """The value that the metric is compared with. `base`: the metric of the model before training."""
        if not self.is_change:
            return self.number
        if base is None:
            raise ValueError("a change against the base model needs the base model's value")
        return base + (abs(base) * self.number if self.is_share else self.number)

    def holds(self, value: float, base: float | None) -> bool:
        """Truth of the condition; never true of NaN."""
        return bool(COMPARISONS[self.comparison](value, self.limit(base)))
