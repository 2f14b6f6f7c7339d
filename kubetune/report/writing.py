"""Values as people read them: numbers, bytes, times, shares, paths."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any


def number(value: Any) -> str:
    """A number as people read it: `1,234`, `0.0659`, `1.2e-5`; a dash for what is not there."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{round(value):,}"
    return f"{value:.4g}"


def counted(count: int, unit: str) -> str:
    """`1 row`, `1,234 rows`."""
    return f"{count:,} {unit if count == 1 else f'{unit}s'}"


def short(value: int) -> str:
    """A count in few characters: `115,980`, `80.2 M`, `1.34 G`."""
    for unit, one in (("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if value >= 10 * one or (value >= one and one > 10**6):
            return f"{value / one:.3g} {unit}"
    return f"{value:,}"


def size(value: float | None) -> str:
    """Bytes in the unit that leaves few digits."""
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def duration(seconds: float | None) -> str:
    """`3 h 12 min`, `2 min 5 s`, `0.8 s`."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def share(value: float | None) -> str:
    """`12.3 %`."""
    return "–" if value is None else f"{100 * value:.3g} %"


def place(path: Any) -> str:
    """A path as short as it can be said from here."""
    return str(path).removeprefix(f"{Path.cwd()}/")
