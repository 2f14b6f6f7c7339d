"""Values to search, as they are typed: `log(1e-5,1e-3)`, `0.2..0.8`, `8,16,32`; checked as the overrides they become.

Not for choosing among them (study).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kubetune.base.provenance import Entry, KeyPath, Origin, dotted, key_path
from kubetune.config import json_schema
from kubetune.config.aliases import canonical
from kubetune.config.schema import Config
from kubetune.errors import ConfigError

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_LOG = re.compile(rf"log\(\s*({_NUMBER})\s*,\s*({_NUMBER})\s*\)")
_BETWEEN = re.compile(rf"({_NUMBER})\s*\.\.\s*({_NUMBER})")
_WORD = re.compile(r"[A-Za-z_][\w.\[\]-]*=")

OURS = {
    "a sweep sets this itself": (
        "name", "output", "mirror", "push", "compute", "kubernetes", "training.pause_at_step", "training.resume",
        "training.metric_for_best_model", "training.greater_is_better",
    ),
    "--repeat N trains each setting with N seeds": ("training.seed",),
    "trials are compared by these data": ("data.eval",),
    "it makes no other run": ("logging", "tracking", "hooks"),
}  # fmt: skip
"""Keys, or whole sections, that are not to be searched, by the reason."""

Values = dict[str, str]
"""Values of a trial by key, each as the text of an override."""

ENDLESS = 1_000_000
"""Trials where only a budget ends the search."""


@dataclass(frozen=True)
class Range:
    """The values of one key: of a `float` or `int` from `low` to `high`, both of them too, or one of `choices`."""

    key: str
    kind: Literal["float", "int", "choice"]
    low: float = 0
    high: float = 0
    log: bool = False
    choices: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """Values that must be right for all to be."""
        return self.choices or (self.text(self.low), self.text(self.high))

    def text(self, value: float) -> str:
        """A value as an override has it."""
        return str(int(value)) if self.kind == "int" else repr(float(value)).removesuffix(".0")

    def __str__(self) -> str:
        if self.choices:
            return ",".join(self.choices)
        low, high = (f"{value:.10g}" for value in (self.low, self.high))
        return f"log({low},{high})" if self.log else f"{low}..{high}"


def overrides(values: Values) -> list[str]:
    """The values as overrides, `key=value`."""
    return [f"{key}={text}" for key, text in values.items()]


def told(values: Values) -> str:
    """The values as people read them: numbers with four digits."""
    return " ".join(f"{key}={_short(text)}" for key, text in values.items())


def _short(text: str) -> str:
    return (
        f"{float(text):.4g}"
        if re.fullmatch(_NUMBER, text) and len(text) > 6 and not text.isdigit()
        else text
    )


def split(
    words: Sequence[str], flags: Sequence[str] = ()
) -> tuple[list[str], list[Range], list[str]]:
    """The words of a command line that are no ranges, the ranges, and what is wrong with those that want to be some.

    `flags`: keys that flags gave a value, beside which a range says nothing either.
    """
    rest, found, problems = [], list[Range](), list[str]()
    for word in words:
        key, _, text = word.partition("=")
        try:
            one = _range(key.strip(), text.strip()) if _WORD.match(word) else None
        except ValueError as error:
            problems.append(f"override: {key.strip()}: {error}")
            continue
        if one is None:
            rest.append(word)
        else:
            found.append(one)
    places = [dotted(_path(one.key)) for one in found]
    keys = [*flags, *(word.partition("=")[0].strip() for word in rest if _WORD.match(word))]
    fixed = [dotted(_path(key)) for key in keys]
    problems += [
        f"override: {one}: found a value, and a range of {place}; keep one"
        for one in fixed for place in places if _is_within(one, place)
    ]  # fmt: skip
    problems += [
        f"override: {place}: found two ranges of it; keep one"
        for place in sorted({*_twice(places)})
    ]
    return rest, found, problems


def settings_in(ranges: Sequence[Range]) -> int | None:
    """The number of different settings that the ranges hold; None where one of them has no end of values."""
    if any(one.kind == "float" for one in ranges):
        return None
    return math.prod(len(one.choices) or int(one.high - one.low) + 1 for one in ranges)


def _twice(places: Sequence[str]) -> Iterator[str]:
    return (place for place in places if places.count(place) > 1)


def _range(key: str, text: str) -> Range | None:
    """The range that a text stands for; None for one value. Raises ValueError, saying why, for what is none."""
    log, between, choices = _LOG.fullmatch(text), _BETWEEN.fullmatch(text), _choices(text)
    if log is None and between is None:
        if text.startswith("log("):
            raise ValueError(f"found {text}; expected two numbers, as in log(1e-5,1e-3)")
        if len(choices) < 2:
            return None
        is_number = bool(_types(_path(key)) & {"number", "integer"})
        values = [
            float(one) if is_number and re.fullmatch(_NUMBER, one) else one for one in choices
        ]
        if doubled := [one for i, one in enumerate(choices) if values[i] in values[:i]]:
            raise ValueError(f"found {doubled[0]} twice in {text}; expected different values")
        return _permitted(Range(key, "choice", choices=tuple(choices)))
    low_text, high_text = (log or between or ()).groups()  # type: ignore[union-attr]
    low, high = float(low_text), float(high_text)
    if not low < high or not math.isfinite(high) or (log is not None and low <= 0):
        raise ValueError(
            f"found {text}; expected a lower and a higher number{', both above 0' if log else ''}"
        )
    is_whole = all(re.fullmatch(r"[-+]?\d+", part) for part in (low_text, high_text))
    kind: Literal["int", "float"] = (
        "int" if is_whole and "number" not in _types(_path(key)) else "float"
    )
    return _permitted(Range(key, kind, low, high, log is not None))


def _permitted(found: Range) -> Range:
    place = dotted(_path(found.key))
    for reason, keys in OURS.items():
        if any(_is_within(place, key) for key in keys):
            raise ValueError(f"{reason}; give one value, or leave it out")
    return found


def _is_within(place: str, other: str) -> bool:
    return place == other or place.startswith((f"{other}.", f"{other}["))


def _path(key: str) -> KeyPath:
    entry = canonical(Entry(key_path(key), "", Origin("override")))
    return entry.path if entry is not None else key_path(key)


def _types(path: KeyPath) -> set[str]:
    """JSON types of the values that may stand at a path."""
    return {str(option.get("type")) for option in json_schema.options(json_schema.at(path) or {})}


def _choices(text: str) -> list[str]:
    """The parts between commas that stand in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        if letter in "'\"":
            quote = letter if not quote else "" if letter == quote else quote
        depth += (letter in "[{(") - (letter in ")}]")
        parts[-1] += letter
    return [part.strip() for part in parts]


def check(
    ranges: Sequence[Range], load: Callable[[list[str]], Config], known: Sequence[str] = ()
) -> Config:
    """The config with the first value of each range. Raises ConfigError with all that is wrong with any end of any.

    `known` are problems found before, which are told with these. `load` makes a config with overrides, and so refuses
    values in the words that overrides are refused in.
    """
    first, problems = {one.key: one.ends[0] for one in ranges}, [*known]
    config: Config | None = None
    for values in (first, *({**first, one.key: text} for one in ranges for text in one.ends[1:])):
        try:
            found = load(overrides(values))
            config = config or found
        except ConfigError as error:
            problems += error.problems
    if problems or config is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config
