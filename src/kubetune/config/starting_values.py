"""Values that a new run starts from: `kubetune init`, runs without a file (`train --data FILE`), and the page's form.

The schema's own defaults are another thing: they say what a key means that a run file leaves out, and so may never
change. What is here is written into the run file, or shown in the form, where its owner sees and changes it.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Final

from kubetune.base.humanize import counted

# A model that sees images, to name where the user has none that does.
VISION_MODEL: Final = "Qwen/Qwen2.5-VL-3B-Instruct"
# Optimizer steps with fewer rows than this are noisy; `plan` warns of them.
FEWEST_ROWS_OF_A_STEP: Final = 8
# Below so many rows a share of them is too small to tell anything, so none is held out.
_FEWEST_ROWS_TO_SHARE: Final = 20
# Below so many rows the shares and batches are those of small data, as 5 % of 200 rows would be 10.
_SMALL: Final = 1_000
# Above so many rows one epoch teaches enough to start with.
_LARGE: Final = 5_000
# More rows than this make an evaluation slower, and hardly more certain.
_ENOUGH_TO_EVALUATE: Final = 2_000


@dataclass(frozen=True)
class StartingValue:
    """A setting of a new run, and the reason for it."""

    value: Any
    reason: str


def starting_values(rows: int | None = None) -> dict[str, StartingValue]:
    """Return the settings of a new run by dotted key, each with its reason. `rows`: of the data; None if unknown."""
    return {
        "data.eval": _share(rows),
        "lora": StartingValue(
            {"r": 16}, "small adapters: far less memory than training every weight"
        ),
        "training.num_train_epochs": _epochs(rows),
        "training.global_batch_size": _batch(rows),
    }


def _share(rows: int | None) -> StartingValue:
    """Return the share of the data that is held out to evaluate on."""
    if rows is None:
        return StartingValue(
            0.05, "5 % is held out, to see whether what is learned holds for new rows"
        )
    if rows < _FEWEST_ROWS_TO_SHARE:
        return StartingValue(
            None, f"{counted(rows, 'row')}: too few to hold some out; better give a file"
        )
    share = 0.1 if rows < _SMALL else 0.05
    if share * rows > _ENOUGH_TO_EVALUATE:
        # 1,000,000 rows: 0.002. One digit, as people write it.
        share = float(f"{_ENOUGH_TO_EVALUATE / rows:.0e}")
    held_out = max(1, round(share * rows))
    return StartingValue(share, f"about {held_out:,} of {rows:,} rows are held out to evaluate on")


def _epochs(rows: int | None) -> StartingValue:
    if rows is not None and rows < _LARGE:
        return StartingValue(3, "few rows: each is seen three times")
    return StartingValue(1, "each row is seen once; more epochs for small data")


def _batch(rows: int | None) -> StartingValue:
    """Return the rows of an optimizer step. Small data need small steps, or there would be hardly any."""
    if rows is not None and rows < _SMALL:
        return StartingValue(
            FEWEST_ROWS_OF_A_STEP,
            "rows a step, on all processes together; few rows, so small steps",
        )
    return StartingValue(32, "rows a step, on all processes together; accumulation follows from it")


# Keys that decide the rows of a step. Whoever sets one of them wants no other value of ours.
_BATCH_KEYS: Final = (
    "training.global_batch_size",
    "training.global_batch_tokens",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
)


def values_without_a_file(typed: Container[str]) -> dict[str, Any]:
    """Return the starting values of a run that has no file, as a mapping like one, without what decides otherwise.

    `typed`: the dotted keys that the command line and the environment set. They would win over these values anyway; but
    a batch of one's own is left alone, and an epoch count says nothing beside `max_steps`.
    """
    values: dict[str, Any] = {}
    for key, start in starting_values().items():
        if key == "training.global_batch_size" and any(other in typed for other in _BATCH_KEYS):
            continue
        section, _, name = key.partition(".")
        if name:
            values.setdefault(section, {})[name] = start.value
        else:
            values[section] = start.value
    return values
