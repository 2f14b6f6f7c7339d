"""What a value of a record holds: words, a phrase, a number, the texts within it, or nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

# A record as its file has it.
RecordValue = Mapping[str, Any]


def count_words(value: Any) -> int:
    """Return the number of words of a text, or of all texts in a list or an object; ids, numbers and dates have none."""
    if isinstance(value, str):
        words = [word for word in value.split() if any(map(str.isalpha, word))]
        # Chinese and its like have no spaces between words.
        if not value.isascii():
            return max(len(words), sum(char > "\u2e80" for char in value) // 2)
        return len(words)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum(map(count_words, value))
    return 0


def is_prose(value: Any) -> bool:
    """True if a value is a text of two words at least, or holds such texts."""
    return count_words(value) >= 2


# What a column that is called like thoughts holds if it is a setting.
_SETTINGS: Final = frozenset((
    "none", "null", "nan", "n/a", "minimal", "low", "medium", "high", "xhigh", "max", "auto", "default", "on", "off",
    "true", "false", "yes", "no", "enabled", "disabled",
))  # fmt: skip


def is_thought(value: Any) -> bool:
    """True for a text that may be thoughts, whatever signs it is of; the name of an effort is none."""
    return isinstance(value, str) and value.strip().lower() not in ("", *_SETTINGS)


# What tables and data frames write where they hold nothing.
_MISSING: Final = frozenset((
    "nan", "NaN", "NULL", "null", "None", "none", "N/A", "n/a", "NA", "<NA>", "#N/A", "NaT", "nil",
))  # fmt: skip


def is_word_for_none(text: str) -> bool:
    """True for a text that stands for nothing, such as `nan` or `NULL`."""
    return text.strip() in _MISSING


def is_phrase(value: Any) -> bool:
    """True for texts of several words, which a name such as `abstract_algebra` has too; an id with digits has none."""
    if isinstance(value, str) and not any(map(str.isspace, value)):
        if any(map(str.isdigit, value)):
            return False
        value = re.sub(r"[_-]", " ", value)
    return is_prose(value)


def joined_texts(value: Any) -> Any:
    """Return a list of texts as one text, a line each; anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    return value


def is_empty(value: Any) -> bool:
    """True for None, for a text without a sign, and for what holds nothing else; a 0 is something."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_empty, value))
    return value is None or (isinstance(value, str) and not value.strip())


def key_of(names: Sequence[str], value: RecordValue, columns: Mapping[str, str]) -> str:
    """Return the column that stands for the first of these names; empty if the record has none that holds something."""
    for name in names:
        column = columns.get(name, name)
        if not is_empty(value.get(column)):
            return column
    return ""


def is_held(value: Any, texts: Sequence[Any]) -> bool:
    """True if each text or number in a value is a part of one of these texts, which may be messages."""
    held = list(leaves(list(texts)))
    parts = [part.strip() for part in leaves(value)]
    return bool(parts) and all(any(_has_part(text, part) for text in held) for part in parts)


def _has_part(text: str, part: str) -> bool:
    """True if a text has this part; a number has to stand alone, since 23 does not say 3."""
    if part not in text:
        return False
    return not is_number(part) or bool(re.search(rf"(?<![\d.]){re.escape(part)}(?!\.?\d)", text))


def leaves(value: Any) -> Iterator[str]:
    """Yield the texts and numbers within a value."""
    if isinstance(value, (str, int, float)):
        yield str(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)


def is_number(value: Any) -> bool:
    """True for a number, also as the text that a table holds."""
    if isinstance(value, str):
        return re.fullmatch(r"\s*-?\d+(\.\d+)?\s*", value, re.ASCII) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_integer(value: Any) -> Any:
    """Return 4 for 4.0, as tables and data frames write counts and grades; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def renamed(value: RecordValue, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a record whose columns have our names. `names`: the file's, by ours."""
    of_file = {column: key for key, column in names.items()}
    return {of_file.get(column, column): item for column, item in value.items()}
