"""Writes a run file as a person would: sections in the order of the schema, short lists in one line, plain numbers.

Not load.as_yaml, which writes what differs from the defaults: here every setting that was chosen is shown.
"""

from __future__ import annotations

import io
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cache
from typing import Any

from ruamel.yaml import YAML

from kubetune.base.provenance import KeyPath
from kubetune.config import json_schema

_WIDTH = 100


def run_file(settings: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return the text of a run file with these settings by path; `comments` stand at the end of their lines."""
    tree = _tree(settings)

    # Settings of one line stand together; a section of several lines is a block of its own.
    blocks: list[list[str]] = []
    was_one_line = False
    for key in _in_order((), tree):
        lines = list(_setting((key,), tree[key], comments))
        is_one_line = len(lines) == 1
        if is_one_line and was_one_line:
            blocks[-1] += lines
        else:
            blocks.append(lines)
        was_one_line = is_one_line
    return "\n\n".join(map(_aligned, blocks)) + "\n"


def _tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by path as sections: {"lora.r": 8} → {"lora": {"r": 8}}."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        # "lora.r" → the section lora, which is made if need be, and the name r in it.
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        if value is not None:
            node[name] = value
        # `lora` without a value is a section, which its own settings may have filled already.
        else:
            node.setdefault(name, {})
    return tree


def comment(lines: Iterable[str]) -> str:
    """Return lines as a comment, folded at a width that people read."""
    folded: list[str] = []
    for line in lines:
        folded += textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in folded)


def inline(value: Any) -> str:
    """Return a value in one line of YAML."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (list, tuple)):
        items = [inline(item) for item in value]
        return f"[{', '.join(items)}]"
    if isinstance(value, Mapping):
        items = [f"{inline(key)}: {inline(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    return str(value)


def _setting(path: KeyPath, value: Any, comments: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of one setting, indented as deep as its path, comments behind a tab."""
    indent = "  " * (len(path) - 1)
    start = f"{indent}{path[-1]}:"
    # A mapping whose keys the schema names is a section. Others, such as labels, are values.
    known_keys = json_schema.keys(json_schema.at(path) or {})
    if isinstance(value, dict) and value and known_keys:
        yield start
        for name in _in_order(path, value):
            yield from _setting((*path, name), value[name], comments)
        return

    note = comments.get(".".join(map(str, path)))
    behind = ""
    if note:
        behind = f"\t# {note}"
    line = f"{start} {inline(value)}"

    # Sections, and what is too long for a line, stand one below the other.
    is_block = isinstance(value, list) and value
    if is_block and (len(line) > _WIDTH or isinstance(value[-1], dict)):
        yield start + behind
        for item in value:
            yield f"{indent}  - {inline(item)}"
    else:
        yield line + behind


def _in_order(path: KeyPath, names: Iterable[str]) -> list[str]:
    """Return keys of a section in the order of the schema, others behind them."""
    known = list(json_schema.keys(json_schema.at(path) or {}))

    def place(name: str) -> int:
        if name in known:
            return known.index(name)
        return len(known)

    return sorted(names, key=place)


def _aligned(lines: list[str]) -> str:
    """Return the lines of a block, with comments that begin in one column."""
    # Only lines with a comment widen the column.
    width = 0
    for line in lines:
        text, tab, _ = line.partition("\t")
        if tab:
            width = max(width, len(text))

    aligned = []
    for line in lines:
        text, tab, note = line.partition("\t")
        if tab:
            text = f"{text:<{width}}  {note}"
        aligned.append(text)
    return "\n".join(aligned)


def _number(value: float) -> str:
    """Return `2e-4` and `0.05`, and never more digits than were written."""
    if value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 1e6:
        return repr(value)
    return f"{Decimal(repr(value)).normalize():e}".replace("e+", "e")


@cache
def _text(value: str) -> str:
    """Return a text, in quotes only where YAML needs them."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = True
    yaml.width = 10**6
    stream = io.StringIO()
    # Inside a list, where fewer texts can do without quotes.
    yaml.dump([value], stream)
    return stream.getvalue().strip().removeprefix("[").removesuffix("]")
