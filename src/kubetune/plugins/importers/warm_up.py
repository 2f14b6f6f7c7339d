"""The warm-up of other tools: their schedule, steps and share of steps act on each other.

Not for the shape of the schedule itself, which is a row of each tool's table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kubetune.plugins.importers.engine import Draft, Outcome, carried, near

_EARLIER = "the first step learns already, where theirs has a rate of 0"
_STEPS = "training.warmup_steps"
_RATIO = "training.warmup_ratio"


@dataclass(frozen=True)
class WarmUp:
    """How a tool reads its keys of the warm-up.

    Example: `lr_scheduler_type: cosine`, `warmup_steps: 0`, `warmup_ratio: 0.1`. transformers warms up over 10 % of
    the steps, since 0 steps say nothing there; axolotl does not warm up, since it asks whether steps are given.
    """

    schedule: str = "lr_scheduler_type"  # key of the schedule's name
    steps: str = "warmup_steps"  # key of the number of steps
    ratio: str = "warmup_ratio"  # key of the share of all steps
    zero_steps_count: bool = False  # 0 steps switch a share off
    refuses_both: bool = False  # the tool stops where steps and a share are set
    constant_warms_up: bool = False  # a `constant` schedule warms up too
    default: float = 0.0  # share of the steps where the file sets neither
    default_at_most: float = float("inf")  # steps of that default
    rounds_down: bool = False  # a share of all steps is rounded down, ours up
    least: int = 1  # a warm-up of fewer steps takes this many

    def read(self, draft: Draft) -> None:
        """Take the keys of the warm-up together, and write down what the tool makes of them."""
        steps = _number(draft, self.steps)
        ratio = _number(draft, self.ratio)
        if steps and ratio and self.refuses_both:
            why = f"{draft.tool.name} refuses it beside {self.ratio}; expected one of the two"
            draft.refuse(self.steps, why)
        if draft.get(self.schedule) == "constant" and not self.constant_warms_up:
            why = f"{self.schedule}: constant does not warm up, there as here"
            draft.ignore(why, self.steps, self.ratio)
            draft.assume(_RATIO, 0.0, "a constant schedule does not warm up there")
        elif steps is None and ratio is None:
            outcome = self._share(draft, self.default, self.default_at_most)
            draft.assume(outcome.path, outcome.value)
        elif steps and ratio is not None and not self.refuses_both:
            # transformers 4 and 5 differ, so this comes only near.
            which = f"transformers 4 takes {self.steps}, transformers 5 takes {self.ratio}"
            outcome = self._number_of_steps(draft, steps)
            draft.write(self.steps, near(outcome.value, which, outcome.path))
            draft.drop(self.ratio, f"{self.steps} is set too; {which}")
        elif steps == 0 and ratio and self.zero_steps_count:
            draft.carry(self.steps, _STEPS, 0)
            draft.ignore(f"{self.steps}: 0 takes precedence there", self.ratio)
        elif ratio or steps is None:
            draft.write(self.ratio, self._share(draft, ratio or 0.0))
            draft.ignore(f"0 says nothing beside {self.ratio}, there as here", self.steps)
        else:
            draft.write(self.steps, self._number_of_steps(draft, steps))
            draft.ignore(f"0 says nothing beside {self.steps}", self.ratio)

    def _number_of_steps(self, draft: Draft, steps: float) -> Outcome:
        """Carry a number of steps; transformers reads one below 1 as a share of all steps."""
        if steps == 0:
            return carried(0, path=_STEPS)
        if steps < 1:
            text = f"{_RATIO}: {steps:g}, since a number below 1 is a share; {_EARLIER}"
            return carried(steps, text, _RATIO)
        taken = max(int(steps), self.least)
        text = f"{_STEPS}: {taken}"
        if taken != int(steps):
            text += f", as {draft.tool.name} makes of {steps:g}"
        return carried(taken, f"{text}; {_EARLIER}", _STEPS)

    def _share(self, draft: Draft, ratio: float, at_most: float = float("inf")) -> Outcome:
        """Carry a share of all steps, as a number where the tool's rounding is known and so are all steps."""
        total = draft.get("max_steps")
        if ratio == 0:
            return carried(0.0, path=_RATIO)
        if self.rounds_down and isinstance(total, int) and total > 0:
            steps = 0
            if ratio * total >= 1:
                steps = max(int(min(ratio * total, at_most)), self.least)
            text = f"{_STEPS}: {steps}, which is {ratio:g} of max_steps; {_EARLIER}"
            return carried(steps, text, _STEPS)
        rounded = ", rounded up to a step, there down" if self.rounds_down else ""
        return carried(ratio, f"{_RATIO}: {ratio:g}{rounded}; {_EARLIER}", _RATIO)


def _number(draft: Draft, key: str) -> float | None:
    """Return a key's number, or None where it is left out. Raise ConfigError for anything else."""
    value: Any = draft.take(key)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        draft.refuse_value(key)
    if isinstance(value, bool) or not 0 <= number < float("inf"):
        draft.refuse_value(key)
    return number
