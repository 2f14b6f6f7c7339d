"""Manifests as YAML text that every parser reads alike, whether it speaks YAML 1.1 (Go's, PyYAML) or 1.2.

`no`, `1e3`, `0o7`, `12:30` or `2026-01-01` are strings in one and something else in the other, so a string is left
without quotes only where no parser could see more in it than letters. Written by hand: with these rules laid over
PyYAML's C emitter `kubetune render` takes a tenth longer (its import, mostly), over ruamel's a quarter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Letters first, and no sign that YAML gives a meaning: `e`, `x`, `.` and `_` mean something only after a digit.
PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@-]*(:[A-Za-z0-9_./@-]+)*|[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T|m)")
WORDS = frozenset("y n yes no on off true false null".split())
# A block keeps these as they are: printable ASCII in lines that end without spaces, the first one with text and not
# indented.
BLOCK = re.compile(r"[!-~]([ -~]*[!-~])?(\n([ -~]*[!-~])?)*(?<!\n)\n")
LONGEST_FLOW_LIST = 90
# Parsers look so far for the colon that ends a key.
LONGEST_KEY = 120
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}


def dump(objects: Sequence[Mapping[str, Any]]) -> str:
    """One YAML stream of the objects, `---` between them; the same objects give the same bytes."""
    return "---\n".join(
        "".join(f"{line}\n" if line else "\n" for line in _lines(obj)) for obj in objects
    )


def _lines(value: Any) -> Iterator[str]:
    """The lines of a value that takes several, not indented."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            written = _scalar(key)
            if len(written) > LONGEST_KEY:
                yield f"? {written}"
                written = ""
            yield from _after(f"{written}:", inner)
    else:
        for inner in value:
            first, *rest = _lines(inner) if _is_long(inner) else _after("", inner)
            yield f"- {first.lstrip(' ')}"
            yield from (line and f"  {line}" for line in rest)


def _after(start: str, value: Any) -> Iterator[str]:
    """The lines of a value behind its key."""
    if isinstance(value, str) and BLOCK.fullmatch(value):
        yield f"{start} |"
        yield from (line and f"  {line}" for line in value[:-1].split("\n"))
    elif _is_long(value):
        yield start
        yield from (line and f"  {line}" for line in _lines(value))
    else:
        yield f"{start} {_short(value)}"


def _is_long(value: Any) -> bool:
    """A mapping or list that takes lines of its own."""
    if isinstance(value, Mapping):
        return bool(value)
    if not isinstance(value, (list, tuple)):
        return False
    is_flat = not any(isinstance(inner, (Mapping, list, tuple)) for inner in value)
    return not is_flat or sum(len(_scalar(inner).strip('"')) for inner in value) > LONGEST_FLOW_LIST


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    return (
        f"[{', '.join(map(_scalar, value))}]"
        if isinstance(value, (list, tuple))
        else _scalar(value)
    )


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value.lower() not in WORDS
        return value if plain else f'"{"".join(map(_character, value))}"'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        # Without a dot, 2e-05 is a number in YAML 1.2 but a string in 1.1.
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else repr(value)
    return str(value)


def _character(one: str) -> str:
    if one in _SHORT or one.isprintable():
        return _SHORT.get(one, one)
    number = ord(one)
    return (
        f"\\x{number:02X}"
        if number < 256
        else f"\\u{number:04X}"
        if number < 65536
        else f"\\U{number:08X}"
    )
