"""Differences that make two configs two runs: settings that move a number. All others may change between two starts
of one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_FREE_TO_CHANGE = (
    "name", "output", "push", "mirror", "compute", "kubernetes", "logging", "tracking",
    "data.cache", "data.date", "data.num_proc", "training.resume", "training.save_total_limit",
    "training.timeout_seconds", "training.async_save", "training.parallelism",
)  # fmt: skip
"""Keys, or whole sections, that may differ between two starts of one run: none moves a number by more than rounding.

Of `data.date` the run directory keeps what its first start had.
"""


def moved_numbers(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(key, old value, new value) of what differs between two configs, as dotted values, and makes them two runs."""
    return [
        (key, json.dumps(old.get(key)), json.dumps(new.get(key)))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not any(f"{key}.".startswith(f"{free}.") for free in _FREE_TO_CHANGE)
    ]
