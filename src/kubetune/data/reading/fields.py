"""The fields of a record: what is wrong with them in words, and a note of those that were read, to tell of the others.

Nothing here knows the shapes of records (formats.py) or of messages (messages.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from kubetune.base.humanize import visible
from kubetune.data.reading.strict_json import Flawed, parse
from kubetune.data.record_values import RecordValue

# Values of keys that say nothing.
NOTHING: Final[tuple[Any, ...]] = (None, "", [], {})


class Empty(ValueError):
    """A text or a list of messages that has to hold something and holds nothing."""


class Fields(Mapping[str, Any]):
    """A record that remembers which of its keys were read, so that the user hears of the others.

    Asking for a value reads its key; asking whether a key is there does not:

        record = Fields({"text": "Hi", "id": 7, "note": ""})
        record["text"]      →  "Hi"
        record.unused       →  ("id",)     `note` holds nothing
    """

    def __init__(
        self, value: RecordValue, columns: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`columns`: the file's names for keys of the record that have others; empty for those that it has not."""
        self._value = value
        self.columns = columns
        self._read: set[str] = set()
        # Unread keys of what is inside the record, such as `messages[].id`.
        self._noted: set[str] = set()
        # What keys were taken as, where their names do not say it.
        self._taken: list[str] = []
        # Images that are in the contents of messages, in their order.
        self.images: list[Any] = []

    def __getitem__(self, key: str) -> Any:
        value = self._value[key]
        self._read.add(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default."""
        # Mapping.get raises and catches a KeyError for a missing key, and most keys that are asked for are missing.
        return self[key] if key in self._value else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def __len__(self) -> int:
        return len(self._value)

    def __contains__(self, key: object) -> bool:
        return key in self._value

    def holds(self, key: str) -> bool:
        """True if the key is there and has something to say."""
        return self._value.get(key) not in NOTHING

    def has_read(self, key: str) -> bool:
        """True if the key was asked for."""
        return key in self._read

    def peek(self, key: str) -> Any:
        """Return the value of a key, which does not count as used by this."""
        return self._value.get(key)

    def note_unused(self, key: str) -> None:
        """Count a key that is not one of the record itself, such as `messages[].id`, as one that nobody reads."""
        self._noted.add(key)

    def note_taken(self, key: str, meaning: str) -> None:
        """Keep what a key was taken as whose name alone does not say it, by the name that the file has."""
        column = self.columns.get(key, key)
        if column:
            self._taken.append(f"`{column}` as {meaning}")

    @property
    def taken(self) -> str:
        """Return what keys were taken as, in words; empty where their names say it."""
        return ", ".join(self._taken)

    @property
    def unused(self) -> tuple[str, ...]:
        """Return the keys that hold something and have not been read, in alphabetical order."""
        # Keys that hold nothing lose nothing.
        unread = {key for key in self._value if key not in self._read and self.holds(key)}
        return tuple(sorted(self._noted | unread))


def required(value: RecordValue, key: str) -> Any:
    """Return the value of a key. Raise ValueError where there is none."""
    if value.get(key) is None:
        state = "null" if key in value else "missing"
        raise ValueError(f"`{key}` is {state}; {keys(value)}")
    return value[key]


def listed(value: RecordValue, key: str) -> list[Any]:
    """Return the messages under a key, which tables hold as JSON. Raise ValueError where there are none."""
    items = required(value, key)
    if isinstance(items, str):
        items = parsed(items, key)
    if not isinstance(items, list):
        raise ValueError(f"{key} is {show(items)}; expected a list")
    if not items:
        raise Empty(f"{key} is empty; expected at least one message")
    return items


def text_of(
    value: Any,
    where: str,
    *,
    may_be_empty: bool = False,
) -> str:
    """Return a text that can be tokenised. Raise ValueError for what is none."""
    if not isinstance(value, str):
        raise ValueError(f"{where} is {show(value)}; expected a text")
    if not may_be_empty and not value.strip():
        raise Empty(f"{where} is empty; expected a text")
    # A NUL tells of a file that is no text. Half a surrogate pair has no UTF-8, which tokenizers take.
    if "\0" in value:
        raise ValueError(
            f"{where} holds a NUL character at position {value.index(chr(0))}; expected text"
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where} holds half a surrogate pair at position {error.start}; expected text"
            ) from None

    return value


def parsed(text: str, where: str) -> Any:
    """Return a text read as JSON. Raise ValueError where it is none."""
    try:
        return parse(text)
    except RecursionError:
        raise ValueError(f"{where} is {show(text)}, which is nested too deeply") from None
    except Flawed as flaw:
        raise ValueError(f"{where} is {show(text)}, which {flaw}") from None
    except ValueError as error:
        if _has_quotes_of_python(text):
            # Without quotes around it, several lists are the same mistake.
            shown = show(text).strip('"')
            raise ValueError(
                f"{where} is {shown}, which has Python's quotes; expected JSON, as `json.dumps` writes "
                "it in place of `str`"
            ) from None
        raise ValueError(f"{where} is {show(text)}, which is not JSON: {error}") from None


def _has_quotes_of_python(text: str) -> bool:
    """True for a list or an object as Python writes it: `['joy']`, `[{'role': 'user'}]`; numpy has no commas."""
    return re.match(r"""\s*[\[{(][\s\[{(]*'""", text) is not None


def keys(value: RecordValue) -> str:
    """Return the keys of a record, for messages."""
    if not value:
        return "has no keys"
    # Keys come from files of others, so signs that hide text are made visible.
    # The user knows them by the names that the file has.
    columns = value.columns if isinstance(value, Fields) else {}
    names = []
    for key in list(value)[:12]:
        name = columns.get(key, key)
        names.append(f"`{visible(str(name), keep='')}`")
    return f"has the keys {', '.join(names)}"


def quoted(names: Iterable[str]) -> str:
    """Return names of keys for messages: "`chosen` and `rejected`"."""
    return " and ".join(f"`{name}`" for name in names)


def first_of(names: Iterable[str], value: Container[str]) -> str | None:
    """Return the first of these keys that a record has, whatever it holds; None where it has none of them."""
    for name in names:
        if name in value:
            return name
    return None


def show(value: Any) -> str:
    """Return a value as JSON, cut short, for messages."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (RecursionError, TypeError, ValueError):
        text = f"of the kind {type(value).__name__}"
    # Messages stay on a line or two, whatever a record holds.
    return text if len(text) <= 60 else text[:57] + "…"
