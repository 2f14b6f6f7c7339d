"""The learning rate's schedule and warm-up, and the steps between two evaluations or checkpoints."""

from __future__ import annotations

from typing import Any

from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Step,
    carried,
    dropped,
    near,
    unneeded,
)

# Keys that change a schedule, and those that change a cosine.
_SHAPES = ("lr_scheduler_kwargs", "jagged_restart_steps")
_SHAPES_OF_COSINE = (*_SHAPES, "cosine_min_lr_ratio", "min_lr", "lr_decay_iters")
_SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_restarts": "cosine"}
_RATIO = "training.warmup_ratio"
_LATER = "the first step learns already, where theirs has a rate of 0"


def schedule(keys: str) -> Row:
    """Return the row of the learning rate's schedule, which other keys may give another shape."""

    def rule(value: Any, draft: Draft) -> Outcome:
        name = _SCHEDULES.get(value, value)
        if name not in ("cosine", "linear", "constant"):
            return near("cosine", "kubetune knows cosine, linear and constant schedules")
        changing = _SHAPES_OF_COSINE if name == "cosine" else _SHAPES
        shapes = [key for key in changing if draft.get(key)]
        if shapes:
            return near(name, f"there its shape depends on {', '.join(shapes)} too")
        return carried(name)

    return Row(keys, "training.lr_scheduler_type", other=rule)


def warm_up(
    schedule: str = "lr_scheduler_type",
    steps: str = "warmup_steps",
    ratio: str = "warmup_ratio",
    default: float = 0.0,
    is_axolotl: bool = False,
) -> Step:
    """Return the step that takes the warm-up, of which a file may name the steps and their share.

    `is_axolotl`: as axolotl counts it, which takes 0 steps for none, 1 for two, and rounds a share down.

    warmup_steps: 0    warmup_ratio: 0.1    a share of 0.1; no warm-up in axolotl, where 0 steps count
    warmup_steps: 5    warmup_ratio: 0.1    5 steps, near, since tools and their versions differ
    """

    def step(draft: Draft) -> None:
        number = _positive(draft, steps)
        share = _positive(draft, ratio)
        if steps in draft.unknown or ratio in draft.unknown:
            _leave_open(draft, steps, ratio)
        elif draft.get(schedule) == "constant":
            draft.ignore(f"{schedule}: constant does not warm up, there as here", steps, ratio)
            draft.assume(_RATIO, 0.0, "a constant schedule does not warm up there")
        elif number or (number == 0 and (is_axolotl or not share)):
            if number == 1 and is_axolotl:
                number = 2
            draft.write(steps, _of_steps(number, ratio if share else ""))
            if share is not None:
                draft.drop(ratio, f"{steps} is set too")
        elif share is not None:
            outcome = carried(share, f"{_RATIO}: {share:g}; {_LATER}", _RATIO)
            if is_axolotl and draft.get("max_steps"):
                outcome = near(share, "rounded up to a step, there down", _RATIO)
            draft.write(ratio, outcome)
            draft.ignore(f"0 says nothing beside {ratio}, there as here", steps)
        else:
            draft.assume(_RATIO, default)

    return step


def _leave_open(draft: Draft, steps: str, ratio: str) -> None:
    """Drop both keys of the warm-up, since which of them counts depends on the one that is not known."""
    for key, other in ((steps, ratio), (ratio, steps)):
        if key in draft.unknown:
            draft.leave_open(key, _RATIO, draft.unknown[key])
        elif draft.get(key) is not None:
            draft.drop(key, f"depends on {other}, whose value only a running shell knows")


def _of_steps(number: float, ratio: str) -> Outcome:
    """Take the steps of a warm-up. `ratio`: the key of their share, where that is above 0."""
    # transformers reads a number below 1 as a share.
    path = "training.warmup_steps"
    if 0 < number < 1:
        path = _RATIO
    else:
        number = int(number)
    if number and ratio:
        return near(number, f"{ratio} is set too, and other versions take that", path)
    return carried(number, f"{path}: {number:g}; {_LATER}", path)


def _positive(draft: Draft, key: str) -> float | None:
    """Return a key's number, or None where it is left out. Raise ConfigError for anything else."""
    value = draft.take(key)
    if value is None:
        return None
    number = -1.0 if isinstance(value, bool) else float(value)
    if not 0 <= number < float("inf"):
        draft.refuse_value(key)
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
