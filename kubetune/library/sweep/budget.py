"""The budget of a sweep: hours, hours of devices, or money, as it is typed and as it is spent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kubetune.base.humanize import duration
from kubetune.errors import ConfigError
from kubetune.library.sweep.record import Record

Unit = Literal["hours", "gpu-hours", "money"]
_UNITS: Final[dict[str, tuple[Unit, float]]] = {
    "h": ("hours", 1), "hour": ("hours", 1), "hours": ("hours", 1), "min": ("hours", 1 / 60),
    "minutes": ("hours", 1 / 60), "gpu-hours": ("gpu-hours", 1), "gpu-hour": ("gpu-hours", 1), "gpuh": ("gpu-hours", 1),
    "money": ("money", 1), "usd": ("money", 1), "eur": ("money", 1), "chf": ("money", 1), "gbp": ("money", 1),
}  # fmt: skip
_BUDGET = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z][a-z-]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Budget:
    """At most `amount` of a unit. `price`: of a device and hour."""

    amount: float
    unit: Unit
    price: float = 0.0

    def spent(self, record: Record) -> float:
        """The amount that is spent."""
        if self.unit == "hours":
            return record.seconds / 3600
        return record.device_hours * (self.price if self.unit == "money" else 1.0)

    def of(self, seconds: float, devices: int) -> float:
        """The amount that so many devices take in so many seconds."""
        return (
            seconds
            / 3600
            * (
                1
                if self.unit == "hours"
                else devices * (self.price if self.unit == "money" else 1.0)
            )
        )

    def told(self, amount: float) -> str:
        """An amount beside the whole, in words: `3.2 of 12 gpu-hours`, `12 min of 3 h`."""
        return f"{duration(amount * 3600) if self.unit == 'hours' else f'{amount:.3g}'} of {self}"

    def __str__(self) -> str:
        return (
            duration(self.amount * 3600) if self.unit == "hours" else f"{self.amount:g} {self.unit}"
        )


def parse(texts: Sequence[str], price: float | None) -> list[Budget]:
    """The budgets of a command line, `price` being compute.price_per_gpu_hour. Raises ConfigError with all problems."""
    found, problems = list[Budget](), list[str]()
    for text in texts:
        match = _BUDGET.fullmatch(text.strip())
        unit, factor = _UNITS.get(match[2].lower(), (None, 0.0)) if match else (None, 0.0)
        if match is None or unit is None or not float(match[1]):
            problems.append(
                f"--budget: found {text!r}; expected such as 12gpu-hours, 3h, 90min or 200money"
            )
        elif unit == "money" and not price:
            problems.append(
                f"--budget: found {text!r}, but no price; set compute.price_per_gpu_hour"
            )
        else:
            found.append(Budget(float(match[1]) * factor, unit, price or 0.0))
    if problems:
        raise ConfigError(
            [f"command line: {problem}. Nothing was written." for problem in problems]
        )
    return found
