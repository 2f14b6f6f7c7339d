"""Merge settings of several sources into one tree that remembers where each of them was written.

Nothing here knows the keys of the config; config/schema does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KeyPath = tuple[str | int, ...]


class Origin(NamedTuple):
    """Where a setting was written: a file and its line, or words such as `environment variable LR`."""

    source: str
    line: int = 0  # from 1; 0 for a source without lines

    def __str__(self) -> str:
        if self.line:
            return f"{self.source}:{self.line}"
        return self.source


class Problem(NamedTuple):
    """One mistake, in words. Sorts by where it was made."""

    origin: Origin
    text: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.text}"


@dataclass(frozen=True)
class Entry:
    """One setting."""

    path: KeyPath
    value: Any  # a scalar or a list; {} for the line where a section begins
    origin: Origin
    inner: Mapping[KeyPath, Origin] = field(default_factory=dict)  # path inside a list → its origin


def dotted(path: KeyPath) -> str:
    """Return a path as people write it: `data.train[0].weight` for `("data", "train", 0, "weight")`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}"
    return text.removeprefix(".")


def texts_in(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text in a value, with its path inside the value."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from texts_in(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from texts_in(item, (*path, index))


def key_path(key: str) -> KeyPath:
    """Return the path of a dotted key: `("data", "train", 0, "weight")` for `data.train[0].weight`."""
    path: list[str | int] = []
    for part in key.split("."):
        # A name with any number of indices after it: `train[0]`.
        match = re.fullmatch(r"(.*?)((?:\[\d+\])*)", part, re.DOTALL)
        assert match is not None, "the pattern matches every text"
        name, indices = match.groups()
        path.append(name)
        path += [int(index) for index in re.findall(r"\d+", indices)]
    return tuple(path)


class Tree:
    """The settings that were merged so far, and the origin of each."""

    def __init__(self, default_origin: Origin) -> None:
        self.data: dict[str, Any] = {}
        self._default_origin = default_origin
        self._origins: dict[KeyPath, Origin] = {}

    def put(self, entries: Iterable[Entry]) -> None:
        """Put settings into the tree. Mappings are merged; anything else replaces what was at its path."""
        for entry in entries:
            # Walk down to the parent, and make sections on the way. What is no section there is replaced.
            *parents, name = entry.path
            node: dict[Any, Any] = self.data
            for parent in parents:
                if not isinstance(node.get(parent), dict):
                    node[parent] = {}
                node = node[parent]

            # `lora:` before its keys is only where the section begins: what is in it stays.
            if entry.value != {} or not isinstance(node.get(name), dict):
                # A copy, since the tree grows in place and the caller's value must not.
                node[name] = deepcopy(entry.value)
                self._forget_below(entry.path)

            self._origins[entry.path] = entry.origin
            for inner, origin in entry.inner.items():
                self._origins[entry.path + inner] = origin

    def _forget_below(self, path: KeyPath) -> None:
        """Drop the origins of what a new value has replaced."""
        below = [known for known in self._origins if known[: len(path)] == path]
        for known in below:
            del self._origins[known]

    def origin(self, path: KeyPath) -> Origin:
        """Return where `path` was written; else the first setting below it, else the same for its nearest parent."""
        for end in range(len(path), 0, -1):
            exact = self._origins.get(path[:end])
            if exact is not None:
                return exact
            # A section of a mapping has no line of its own; its first key has.
            below = []
            for known, origin in self._origins.items():
                if known[:end] == path[:end]:
                    below.append(origin)
            if below:
                return min(below)
        return self._default_origin

    def origin_of(self, path: KeyPath) -> Origin | None:
        """Return where the value at `path`, or one that contains it, was written. None if nobody wrote it."""
        if self.find(path) is None:
            return None
        for end in range(len(path), 0, -1):
            origin = self._origins.get(path[:end])
            if origin is not None:
                return origin
        return None

    def find(self, path: KeyPath) -> Any:
        """Return the value at `path`. None if there is none."""
        try:
            return self.get(path)
        except (LookupError, TypeError):
            return None

    def get(self, path: KeyPath) -> Any:
        """Return the value at `path`. Raise LookupError or TypeError if there is none."""
        node: Any = self.data
        for part in path:
            node = node[part]
        return node


def into_lists(
    entries: Iterable[Entry], tree: Tree, problems: list[Problem], *, whole: str
) -> Iterator[Entry]:
    """Yield the entries. An entry inside a list becomes the whole list of `tree` with that value changed in it.

        data.train: [a.jsonl, b.jsonl]
        data.train[1].weight=2        →  data.train: [a.jsonl, {path: b.jsonl, weight: 2}]

    A single value counts as a list of one. A text becomes a mapping with the key `whole` if a key of it is set.
    """
    for entry in entries:
        # The first index in the path: 2 in ("data", "train", 0, "weight").
        at = None
        for place, part in enumerate(entry.path):
            if isinstance(part, int):
                at = place
                break
        if at is None:
            yield entry
            continue

        path_of_list = entry.path[:at]
        index, *keys = entry.path[at:]
        items = _as_list(deepcopy(tree.find(path_of_list)))
        # Only existing items can be changed, and only a key of them: `data.train[0].weight`.
        if not isinstance(index, int) or index >= len(items) or len(keys) > 1 or "" in keys:
            what = (
                f"{dotted(path_of_list)} holds {len(items)}; expected one of them, or a key of one"
            )
            problems.append(Problem(entry.origin, f"{dotted(entry.path)}: {what}"))
            continue

        if keys:
            item = items[index]
            if not isinstance(item, dict):
                item = {whole: item}
            item[keys[0]] = entry.value
            items[index] = item
        else:
            items[index] = entry.value

        # The list is still the file's. Only what changed in it has the entry's origin.
        inner = {(index, *keys): entry.origin}
        yield Entry(path_of_list, items, tree.origin(path_of_list), inner)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]
