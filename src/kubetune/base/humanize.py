"""Write values as people read them, on the terminal, in logs and on pages: numbers, bytes, times, shares, paths."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

# Characters that a terminal acts upon (control characters, changes of direction), and those that it cannot show.
_ACTED_UPON: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

_KEYS_SHOWN: Final = 12
_BLOCKS: Final = "▁▂▃▄▅▆▇█"

# A curve, with None where no value is known.
Values = Sequence[float | None]


def number(value: Any) -> str:
    """Return a number as people read it: `1,234`, `0.0659`, `1.2e-5`. A dash for None; other values as text."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{round(value):,}"
    return f"{value:.4g}"


def counted(count: int, unit: str) -> str:
    """Return a count with its unit: `1 row`, `1,234 rows`, `2 processes`."""
    if count == 1:
        return f"1 {unit}"
    ending = "s"
    if unit.endswith(("s", "ch")):
        ending = "es"
    return f"{count:,} {unit}{ending}"


def short(value: int) -> str:
    """Return a count in few characters: `115,980`, `80.2 M`, `1.34 G`."""
    # Millions begin at 10 M, since 1,234,567 is still short enough to write out.
    for unit, factor, smallest in (
        ("T", 10**12, 10**12),
        ("G", 10**9, 10**9),
        ("M", 10**6, 10**7),
    ):
        if value >= smallest:
            return f"{value / factor:.3g} {unit}"
    return f"{value:,}"


def size(value: float | None) -> str:
    """Return bytes in the unit that leaves few digits: `954 MiB`, `1,010 MiB`, `1.5 GiB`. A dash for None."""
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        # From here on the number would be rounded to 1,024, which is 1 of the next unit.
        if abs(value) < 1023.5:
            return _three_digits(value, unit)
        value /= 1024
    return _three_digits(value, "TiB")


def _three_digits(value: float, unit: str) -> str:
    # `.3g` would write 1,010 as 1.01e+03.
    if abs(value) < 999.5:
        return f"{value:.3g} {unit}"
    return f"{value:,.0f} {unit}"


def duration(seconds: float | None) -> str:
    """Return a time: `3 h 12 min`, `2 min 5 s`, `30 min`, `0.8 s`. A dash for None."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.2g} s"

    # Two units at most, and no zeros: 125 s → 2 min 5 s, 1,800 s → 30 min.
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        text = f"{minutes} min"
        if rest:
            text += f" {rest} s"
        return text

    # Rounded anew, since seconds are not shown beside hours.
    hours, minutes = divmod(round(seconds / 60), 60)
    text = f"{hours:,} h"
    if minutes:
        text += f" {minutes} min"
    return text


def estimate(seconds: float | None) -> str:
    """Return a time that is no more than an estimate: `17 min`, not `16 min 58 s`. A dash for None."""
    if seconds is None:
        return duration(None)
    if seconds >= 60:
        return duration(60 * round(seconds / 60))
    return duration(seconds) if seconds >= 10 else f"{number(float(f'{seconds:.2g}'))} s"


def pause(seconds: float) -> str:
    """Return `; training paused 0.2 s` for the end of a line. Empty if the pause is too short to notice."""
    if seconds < 0.005:
        return ""
    return f"; training paused {duration(seconds)}"


def ago(moment: str | None, now: datetime | None = None) -> str:
    """Return a time as lists have it: `3 min ago`, `5 h ago`, `27 Nov`, `2025-11-27`. A dash for None."""
    if not moment:
        return "–"
    now = now or datetime.now(UTC)
    then = datetime.fromisoformat(moment)
    minutes = int((now - then).total_seconds() // 60)
    # Clocks of two machines differ a little.
    if minutes < 1:
        return "just now"
    if minutes < 60:
        return f"{minutes} min ago"
    if minutes < 24 * 60:
        return f"{minutes // 60} h ago"
    if then.year == now.year:
        return f"{then.day} {then:%b}"
    return f"{then:%Y-%m-%d}"


def brief(seconds: float | None) -> str:
    """Return a time in few characters, for columns: `42s`, `12m`, `3h05m`, `2d04h`. Empty for None."""
    if seconds is None:
        return ""
    whole = int(max(0.0, seconds))
    if whole < 100:
        return f"{whole}s"
    minutes = whole // 60
    hours = whole // 3600
    if minutes < 100:
        return f"{minutes}m"
    if hours < 48:
        return f"{hours}h{minutes % 60:02}m"
    return f"{hours // 24}d{hours % 24:02}h"


def share(value: float | None) -> str:
    """Return a share as a percentage: `12.3 %`. A dash for None."""
    if value is None:
        return "–"
    return f"{100 * value:.3g} %"


def nearest(written: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the known name that is most like a mistyped one. None if none is that much like it (0 to 1)."""
    import difflib  # only mistakes need it

    return next(iter(difflib.get_close_matches(written, known, 1, likeness)), None)


def place(path: Any) -> str:
    """Return a path, relative to the current directory if it lies below it."""
    return str(path).removeprefix(f"{Path.cwd()}/")


def unused_keys(counts: Mapping[str, int], what: str = "keys not used") -> str:
    """Return `keys not used: id × 300, source × 12`, the most frequent first. Empty if there are none.

    `counts`: records that hold each key.
    """
    if not counts:
        return ""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    parts = []
    for key, count in ordered[:_KEYS_SHOWN]:
        name = visible(key, keep="") or "(no name)"
        parts.append(f"{name} × {count:,}")
    text = f"{what}: {', '.join(parts)}"
    if len(ordered) > _KEYS_SHOWN:
        text += f" and {len(ordered) - _KEYS_SHOWN:,} more"
    return text


def visible(text: str, keep: str = "\n\t") -> str:
    r"""Return a text that is safe for a terminal: characters that it would act upon are escaped, as in `\x1b[31m`.

    Texts of data and models may hold such characters. Those in `keep` stay; pass "" if the text must stay on one line.
    """

    def shown(match: re.Match[str]) -> str:
        char = match[0]
        if char in keep:
            return char
        return _escape(char)

    return _ACTED_UPON.sub(shown, text)


def shown_on(stream: TextIO, text: str) -> str:
    """Return a text as this stream may have it: `visible` on a terminal, unchanged in a file or a pipe."""
    if stream.isatty():
        return visible(text)
    return text


def shell_word(value: Any) -> str:
    r"""Return a path or a name as one word of a command that a user pastes into a shell.

    Characters that a terminal would act upon are written as `$'…\x1b…'`, which bash, zsh and ksh read back unchanged.
    """
    text = str(value)
    if not _ACTED_UPON.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_ACTED_UPON.sub(_escape_in_shell, escaped)}'"


def _escape_in_shell(match: re.Match[str]) -> str:
    """Return a character as escaped bytes. A shell reads exactly two digits after each `\\x`, and no more."""
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(match[0]))


def _escape(char: str) -> str:
    code = ord(char)
    if code < 256:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}"


def sparkline(values: Values, width: int) -> str:
    """Return values as blocks of eight heights, at most `width` of them. A space where no value is known.

    [0, 1, 2, None, 4] → "▁▃▅ █"
    """
    # As many cells as the width allows, then a height of 0 to 7 for each.
    cells = thinned(values, width)
    limits = limits_of(cells)
    if limits is None:
        return " " * len(cells)
    low, high = limits
    span = high - low
    blocks = []
    for cell in cells:
        if cell is None:
            blocks.append(" ")
        elif span == 0:
            blocks.append(_BLOCKS[0])
        else:
            blocks.append(_BLOCKS[round((cell - low) / span * (len(_BLOCKS) - 1))])
    return "".join(blocks)


def limits_of(values: Values) -> tuple[float, float] | None:
    """Return the smallest and the largest known value. None if no value is known."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return min(known), max(known)


def thinned(values: Values, width: int) -> list[float | None]:
    """Return at most `width` values, each the mean of the known ones among some neighbours."""
    # Seven values in three cells: [0 1] [2 3] [4 5 6].
    count = min(max(0, width), len(values))
    cells: list[float | None] = []
    for index in range(count):
        first = index * len(values) // count
        end = (index + 1) * len(values) // count
        known = [value for value in values[first:end] if value is not None]
        mean = None
        if known:
            mean = sum(known) / len(known)
        cells.append(mean)
    return cells
