"""The warm-up of other tools: their schedule, steps and share of steps act on each other.

Not for the shape of the schedule itself, which `common.schedule` maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kubetune.plugins.importers.draft import Draft, is_empty


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


OF_TRANSFORMERS = WarmUp()
OF_SWIFT = WarmUp(refuses_both=True)
OF_MEGATRON = WarmUp(
    "lr_decay_style", "lr_warmup_iters", "lr_warmup_fraction", refuses_both=True, constant_warms_up=True
)  # fmt: skip
OF_AXOLOTL = WarmUp(
    schedule="lr_scheduler",
    zero_steps_count=True,
    refuses_both=True,
    default=0.03,
    at_most=100,
    rounds_down=True,
    least=2,
)

_EARLIER = "the first step learns already, where theirs has a rate of 0"


def warm_up(draft: Draft, reading: WarmUp) -> None:
    """Take the keys of the warm-up together, and write down what the tool makes of them."""
    steps = _number(draft, reading.steps)
    ratio = _number(draft, reading.ratio)
    if steps and ratio and reading.refuses_both:
        why = f"{draft.peer} refuses it beside {reading.ratio}; expected one of the two"
        draft.refuse(reading.steps, why)
    if draft.given.get(reading.schedule) == "constant" and not reading.constant_warms_up:
        for key in (reading.steps, reading.ratio):
            if not is_empty(draft.given.get(key)):
                draft.unneeded(key, f"{reading.schedule}: constant does not warm up, there as here")
        draft.assume("training.warmup_ratio", 0.0, "a constant schedule does not warm up there")
    elif steps and ratio is not None and not reading.refuses_both:
        _both(draft, reading, steps)
    elif steps == 0 and ratio and reading.zero_steps_count:
        draft.carry(reading.steps, "training.warmup_steps", 0)
        draft.unneeded(reading.ratio, f"{reading.steps}: 0 takes precedence there")
    elif ratio:
        _share(draft, reading, ratio)
        if steps is not None:
            draft.unneeded(reading.steps, f"0 says nothing beside {reading.ratio}, there as here")
    elif steps is not None:
        _steps(draft, reading, steps)
        if ratio is not None:
            draft.unneeded(reading.ratio, f"0 says nothing beside {reading.steps}")
    elif ratio is not None:
        draft.carry(reading.ratio, "training.warmup_ratio", 0.0)
    else:
        _default(draft, reading)


def _both(draft: Draft, reading: WarmUp, steps: float) -> None:
    """Take the number of steps beside a share, as transformers 4 does."""
    why = f"transformers 4 takes {reading.steps}, transformers 5 takes {reading.ratio}"
    path = "training.warmup_ratio" if steps < 1 else "training.warmup_steps"
    draft.approximate(reading.steps, path, steps if steps < 1 else int(steps), why)
    draft.drop(reading.ratio, f"{reading.steps} is set too; {why}")


def _steps(draft: Draft, reading: WarmUp, steps: float) -> None:
    """Carry a number of steps; transformers reads one below 1 as a share of all steps."""
    if 0 < steps < 1:
        draft.carry(
            reading.steps,
            "training.warmup_ratio",
            steps,
            f"training.warmup_ratio: {steps:g}, since a number below 1 is a share; {_EARLIER}",
        )
        return
    taken = max(int(steps), reading.least) if steps else 0
    more = f", as {draft.peer} makes of {steps:g}" if taken != int(steps) else ""
    earlier = f"; {_EARLIER}" if taken else ""
    text = f"training.warmup_steps: {taken}{more}{earlier}"
    draft.carry(reading.steps, "training.warmup_steps", taken, text)


def _share(draft: Draft, reading: WarmUp, ratio: float) -> None:
    """Carry a share of all steps, as a number of steps where rounding is theirs and all steps are known."""
    total = draft.given.get("max_steps")
    if not reading.rounds_down:
        text = f"training.warmup_ratio: {ratio:g}; {_EARLIER}"
        draft.carry(reading.ratio, "training.warmup_ratio", ratio, text)
    elif isinstance(total, int) and total > 0:
        steps = _rounded_down(reading, ratio, total)
        text = f"training.warmup_steps: {steps}, which is {ratio:g} of max_steps; {_EARLIER}"
        draft.carry(reading.ratio, "training.warmup_steps", steps, text)
    else:
        text = f"training.warmup_ratio: {ratio:g}, rounded up to a step, there down; {_EARLIER}"
        draft.carry(reading.ratio, "training.warmup_ratio", ratio, text)


def _default(draft: Draft, reading: WarmUp) -> None:
    """Write down the warm-up of a tool whose file says nothing of it."""
    total = draft.given.get("max_steps")
    if reading.at_most is None:
        draft.assume("training.warmup_ratio", reading.default)
    elif isinstance(total, int) and total > 0:
        steps = min(_rounded_down(reading, reading.default, total), reading.at_most)
        why = (
            f"{draft.peer}'s default is {reading.default:g} of all steps, at most {reading.at_most}"
        )
        draft.assume("training.warmup_steps", steps, why)
    else:
        why = f"{draft.peer}'s default, of at most {reading.at_most} steps there"
        draft.assume("training.warmup_ratio", reading.default, why)


def _rounded_down(reading: WarmUp, ratio: float, total: int) -> int:
    steps = int(ratio * total)
    return max(steps, reading.least) if steps else 0


def _number(draft: Draft, key: str) -> float | None:
    """Return a key's number, or None where it is left out. Raises ConfigError for anything else."""
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
