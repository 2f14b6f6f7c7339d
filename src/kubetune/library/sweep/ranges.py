"""Values to search, as they are typed: `log(1e-5,1e-3)`, `0.2..0.8`, `8,16,32`.

They are checked as the overrides they become. Choosing among them is Optuna's work (study).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kubetune.base.provenance import Entry, KeyPath, Origin, dotted, key_path
from kubetune.config import json_schema
from kubetune.config.aliases import canonical
from kubetune.config.schema import Config
from kubetune.errors import ConfigError

# The three forms of a range besides a list, and what an override begins with.
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_LOG = re.compile(rf"log\(\s*({_NUMBER})\s*,\s*({_NUMBER})\s*\)")
_BETWEEN = re.compile(rf"({_NUMBER})\s*\.\.\s*({_NUMBER})")
_OVERRIDE = re.compile(r"[A-Za-z_][\w.\[\]-]*=")

# Keys and whole sections that cannot be searched, by the reason.
_NOT_SEARCHED = {
    "a sweep sets this itself": (
        "name", "output", "mirror", "push", "compute", "kubernetes", "training.pause_at_step", "training.resume",
        "training.metric_for_best_model", "training.greater_is_better",
    ),
    "--repeat N trains each setting with N seeds": ("training.seed",),
    "trials are compared by these data": ("data.eval",),
    "it makes no other run": ("logging", "tracking", "hooks"),
}  # fmt: skip

# Values of a trial by key, each as the text of an override.
Values = dict[str, str]

# Number of trials if only a budget ends the search.
ENDLESS = 1_000_000


@dataclass(frozen=True)
class Range:
    """The values of one key: numbers from `low` to `high`, both included, or `choices`."""

    key: str
    kind: Literal["float", "int", "choice"]
    low: float = 0
    high: float = 0
    log: bool = False
    choices: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """The values to check: if these are valid, all are."""
        return self.choices or (self.text(self.low), self.text(self.high))

    def text(self, value: float) -> str:
        """Return a value as an override has it."""
        if self.kind == "int":
            return str(int(value))
        # All digits, so that the run trains with exactly the value that the study chose.
        return repr(float(value)).removesuffix(".0")

    def __str__(self) -> str:
        if self.choices:
            return ",".join(self.choices)
        low = f"{self.low:.10g}"
        high = f"{self.high:.10g}"
        return f"log({low},{high})" if self.log else f"{low}..{high}"


def overrides(values: Values) -> list[str]:
    """Return the values as overrides, `key=value`."""
    return [f"{key}={text}" for key, text in values.items()]


def short_text(values: Values) -> str:
    """Return the values as people read them, long numbers with four digits."""
    words = []
    for key, text in values.items():
        # 3.1415926e-05 becomes 3.142e-05; 4096000 stays.
        is_number = re.fullmatch(_NUMBER, text) is not None
        if is_number and len(text) > 6 and not text.isdigit():
            text = f"{float(text):.4g}"
        words.append(f"{key}={text}")
    return " ".join(words)


def split(
    words: Sequence[str], flags: Sequence[str] = ()
) -> tuple[list[str], list[Range], list[str]]:
    """Return the words of a command line that are no ranges, the ranges, and all problems.

    `flags` are keys that have a value by a flag, so that a range of them is a problem.
    """
    others = []
    ranges = []
    problems = []
    fixed = list(flags)  # keys with one value
    for word in words:
        key, _, text = word.partition("=")
        key = key.strip()
        value_range = None
        if _OVERRIDE.match(word):
            try:
                value_range = _range(key, text.strip())
            except ValueError as error:
                problems.append(f"override: {key}: {error}")
                continue
        if value_range is not None:
            ranges.append(value_range)
            continue
        # The path of the run file, or a key with one value.
        others.append(word)
        if _OVERRIDE.match(word):
            fixed.append(key)
    return others, ranges, problems + _doubled(fixed, [value_range.key for value_range in ranges])


def _doubled(fixed: Sequence[str], searched: Sequence[str]) -> list[str]:
    """Return problems of keys that have a range and a value, or two ranges."""
    problems = []
    # By their canonical names, since `lr` and `training.learning_rate` are one key.
    searched = [_canonical_name(key) for key in searched]
    for key in map(_canonical_name, fixed):
        for place in searched:
            if _is_within(key, place):
                problems.append(f"override: {key}: found a value, and a range of {place}; keep one")
    for place in sorted(set(searched)):
        if searched.count(place) > 1:
            problems.append(f"override: {place}: found two ranges of it; keep one")
    return problems


def settings_in(ranges: Sequence[Range]) -> int | None:
    """Return the number of different settings in the ranges; None if it is infinite."""
    count = 1
    for value_range in ranges:
        if value_range.kind == "float":
            return None
        count *= len(value_range.choices) or int(value_range.high - value_range.low) + 1
    return count


def _range(key: str, text: str) -> Range | None:
    """Return the range that a text stands for; None if it is one value.

    Raise ValueError with the reason for a text that looks like a range, but is not one.
    """
    is_log = text.startswith("log(")
    pattern = _LOG if is_log else _BETWEEN
    interval = pattern.fullmatch(text)
    if interval is not None:
        value_range = _interval(key, text, interval[1], interval[2], is_log=is_log)
    elif is_log:
        raise ValueError(f"found {text}; expected two numbers, as in log(1e-5,1e-3)")
    else:
        choices = _choices(text)
        if len(choices) < 2:
            return None
        _require_different(key, text, choices)
        value_range = Range(key, "choice", choices=tuple(choices))

    # Only now, since every key may have one value.
    name = _canonical_name(key)
    for reason, keys in _NOT_SEARCHED.items():
        if any(_is_within(name, other) for other in keys):
            raise ValueError(f"{reason}; give one value, or leave it out")
    return value_range


def _interval(key: str, text: str, low_text: str, high_text: str, *, is_log: bool) -> Range:
    """Return the range between two numbers: of integers if both are, and the key allows no others."""
    low = float(low_text)
    high = float(high_text)
    if not low < high or not math.isfinite(high) or (is_log and low <= 0):
        numbers = "a lower and a higher number"
        if is_log:
            numbers += ", both above 0"
        raise ValueError(f"found {text}; expected {numbers}")
    # 0..1 of a probability are fractions, 8..64 of a rank are integers.
    is_whole = all(re.fullmatch(r"[-+]?\d+", part) for part in (low_text, high_text))
    if is_whole and "number" not in _types(key):
        return Range(key, "int", low, high, is_log)
    return Range(key, "float", low, high, is_log)


def _require_different(key: str, text: str, choices: list[str]) -> None:
    """Raise ValueError if a choice occurs twice; as numbers, 1e-3 and 0.001 are the same."""
    is_numeric = not _types(key).isdisjoint({"number", "integer"})
    values: set[str | float] = set()
    for choice in choices:
        value: str | float = choice
        if is_numeric and re.fullmatch(_NUMBER, choice):
            value = float(choice)
        if value in values:
            raise ValueError(f"found {choice} twice in {text}; expected different values")
        values.add(value)


def _is_within(key: str, section: str) -> bool:
    """True if a key is a section, or in it: `data.train[0].weight` is in `data.train`."""
    return key == section or key.startswith((f"{section}.", f"{section}["))


def _canonical(key: str) -> KeyPath:
    """Return the path of a key whose name may be an alias, such as `lr`."""
    entry = canonical(Entry(key_path(key), "", Origin("override")))
    if entry is None:
        return key_path(key)
    return entry.path


def _canonical_name(key: str) -> str:
    """Return the name of a key whose name may be an alias."""
    return dotted(_canonical(key))


def _types(key: str) -> set[str]:
    """Return the JSON types of the values that a key takes."""
    node = json_schema.at(_canonical(key)) or {}
    return {str(option.get("type")) for option in json_schema.options(node)}


def _choices(text: str) -> list[str]:
    """Return the parts between commas, except commas in brackets or quotes: `[a,b],c` has two."""
    parts = [""]
    depth = 0  # of brackets
    quote = ""  # the quote that is open
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        if letter == quote:
            quote = ""
        elif letter in "'\"" and not quote:
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        parts[-1] += letter
    return [part.strip() for part in parts]


def check(
    ranges: Sequence[Range], load: Callable[[list[str]], Config], known: Sequence[str] = ()
) -> Config:
    """Return the config with the first value of each range. Raise ConfigError with all problems.

    `load` makes a config with more overrides, so that a bad end of a range is refused in the words
    in which overrides are. `known` are problems from before, which are shown with these.
    """
    first = {value_range.key: value_range.ends[0] for value_range in ranges}
    # One end at a time, so that each mistake is reported once and not for every combination.
    settings = [first]
    for value_range in ranges:
        for end in value_range.ends[1:]:
            settings.append({**first, value_range.key: end})
    configs = []
    problems = list(known)
    for values in settings:
        try:
            configs.append(load(overrides(values)))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return configs[0]
