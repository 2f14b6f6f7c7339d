"""Write manifests as YAML that every parser reads alike, one of YAML 1.1 (Go's, PyYAML) or of 1.2.

`no`, `1e3`, `0o7`, `12:30` or `2026-01-01` are strings in one version and something else in the other. So a string has
no quotes only if it cannot be anything but a string. Written by hand, since these rules on top of PyYAML's C emitter
make `kubetune render` a tenth slower (mostly by its import), and on top of ruamel's a quarter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# A string without quotes: a letter first, then no sign with a meaning in YAML. (`e`, `x`, `.` and `_` have one only
# after a digit.) Or a quantity such as 32Gi.
PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@-]*(:[A-Za-z0-9_./@-]+)*|[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T|m)")
WORDS = frozenset("y n yes no on off true false null".split())
# A string that may be a block (`|`): lines of printable ASCII without spaces at their ends; the first line has text and
# is not indented; exactly one newline at the end.
BLOCK = re.compile(r"[!-~]([ -~]*[!-~])?(\n([ -~]*[!-~])?)*(?<!\n)\n")
LONGEST_FLOW_LIST = 90
# Parsers look for the colon of a key only so far. A longer key is written after `?`.
LONGEST_KEY = 120
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}


def dump(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return one YAML stream of the objects, with `---` between them. The same objects give the same bytes."""
    documents = ["".join(f"{line}\n" for line in _lines(object_)) for object_ in objects]
    return "---\n".join(documents)


def _lines(value: Any) -> Iterator[str]:
    """Yield the lines of a mapping or list, not indented."""
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
    """Yield the lines of a value after its key, `start`."""
    if isinstance(value, str) and BLOCK.fullmatch(value):
        yield f"{start} |"
        yield from (line and f"  {line}" for line in value[:-1].split("\n"))
    elif _is_long(value):
        yield start
        yield from (line and f"  {line}" for line in _lines(value))
    else:
        yield f"{start} {_short(value)}"


def _is_long(value: Any) -> bool:
    """True for a mapping or list that takes lines of its own. Short lists stay in brackets."""
    if isinstance(value, Mapping):
        return bool(value)
    if not isinstance(value, (list, tuple)):
        return False
    is_flat = not any(isinstance(inner, (Mapping, list, tuple)) for inner in value)
    return not is_flat or sum(len(_scalar(inner).strip('"')) for inner in value) > LONGEST_FLOW_LIST


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_scalar, value))}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        if PLAIN.fullmatch(value) and value.lower() not in WORDS:
            return value
        return f'"{"".join(map(_escaped, value))}"'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        # Without a dot, 2e-05 is a number in YAML 1.2 but a string in 1.1.
        mantissa, e, exponent = repr(value).partition("e")
        if e and "." not in mantissa:
            return f"{mantissa}.0e{exponent}"
        return repr(value)
    return str(value)


def _escaped(character: str) -> str:
    """Return a character as it is between double quotes."""
    if character in _SHORT:
        return _SHORT[character]
    if character.isprintable():
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02X}"
    if code < 0x10000:
        return f"\\u{code:04X}"
    return f"\\U{code:08X}"
