"""JSON of which nothing is lost: a key that occurs twice, and what is no JSON though Python reads it, are refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, Final, NoReturn

# Python reads no longer whole numbers (sys.set_int_max_str_digits).
_MOST_DIGITS: Final = 4300

# An object of JSON, as Python has it.
JsonObject = dict[str, Any]


class Flawed(ValueError):
    """JSON that can be read and must not be: a part of it would be lost, or is no JSON."""


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raise JSONDecodeError, Flawed, UnicodeDecodeError, or RecursionError where it is nested too deeply.
    """
    try:
        return json.loads(text, **_STRICT_RULES)
    except (json.JSONDecodeError, Flawed, UnicodeDecodeError):
        raise
    except ValueError:
        raise _too_many_digits() from None


def value_at(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins at a character, and where it ends; in place of a flawed value its Flawed.

    Raise JSONDecodeError, or RecursionError where it is nested too deeply.
    """
    try:
        return _STRICT.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except Flawed as flaw:
        value = flaw
    except ValueError:
        value = _too_many_digits()

    # Reading goes on after the flawed value. Where it ends, only a decoder finds that takes everything.
    _, end = _LENIENT.raw_decode(text, at)
    return value, end


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    # {"label": 1, "label": 0} has two pairs and one key.
    if len(value) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        name = json.dumps(twice, ensure_ascii=False)
        raise Flawed(f"has the key {name} twice; all but the last would be lost")
    return value


def _as_float(digits: str) -> float:
    # 1e999 is infinite to Python, and would be read without a word.
    value = float(digits)
    if math.isinf(value):
        raise Flawed(f"holds {digits}, which is beyond the numbers that can be read")
    return value


def _too_many_digits() -> Flawed:
    return Flawed(f"holds a number of more than {_MOST_DIGITS:,} digits")


def _refuse_constant(name: str) -> NoReturn:
    raise Flawed(f"holds {name}, which is no JSON; expected a number or null")


_STRICT_RULES: Final[dict[str, Any]] = {
    "object_pairs_hook": _as_object,
    "parse_constant": _refuse_constant,
    "parse_float": _as_float,
}
_STRICT: Final = json.JSONDecoder(**_STRICT_RULES)
# It reads whole numbers of any length, as how many digits they have.
_LENIENT: Final = json.JSONDecoder(parse_int=len)
