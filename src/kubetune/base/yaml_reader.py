"""Read YAML 1.2 as plain data with the line of every key. No file can run code or fill the memory.

Nothing here knows the keys of the config. ruamel.yaml parses. The data are built here, because ruamel's constructors
keep no line for a scalar and stop at the first duplicate key.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from kubetune.base.files import IrregularFileError, open_regular
from kubetune.base.humanize import shell_word
from kubetune.base.provenance import Entry, KeyPath, Origin, Problem, dotted
from kubetune.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_NODES = 20_000  # after aliases are followed: nested aliases grow exponentially
MAX_DEPTH = 40

_TAG = "tag:yaml.org,2002:"
_AS_WRITTEN = {"str", "timestamp", "value", "merge"}


# Python refuses to print integers of more than 4,300 digits, so a message about one would fail.
MAX_INTEGER_BITS = 128
TOO_LARGE = f"is an integer of more than {MAX_INTEGER_BITS} bits; write a smaller one"


def is_too_large(value: Any) -> bool:
    """True if a value is an integer that no setting can need."""
    return isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS


class FileText(NamedTuple):
    """A file with its text. It is read once, since a pipe can be read once only."""

    path: Path
    text: str


def read_entries(source: Path | FileText) -> tuple[list[Entry], list[Problem]]:
    """Return every setting of a YAML file, and what is wrong with it as YAML.

    Raise ConfigError if nothing can be read: the file is missing, is no text, or has broken syntax.
    """
    file = source
    if not isinstance(file, FileText):
        file = read_file(file)
    try:
        return _Reader(str(file.path)).entries(file.text)
    except _BrokenError as error:
        raise ConfigError(str(error.problem)) from None


def read_file(path: Path) -> FileText:
    """Return a YAML file with its text. Raise ConfigError if the file is missing or is no text."""
    try:
        with open_regular(path) as file:
            # One byte more than allowed, so that a larger file is noticed and not read whole.
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; `kubetune init -o {shell_word(path)}` writes a starter file"
        ) from None
    except IrregularFileError as error:
        raise ConfigError(f"{path}: {error.strerror}, a run file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{path}: larger than {MAX_BYTES >> 20} MiB; expected a run file, not data"
        )
    try:
        return FileText(path, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}: found bytes that are not UTF-8; save the file as UTF-8"
        ) from None


def parse_value(text: str) -> Any:
    """Return one YAML value, as in `key=value`. Raise ValueError that says what is wrong."""
    reader = _Reader("")
    try:
        # An empty text is null, as in `key=`.
        node = reader.compose(text)
        value = None
        if node is not None:
            value = reader.build(node, (), depth=0)
    except _BrokenError as error:
        raise ValueError(error.problem.text) from None
    if reader.problems:
        raise ValueError(reader.problems[0].text)
    return value


@lru_cache(maxsize=8)
def _nodes(text: str) -> Node | None:
    """Return the parsed nodes of a text. Cached, since a process often reads one file several times."""
    node: Node | None = YAML(typ="safe", pure=True).compose(text)
    return node


class _BrokenError(Exception):
    """The text cannot be read any further."""

    def __init__(self, origin: Origin, text: str) -> None:
        self.problem = Problem(origin, text)
        super().__init__(text)


class _Reader:
    """Builds plain data from ruamel's nodes, and collects problems and origins meanwhile."""

    def __init__(self, source: str) -> None:
        self.source = source  # name of the file for messages; empty for a single value
        self.problems: list[Problem] = []
        self._origins: dict[KeyPath, Origin] = {}
        self._nodes = 0  # that were built so far, limited by MAX_NODES
        self._values = SafeConstructor(loader=YAML(typ="safe", pure=True))

    def entries(self, text: str) -> tuple[list[Entry], list[Problem]]:
        # An empty file is an empty mapping.
        root = self.compose(text)
        if root is not None and not isinstance(root, MappingNode):
            raise _BrokenError(
                self._origin(root), "expected `key: value` lines at the top of the file"
            )
        tree: Any = {}
        if root is not None:
            tree = self.build(root, (), depth=0)
        return list(self._flatten(tree, ())), self.problems

    def compose(self, text: str) -> Node | None:
        try:
            return _nodes(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            # str(error) quotes lines of the file, which may hold a secret; `problem` does not.
            what = error.problem or error.context or "not valid YAML"
            line = 0
            if mark:
                line = mark.line + 1
            if "'\\t'" in what:
                what += "; indent with spaces, not with tabs"
            begins = error.context_mark
            if mark and begins and begins.line != mark.line:
                what += f" (in the list or section that begins in line {begins.line + 1})"
            origin = Origin(self.source, line)
            raise _BrokenError(origin, f"not valid YAML: {what}") from None
        except YAMLError:
            raise _BrokenError(
                Origin(self.source), "not valid YAML: it holds a character YAML does not allow"
            ) from None
        except RecursionError:
            raise _BrokenError(
                Origin(self.source), f"nested deeper than {MAX_DEPTH} levels"
            ) from None

    def build(self, node: Node, path: KeyPath, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _BrokenError(
                self._origin(node),
                f"nested deeper than {MAX_DEPTH} levels, or more than {MAX_NODES:,} values once aliases are followed",
            )
        # Plain tags become plain data; any other tag, such as !!python/object, is a problem.
        tag = str(node.tag)
        if isinstance(node, MappingNode) and tag == f"{_TAG}map":
            return self._mapping(node, path, depth)
        if isinstance(node, SequenceNode) and tag == f"{_TAG}seq":
            items = []
            for index, item in enumerate(node.value):
                self._origins[(*path, index)] = self._origin(item)
                items.append(self.build(item, (*path, index), depth + 1))
            return items
        if isinstance(node, ScalarNode) and tag.startswith(_TAG):
            return self._scalar(node, tag.removeprefix(_TAG), path)
        self._problem(
            node,
            path,
            f"has the tag {tag.replace(_TAG, '!!')}; tags are not allowed, write plain values",
        )
        return None

    def _mapping(self, node: MappingNode, path: KeyPath, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        # Merged keys (`<<: *base`) are built first, wherever they are, so that the mapping's own keys win, and so do
        # the lines of these.
        merges = [value for key, value in node.value if key.value == "<<"]
        merged: dict[str, Any] = {}
        if merges:
            merged = self._merge(merges[0], path, depth)

        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                self._problem(key_node, path, "has a list or a mapping as key; expected a word")
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key == "<<":
                continue
            if key in values:
                self._problem(
                    key_node, here, f"given twice (first in line {first_lines[key]}); keep one"
                )
                continue
            first_lines[key] = key_node.start_mark.line + 1
            self._origins[here] = self._origin(key_node)
            values[key] = self.build(value_node, here, depth + 1)
        return {**merged, **values}

    def _merge(self, node: Node, path: KeyPath, depth: int) -> dict[str, Any]:
        """Return the keys of a mapping, or of several, of which the first that has a key decides."""
        parts = [node]
        if isinstance(node, SequenceNode):
            parts = node.value
        merged: dict[str, Any] = {}
        for part in parts:
            if not isinstance(part, MappingNode):
                self._problem(node, path, "`<<` needs a mapping, or a list of them")
                continue
            merged = {**self._mapping(part, path, depth + 1), **merged}
        return merged

    def _scalar(self, node: ScalarNode, kind: str, path: KeyPath) -> Any:
        if kind in _AS_WRITTEN:
            return str(node.value)
        if kind == "null":
            return None
        convert = {
            "bool": self._values.construct_yaml_bool,
            "int": self._values.construct_yaml_int,
            "float": self._values.construct_yaml_float,
        }.get(kind)
        if convert is None:
            self._problem(
                node, path, f"has the tag !!{kind}; tags are not allowed, write a plain value"
            )
            return None

        # Before it is converted, since that takes time that grows with the square of the digits.
        if kind == "int" and len(node.value) > MAX_INTEGER_BITS + len("-0b"):
            self._problem(node, path, TOO_LARGE)
            return None
        try:
            value = convert(node)
        except (ValueError, KeyError):  # only an explicit tag, such as `!!int abc`, gets here
            self._problem(node, path, f"is not a valid !!{kind}; write it without the tag")
            return None
        if is_too_large(value):
            self._problem(node, path, TOO_LARGE)
            return None
        return value

    def _flatten(self, value: Any, path: KeyPath) -> Iterator[Entry]:
        if isinstance(value, dict):
            if path:
                yield Entry(path, {}, self._origins[path])
            for key, item in value.items():
                yield from self._flatten(item, (*path, key))
            return

        # A list is one setting, but each of its items keeps its line, for messages.
        size = len(path)
        inner = {}
        for known, origin in self._origins.items():
            if len(known) > size and known[:size] == path:
                inner[known[size:]] = origin
        yield Entry(path, value, self._origins[path], inner)

    def _origin(self, node: Node) -> Origin:
        return Origin(self.source, node.start_mark.line + 1)

    def _problem(self, node: Node, path: KeyPath, text: str) -> None:
        if path or self.source:
            text = f"{dotted(path) or 'the file'}: {text}"
        self.problems.append(Problem(self._origin(node), text))
