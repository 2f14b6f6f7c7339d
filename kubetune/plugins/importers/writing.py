"""Writes a run file as a person would: sections in the order of the schema, short lists in one line, plain numbers.

Not load.as_yaml, which writes what differs from the defaults: here every setting that was chosen is shown.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from ruamel.yaml import YAML

from kubetune.base.provenance import KeyPath
from kubetune.config import json_schema

_WIDTH = 100


def run_file(
    settings: Mapping[tuple[str, ...], Any], comments: Mapping[tuple[str, ...], str]
) -> str:
    """The text of a run file with these settings by path; `comments` stand at the end of their lines."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value if value is not None else node.get(path[-1], {})
    sections = (list(_setting((key,), tree[key], comments)) for key in _in_order((), tree))
    blocks: list[list[str]] = []
    for is_one_line, group in itertools.groupby(sections, lambda lines: len(lines) == 1):
        found = list(group)
        blocks += [list(itertools.chain(*found))] if is_one_line else found
    return "\n\n".join(map(_aligned, blocks)) + "\n"


def comment(lines: Iterable[str]) -> str:
    """Lines as a comment, folded at a width that people read."""
    folded = [
        part
        for line in lines
        for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        or [""]
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in folded)


def inline(value: Any) -> str:
    """A value in one line of YAML."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(inline(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{inline(key)}: {inline(item)}' for key, item in value.items())}}}"
    return _text(value) if isinstance(value, str) else str(value)


def _setting(path: KeyPath, value: Any, comments: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    """The lines of one setting, indented as deep as its path, comments behind a tab."""
    indent, key = "  " * (len(path) - 1), str(path[-1])
    if isinstance(value, dict) and value and json_schema.keys(json_schema.at(path) or {}):
        yield f"{indent}{key}:"
        for name in _in_order(path, value):
            yield from _setting((*path, name), value[name], comments)
        return
    line = f"{indent}{key}: {inline(value)}"
    note = comments.get(tuple(str(part) for part in path))
    if (
        isinstance(value, list)
        and value
        and (len(line) > _WIDTH or any(isinstance(item, dict) for item in value))
    ):
        yield f"{indent}{key}:" + (f"\t# {note}" if note else "")
        yield from (f"{indent}  - {inline(item)}" for item in value)
        return
    yield line + (f"\t# {note}" if note else "")


def _in_order(path: KeyPath, names: Iterable[str]) -> list[str]:
    known = list(json_schema.keys(json_schema.at(path) or {}))
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))


def _aligned(lines: list[str]) -> str:
    """Comments of one block begin in one column."""
    width = max((len(line.partition("\t")[0]) for line in lines if "\t" in line), default=0)
    parts = [line.partition("\t") for line in lines]
    return "\n".join(f"{text:<{width}}  {note}" if tab else text for text, tab, note in parts)


def _number(value: float) -> str:
    """`2e-4` and `0.05`, and never more digits than were written."""
    if value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 1e6:
        return repr(value)
    short = next(text for digits in range(17) if float(text := f"{value:.{digits}e}") == value)
    mantissa, _, exponent = short.partition("e")
    return f"{mantissa}e{int(exponent)}"


@cache
def _text(value: str) -> str:
    """A text, in quotes only where YAML needs them."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = True
    yaml.width = 10**6
    stream = io.StringIO()
    yaml.dump([value], stream)  # inside a list, where fewer texts can do without quotes
    return stream.getvalue().strip().removeprefix("[").removesuffix("]")
