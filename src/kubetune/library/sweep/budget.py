"""The budget of a sweep: hours, hours of devices, or money, as it is typed and as it is spent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kubetune.base.humanize import duration
from kubetune.errors import ConfigError
from kubetune.library.sweep.sweep_record import Record

Unit = Literal["hours", "gpu-hours", "money"]

# A number and a unit: `12gpu-hours`, `1.5 h`.
_BUDGET = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z][a-z-]*)", re.IGNORECASE)

# Units as they may be typed; of time, with their length in hours.
_HOURS = {"h": 1.0, "hour": 1.0, "hours": 1.0, "min": 1 / 60, "minutes": 1 / 60}
_GPU_HOURS = ("gpu-hours", "gpu-hour", "gpuh")
_MONEY = ("money", "usd", "eur", "chf", "gbp")


@dataclass(frozen=True)
class Budget:
    """The most that a sweep may spend.

    Example: a run of 30 minutes on 4 devices, at 2.50 for a device and hour, costs

        0.5 hours    2 gpu-hours    5 money
    """

    amount: float
    unit: Unit
    price: float = 1.0  # of one device for one hour, in this unit

    def spent(self, record: Record) -> float:
        """Return how much the sweep has spent so far."""
        if self.unit == "hours":
            return record.seconds / 3600
        return record.device_hours * self.price

    def cost(self, seconds: float, devices: int) -> float:
        """Return what it costs to hold that many devices for that long."""
        hours = seconds / 3600
        if self.unit == "hours":
            return hours
        return hours * devices * self.price

    def share(self, amount: float) -> str:
        """Return an amount beside the whole: `3.2 of 12 gpu-hours`, `12 min of 3 h`."""
        if self.unit == "hours":
            return f"{duration(amount * 3600)} of {self}"
        return f"{amount:.3g} of {self}"

    def __str__(self) -> str:
        if self.unit == "hours":
            return duration(self.amount * 3600)
        return f"{self.amount:g} {self.unit}"


def parse(texts: Sequence[str], price: float | None) -> list[Budget]:
    """Return the budgets of a command line. Raise ConfigError with all problems.

    `price` is compute.price_per_gpu_hour.
    """
    budgets = []
    problems = []
    for text in texts:
        try:
            budgets.append(_budget(text, price))
        except ValueError as error:
            problems.append(f"command line: --budget: found {text!r}{error}. Nothing was written.")
    if problems:
        raise ConfigError(problems)
    return budgets


def _budget(text: str, price: float | None) -> Budget:
    """Return the budget that a text stands for. Raise ValueError, saying what is wrong."""
    # What is no amount above 0 falls through to the last line, as an unknown unit does.
    match = _BUDGET.fullmatch(text.strip())
    if match and float(match[1]) > 0:
        amount = float(match[1])
        unit = match[2].lower()
        if unit in _HOURS:
            return Budget(amount * _HOURS[unit], "hours")
        if unit in _GPU_HOURS:
            return Budget(amount, "gpu-hours")
        if unit in _MONEY:
            if not price:
                raise ValueError(", but no price; set compute.price_per_gpu_hour")
            return Budget(amount, "money", price)
    raise ValueError("; expected such as 12gpu-hours, 3h, 90min or 200money")
