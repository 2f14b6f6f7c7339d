"""Recipes as a class, and the few steps that recipes share when they turn a record into rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, Final

from kubetune.data.reading.fields import NOTHING, show
from kubetune.data.reading.formats import IMAGE_TAG
from kubetune.plugins.recipes.tally import Skipped, Tally

ImageOf = Callable[[str], str]
"""From the path of an image in a record to its path in the row. Raises Skipped or UnusableImage."""


@dataclass(frozen=True, slots=True)
class Options:
    """The user's choice. `sources` are the source sets to keep; empty for all."""

    style: str
    max_history_rounds: int
    sources: tuple[str, ...] = ()


RowsOf = Callable[[Mapping[str, Any], str, Options, ImageOf, Tally], list[str]]
"""`rows_of(record, id, options, image_of, tally)`: the rows of a record as JSON texts. Raises Skipped."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One data set: where it is, its splits and styles (the first is the default), and how a record becomes rows.

    `rounds` says whether it knows `max_history_rounds`; `keys` are those that rows are made of, by where they stand.
    """

    name: str
    hub: str
    splits: tuple[str, ...]
    styles: tuple[str, ...]
    rounds: bool
    rows_of: RowsOf
    keys: Mapping[str, frozenset[str]]

    def unused_keys(self, record: Mapping[str, Any]) -> set[str]:
        """The keys of a record that hold something and no row is made of: `split`, `conversations[].loss`."""
        found = _others(record, self.keys[""], "")
        for key in self.keys.keys() & record.keys():
            value = record[key]
            inner = value if isinstance(value, list) else [value]
            place = f"{key}[]." if isinstance(value, list) else f"{key}."
            found |= {
                name
                for part in inner
                if isinstance(part, dict)
                for name in _others(part, self.keys[key], place)
            }
        return found

    def file_name(self, style: str, split: str) -> str:
        """Name of the file that the rows of a split go to."""
        return (
            f"{self.name}_{style}_{split}.jsonl"
            if len(self.styles) > 1
            else f"{self.name}_{split}.jsonl"
        )


def _others(value: Mapping[str, Any], known: frozenset[str], place: str) -> set[str]:
    return {f"{place}{key}" for key in value.keys() - known if value[key] not in NOTHING}


def quote(text: str) -> str:
    """A text as JSON, unescaped where JSON allows that: what json.encoder makes of it, in half of the time."""
    content = text.encode("utf-8", "surrogatepass")
    if len(content.translate(None, _RARE)) < len(content):
        return encode_basestring(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


_RARE: Final = bytes(byte for byte in range(32) if byte != ord("\n"))
"""Bytes of characters that JSON escapes, but for those that texts often have."""


def image_path(record: Mapping[str, Any]) -> str | None:
    """The path of a record's image, if it names one. Raises Skipped for what is no path, such as a list of them."""
    path = record.get("image")
    if path not in NOTHING and not isinstance(path, str):
        raise Skipped("bad_image", f"image is {show(path)}; expected one path")
    return path if isinstance(path, str) and path.strip() else None


def source_set(path: str | None) -> str:
    """The data set an image comes from: the first folder of its path; `other` where the path does not say."""
    first, slash, _ = (path or "").partition("/")
    return first if slash and first != "images" else "other"


def require_source(path: str | None, options: Options) -> str:
    """The source set of a record. Raises Skipped where it is none of those asked for."""
    found = source_set(path)
    if options.sources and found not in options.sources:
        raise Skipped("filtered_by_source", f"source {found} was not asked for")
    return found


def plain_text(value: Any, where: str) -> str:
    """A text as `trimmed` leaves it. Raises Skipped when it is no text, or none that UTF-8 can hold."""
    if not isinstance(value, str):
        raise Skipped("bad_text", f"{where} is {type(value).__name__}; expected a text")
    if "\0" in value:
        raise Skipped("bad_text", f"{where} holds a NUL character")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Skipped("bad_text", f"{where} holds half a surrogate pair") from None
    return trimmed(value)


def trimmed(text: str) -> str:
    """A text without empty lines before it and white space after it; its first line keeps its indentation."""
    text = text.rstrip()
    return _EMPTY_LINES.sub("", text, count=1) if text[:1].isspace() else text


_EMPTY_LINES: Final = re.compile(r"\A\s*\n")


def without_tags(text: str, tally: Tally) -> str:
    """A text without image tags, which no image is there for."""
    return trimmed(_untagged(text, tally))


def _untagged(text: str, tally: Tally) -> str:
    if IMAGE_TAG not in text:
        return text
    tally.notes["image_tags_removed"] += text.count(IMAGE_TAG)
    return text.replace(IMAGE_TAG, "")


def with_one_tag(text: str, tally: Tally) -> str:
    """A question with exactly one image tag: the first it has, where it stands, or else one before it."""
    before, tag, after = text.partition(IMAGE_TAG)
    if not tag:
        return f"{IMAGE_TAG}\n{text}"
    return (before if before.strip() else "") + tag + _untagged(after, tally)


def messages_json(turns: list[tuple[str, str]]) -> str:
    """Messages as JSON, of roles and texts that are JSON already."""
    return ", ".join(f'{{"role": "{role}", "content": {text}}}' for role, text in turns)
