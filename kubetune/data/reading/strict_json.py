"""JSON of which nothing is lost: a key that stands twice in an object, and what is no JSON though Python reads it."""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn

_MOST_DIGITS: Final = 4300
"""Python reads no longer numbers."""


class Flawed(ValueError):
    """JSON that can be read and must not be: a part of it would be lost, or is no JSON."""


def parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises JSONDecodeError, Flawed, or RecursionError where it is nested too deeply."""
    try:
        return json.loads(
            text, object_pairs_hook=_as_object, parse_constant=_refuse_constant, parse_float=_finite
        )
    except (json.JSONDecodeError, Flawed, UnicodeDecodeError):
        raise
    except ValueError:
        raise Flawed(f"holds a number of more than {_MOST_DIGITS:,} digits") from None


class Scanner:
    """Reads values that stand one after the other; a flaw of one does not end the reading."""

    def __init__(self) -> None:
        self._flaw: Flawed | None = None
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._as_object,
            parse_constant=self._note_constant,
            parse_float=self._as_float,
        )

    def value_at(self, text: str, at: int) -> tuple[Any, int]:
        """The value that begins at a character, or the Flawed that it is, and where it ends.

        Raises JSONDecodeError, RecursionError, or Flawed for what cannot be read over.
        """
        self._flaw = None
        try:
            value, end = self._decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            raise
        except ValueError:
            raise Flawed(f"holds a number of more than {_MOST_DIGITS:,} digits") from None
        return self._flaw or value, end

    def _as_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        try:
            return _as_object(pairs)
        except Flawed as flaw:
            self._flaw = self._flaw or flaw
            return {}

    def _as_float(self, digits: str) -> float:
        try:
            return _finite(digits)
        except Flawed as flaw:
            self._flaw = self._flaw or flaw
            return 0.0

    def _note_constant(self, name: str) -> None:
        self._flaw = self._flaw or _constant(name)


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Flawed(
            f"has the key {json.dumps(twice, ensure_ascii=False)} twice; all but the last would be lost"
        )
    return found


def _constant(name: str) -> Flawed:
    return Flawed(f"holds {name}, which is no JSON; expected a number or null")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise Flawed(f"holds {digits}, which is beyond the numbers that can be read")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise _constant(name)
