"""Values as people read them, on the terminal, in logs and on pages: numbers, counts, bytes, times, shares, paths."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

_ACTED_UPON: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that a terminal obeys: control characters, changes of direction; and what it cannot be sent."""

_KEYS_SHOWN: Final = 12
_BLOCKS: Final = "▁▂▃▄▅▆▇█"

Values = Sequence[float | None]
"""A curve, with None where nothing is known."""


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
    """`1 row`, `1,234 rows`, `2 processes`."""
    plural = f"{unit}es" if unit.endswith(("s", "ch")) else f"{unit}s"
    return f"{count:,} {unit if count == 1 else plural}"


def short(value: int) -> str:
    """A count in few characters: `115,980`, `80.2 M`, `1.34 G`."""
    for unit, one in (("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if value >= 10 * one or (value >= one and one > 10**6):
            return f"{value / one:.3g} {unit}"
    return f"{value:,}"


def size(value: float | None) -> str:
    """Bytes in the unit that leaves few digits: `954 MiB`, `1,010 MiB`, `1.5 GiB`; a dash for what is not known."""
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1023.5:
            # Three digits would make 1e+03 of what lies between 999.5 and the next unit.
            return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:,.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB" if abs(value) < 999.5 else f"{value:,.0f} TiB"


def duration(seconds: float | None) -> str:
    """`3 h 12 min`, `2 min 5 s`, `30 min`, `0.8 s`; a dash for what is not known."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def pause(seconds: float) -> str:
    """`; training paused 0.2 s`, for the end of a line; nothing where nobody would feel it."""
    return f"; training paused {duration(seconds)}" if seconds >= 0.005 else ""


def brief(seconds: float | None) -> str:
    """A time in few characters, for columns: `42s`, `12m`, `3h05m`, `2d04h`; nothing for what is not known."""
    if seconds is None:
        return ""
    whole = int(max(0.0, seconds))
    if whole < 100:
        return f"{whole}s"
    minutes, hours = whole // 60, whole // 3600
    if minutes < 100:
        return f"{minutes}m"
    return f"{hours}h{minutes % 60:02}m" if hours < 48 else f"{hours // 24}d{hours % 24:02}h"


def share(value: float | None) -> str:
    """`12.3 %`."""
    return "–" if value is None else f"{100 * value:.3g} %"


def nearest(written: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name that a mistyped one was most likely meant to be; None where none is so much like it."""
    import difflib  # for mistakes only

    return next(iter(difflib.get_close_matches(written, known, 1, likeness)), None)


def place(path: Any) -> str:
    """A path as short as it can be said from here."""
    return str(path).removeprefix(f"{Path.cwd()}/")


def unused_keys(counts: Mapping[str, int], what: str = "keys not used") -> str:
    """`keys not used: id × 300, source × 12`: what records hold and nothing reads; nothing where there is none."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = ", ".join(
        f"{visible(key, keep='') or '(no name)'} × {count:,}"
        for key, count in ordered[:_KEYS_SHOWN]
    )
    more = f" and {len(ordered) - _KEYS_SHOWN:,} more" if len(ordered) > _KEYS_SHOWN else ""
    return f"{what}: {shown}{more}" if ordered else ""


def visible(text: str, keep: str = "\n\t") -> str:
    r"""A text of unknown origin as a terminal may be given it: what would be obeyed is spelt out, as in `\x1b[31m`.

    The characters in `keep` stay as they are; give none where a text must not leave its line.
    """
    return _ACTED_UPON.sub(lambda found: found[0] if found[0] in keep else _spelt(found[0]), text)


def shown_on(stream: TextIO, text: str) -> str:
    """A text of unknown origin for this stream: on a terminal as `visible` has it, into a file or a pipe as it is."""
    return visible(text) if stream.isatty() else text


def shell_word(value: Any) -> str:
    r"""Return a path or a name as one word of a command that somebody pastes into a shell.

    What a terminal would obey is spelt out, in the form `$'…\x1b…'` that bash, zsh and ksh read back as it was.
    """
    text = str(value)
    if not _ACTED_UPON.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_ACTED_UPON.sub(_spelt_in_shell, escaped)}'"


def _spelt_in_shell(match: re.Match[str]) -> str:
    """Return a character byte by byte, since what follows `\\x1b` may look like one more digit only after two."""
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(match[0]))


def _spelt(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def sparkline(values: Values, width: int) -> str:
    """Values as blocks of eight heights, at most `width` of them; neighbours share one. A gap where none is known."""
    cells = thinned(values, width)
    if (limits := limits_of(cells)) is None:
        return " " * len(cells)
    low, span = limits[0], limits[1] - limits[0]
    return "".join(
        " "
        if cell is None
        else _BLOCKS[round((cell - low) / span * (len(_BLOCKS) - 1)) if span else 0]
        for cell in cells
    )


def limits_of(values: Values) -> tuple[float, float] | None:
    """The smallest and the largest of the values that are known."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


def thinned(values: Values, width: int) -> list[float | None]:
    """At most `width` values, each the mean of what is known of some neighbours."""
    count = min(max(0, width), len(values))
    cells: list[float | None] = []
    for index in range(count):
        part = [
            v
            for v in values[index * len(values) // count : (index + 1) * len(values) // count]
            if v is not None
        ]
        cells.append(sum(part) / len(part) if part else None)
    return cells
