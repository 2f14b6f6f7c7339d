"""Settings from several sources, laid over one another into one tree, each remembering where it came from.

Nothing here knows the keys of the config; schema does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KeyPath = tuple[str | int, ...]


class Origin(NamedTuple):
    """Place where a setting was written: a file and its line, or words such as `environment variable LR`."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


class Problem(NamedTuple):
    """One mistake, explained. Sorts by where it was made."""

    origin: Origin
    text: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.text}"


@dataclass(frozen=True)
class Entry:
    """One setting: a scalar or a list at a path, or `{}` where a section begins. `inner`: origins inside a list."""

    path: KeyPath
    value: Any
    origin: Origin
    inner: Mapping[KeyPath, Origin] = field(default_factory=dict)


def dotted(path: KeyPath) -> str:
    """`data.train[0].weight` for `("data", "train", 0, "weight")`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def key_path(key: str) -> KeyPath:
    """`("data", "train", 0, "weight")` for `data.train[0].weight`."""
    parts = (re.fullmatch(r"(.*?)((?:\[\d+\])*)", part, re.DOTALL) for part in key.split("."))
    return tuple(
        each
        for part in parts
        if part
        for each in (part[1], *(int(number) for number in re.findall(r"\d+", part[2])))
    )


class Tree:
    """The settings merged so far, and the origin of each."""

    def __init__(self, default_origin: Origin) -> None:
        self.data: dict[str, Any] = {}
        self._default_origin = default_origin
        self._origins: dict[KeyPath, Origin] = {}

    def put(self, entries: Iterable[Entry]) -> None:
        """Lay settings over what is there: mappings are merged, anything else is replaced."""
        for entry in entries:
            *parents, name = entry.path
            node: dict[Any, Any] = self.data
            for parent in parents:
                if not isinstance(node.get(parent), dict):
                    node[parent] = {}
                node = node[parent]
            if entry.value != {} or not isinstance(node.get(name), dict):
                node[name] = deepcopy(
                    entry.value
                )  # the tree grows in place; what it was given must not
                self._forget_below(entry.path)
            self._origins[entry.path] = entry.origin
            self._origins.update(
                {entry.path + inner: origin for inner, origin in entry.inner.items()}
            )

    def _forget_below(self, path: KeyPath) -> None:
        for known in [k for k in self._origins if k[: len(path)] == path]:
            del self._origins[known]

    def origin(self, path: KeyPath) -> Origin:
        """Place where `path` was written; else that of the first setting below it, else of its nearest parent."""
        for end in range(len(path), 0, -1):
            if exact := self._origins.get(path[:end]):
                return exact
            if below := [
                origin for known, origin in self._origins.items() if known[:end] == path[:end]
            ]:
                return min(below)
        return self._default_origin

    def origin_of(self, path: KeyPath) -> Origin | None:
        """Place where the value at `path` was written, itself or in one above it; None where nobody wrote it."""
        if self.find(path) is None:
            return None
        return next(
            (
                self._origins[path[:end]]
                for end in range(len(path), 0, -1)
                if path[:end] in self._origins
            ),
            None,
        )

    def find(self, path: KeyPath) -> Any:
        """The value at `path`; None where there is none."""
        try:
            return self.get(path)
        except (LookupError, TypeError):
            return None

    def get(self, path: KeyPath) -> Any:
        """The value at `path`. Raises LookupError or TypeError where there is none."""
        node: Any = self.data
        for part in path:
            node = node[part]
        return node


def into_lists(
    entries: Iterable[Entry], tree: Tree, problems: list[Problem], *, whole: str
) -> Iterator[Entry]:
    """The entries, those within a list of `tree` as that list with another value in it.

    What stands there alone is a list of one, and a text the key `whole` of a mapping.
    """
    for entry in entries:
        at = next((i for i, part in enumerate(entry.path) if isinstance(part, int)), None)
        if at is None:
            yield entry
            continue
        before, (index, *inner) = entry.path[:at], entry.path[at:]
        found = deepcopy(tree.find(before))
        items = found if isinstance(found, list) else [] if found is None else [found]
        if (
            not isinstance(index, int)
            or index >= len(items)
            or len(inner) > 1
            or not all(map(str, inner))
        ):
            said = f"{dotted(before)} holds {len(items)}; expected one of them, or a key of one"
            problems.append(Problem(entry.origin, f"{dotted(entry.path)}: {said}"))
            continue
        if inner:
            items[index] = {
                **(items[index] if isinstance(items[index], dict) else {whole: items[index]})
            }
            items[index][inner[0]] = entry.value
        else:
            items[index] = entry.value
        yield Entry(before, items, tree.origin(before), {(index, *inner): entry.origin})
