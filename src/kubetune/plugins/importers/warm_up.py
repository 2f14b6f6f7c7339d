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
    at_most: int | None = None  # limit of the default, in steps
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
            draft.ignore(self.steps, why)
            draft.ignore(self.ratio, why)
            draft.assume(_RATIO, 0.0, "a constant schedule does not warm up there")
        elif steps is None and ratio is None:
            self._assume_default(draft)
        elif steps and ratio is not None and not self.refuses_both:
            # warmup_steps: 5 beside warmup_ratio: 0.1.
            # transformers 4 and 5 differ, so this comes only near.
            which = f"transformers 4 takes {self.steps}, transformers 5 takes {self.ratio}"
            path = _RATIO if steps < 1 else _STEPS
            value = steps if steps < 1 else int(steps)
            draft.write(self.steps, near(value, which, path))
            draft.drop(self.ratio, f"{self.steps} is set too; {which}")
        elif ratio and steps == 0 and self.zero_steps_count:
            # warmup_steps: 0 beside warmup_ratio: 0.1, where 0 steps switch the share off.
            draft.carry(self.steps, _STEPS, 0)
            draft.ignore(self.ratio, f"{self.steps}: 0 takes precedence there")
        elif ratio or steps is None:
            # A share alone, or beside 0 steps, which say nothing.
            draft.write(self.ratio, self._share(draft, ratio or 0.0))
            draft.ignore(self.steps, f"0 says nothing beside {self.ratio}, there as here")
        else:
            # Steps alone, or beside a share of 0.
            draft.write(self.steps, self._steps(draft, steps))
            draft.ignore(self.ratio, f"0 says nothing beside {self.steps}")

    def _steps(self, draft: Draft, steps: float) -> Outcome:
        """Carry a number of steps; transformers reads one below 1 as a share of all steps."""
        if 0 < steps < 1:
            text = f"{_RATIO}: {steps:g}, since a number below 1 is a share; {_EARLIER}"
            return carried(steps, text, _RATIO)
        if steps == 0:
            return carried(0, path=_STEPS)
        taken = max(int(steps), self.least)
        text = f"{_STEPS}: {taken}"
        if taken != int(steps):
            text += f", as {draft.tool.name} makes of {steps:g}"
        return carried(taken, f"{text}; {_EARLIER}", _STEPS)

    def _share(self, draft: Draft, ratio: float) -> Outcome:
        """Carry a share of all steps, as a number where the tool's rounding is known and so are all steps."""
        total = draft.get("max_steps")
        if ratio == 0:
            return carried(0.0, path=_RATIO)
        if not self.rounds_down:
            return carried(ratio, f"{_RATIO}: {ratio:g}; {_EARLIER}", _RATIO)
        if isinstance(total, int) and total > 0:
            steps = self._rounded_down(ratio * total)
            text = f"{_STEPS}: {steps}, which is {ratio:g} of max_steps; {_EARLIER}"
            return carried(steps, text, _STEPS)
        text = f"{_RATIO}: {ratio:g}, rounded up to a step, there down; {_EARLIER}"
        return carried(ratio, text, _RATIO)

    def _assume_default(self, draft: Draft) -> None:
        """Write down the warm-up of a tool whose file says nothing of it."""
        total = draft.get("max_steps")
        name = draft.tool.name
        if self.at_most is None:
            draft.assume(_RATIO, self.default)
        elif isinstance(total, int) and total > 0:
            steps = min(self._rounded_down(self.default * total), self.at_most)
            why = f"{name}'s default is {self.default:g} of all steps, at most {self.at_most}"
            draft.assume(_STEPS, steps, why)
        else:
            why = f"{name}'s default, of at most {self.at_most} steps there"
            draft.assume(_RATIO, self.default, why)

    def _rounded_down(self, steps: float) -> int:
        """Return a whole number of steps, as the tool makes it of a share."""
        return max(int(steps), self.least) if steps >= 1 else 0


OF_TRANSFORMERS = WarmUp()


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
