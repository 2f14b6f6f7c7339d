"""The learning rate's schedule and warm-up, and the steps between two evaluations or checkpoints."""

from __future__ import annotations

from typing import Any

from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    carried,
    dropped,
    near,
    unneeded,
)
from kubetune.plugins.importers.writing import inline

# Keys that change a schedule, and those that change a cosine.
_SHAPES = ("lr_scheduler_kwargs", "jagged_restart_steps")
_SHAPES_OF_COSINE = (*_SHAPES, "cosine_min_lr_ratio", "min_lr", "lr_decay_iters")
_SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_restarts": "cosine"}
_RATIO = "training.warmup_ratio"
_STEPS = "training.warmup_steps"
_LATER = "the first step learns already, where the tool's has a rate of 0"


def schedule(keys: str) -> Row:
    """Return the row of the learning rate's schedule, which other keys may give another shape."""

    def rule(value: Any, draft: Draft) -> Outcome:
        name = _SCHEDULES.get(value, value)
        if name not in ("cosine", "linear", "constant"):
            return near("cosine", "kubetune knows cosine, linear and constant schedules")
        changing = _SHAPES_OF_COSINE if name == "cosine" else _SHAPES
        shapes = [key for key in changing if draft.get(key)]
        if shapes:
            return near(name, f"in the tool its shape depends on {', '.join(shapes)} too")
        return carried(name)

    return Row(keys, "training.lr_scheduler_type", other=rule)


def warm_up(
    schedule: str = "lr_scheduler_type",
    steps: str = "warmup_steps",
    share: str = "warmup_ratio",
    is_axolotl: bool = False,
) -> tuple[Row, Row]:
    """Return the rows of the warm-up's steps and of their share. A file with both is refused: versions differ.

    `is_axolotl`: as axolotl counts it, which takes 1 step for two, and rounds a share down.
    """

    def rule(value: Any, draft: Draft) -> Outcome:
        number = _positive(value, draft)
        if draft.get(schedule) == "constant":
            return unneeded(f"{schedule}: constant does not warm up")
        other = share if draft.at == steps else steps
        if draft.get(other) is not None:
            why = f"is set beside {other}, of which versions of the tool take one or the other; keep one"
            draft.refuse(draft.at, why)
        # transformers reads a number of steps below 1 as a share.
        if draft.at == share or 0 < number < 1:
            if is_axolotl and draft.get("max_steps"):
                return near(number, "rounded up to a step, in axolotl down", _RATIO)
            return carried(number, f"{_RATIO}: {inline(number)}; {_LATER}", _RATIO)
        if number == 1 and is_axolotl:
            number = 2
        return carried(int(number), f"{_STEPS}: {inline(int(number))}; {_LATER}", _STEPS)

    return Row(steps, _STEPS, other=rule), Row(share, _RATIO, other=rule)


def assume_warm_up(draft: Draft, schedule: str = "lr_scheduler_type", default: float = 0.0) -> None:
    """Write down the tool's warm-up, unless the file says its steps."""
    if draft.has(_STEPS) or _STEPS in draft.undecided:
        return
    if draft.get(schedule) == "constant":
        draft.assume(_RATIO, 0.0, "the tool's constant schedule does not warm up")
    draft.assume(_RATIO, default)


def _positive(value: Any, draft: Draft) -> float:
    """Return a number from 0. Raise ConfigError for anything else."""
    number = -1.0 if isinstance(value, bool) else float(value)
    if not 0 <= number < float("inf"):
        draft.refuse_value(draft.at)
    return number


def every(verb: str) -> Row:
    """Return the row of the steps between two evaluations or checkpoints; each epoch's end may replace them."""

    def rule(value: Any, draft: Draft) -> Outcome:
        if "epoch" in (draft.get(f"{verb}_strategy"), draft.get(f"{verb}uation_strategy")):
            return unneeded(f"{verb}_strategy is epoch, which takes no steps")
        # A share of all steps is not known before the data are read.
        return carried(int(value)) if value >= 1 else near("epoch", "a share of all steps")

    return Row(f"{verb}_steps", f"training.{verb}_steps", other=rule)


def strategy(keys: str, path: str, without: str) -> Row:
    """Return the row of `save_strategy` and its like. `without`: what happens even where it is off."""
    off = unneeded(f"{without} all the same, which changes no result")
    values = {
        "steps": unneeded("follows from the number of steps"),
        "best": unneeded("the best checkpoint is always kept"),
        "no": off,
        False: off,
        "epoch": "epoch",
    }
    return Row(keys, path, values, dropped("expected steps, epoch or no"))
