"""Writes a run file as a person would: sections in the order of the schema, short lists in one line, plain numbers.

Not load.as_yaml, which writes what differs from the defaults: here every setting that was chosen is shown.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML

from kubetune.base.provenance import KeyPath
from kubetune.config import json_schema

_WIDTH = 100


def run_file(settings: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return the text of a run file with these settings by path; `comments` stand at the end of their lines."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        # "lora.r" → the section lora, which is made if need be, and the name r in it.
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        # `lora` without a value is a section, which its own settings may have filled already.
        node.setdefault(name, {})
        if value is not None:
            node[name] = value
    # Settings of one line stand together; a section of several lines is a block of its own.
    lines = ["", *_lines((), tree, comments), ""]
    text = ""
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        is_edge = before.startswith(" ") or after.startswith(" ")
        if text and is_edge and not line.startswith(" "):
            text += "\n"
        text += f"{line}\n"
    return text


def comment(lines: Iterable[str]) -> str:
    """Return lines as a comment, folded at a width that people read."""
    folded: list[str] = []
    for line in lines:
        folded += textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in folded)


def inline(value: Any) -> str:
    """Return a value in one line of YAML."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(inline, value))}]"
    if isinstance(value, Mapping):
        items = [f"{inline(key)}: {inline(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    return _scalar(value)


@lru_cache(maxsize=None, typed=True)
def _scalar(value: Any) -> str:
    """Return a number or a text, in quotes only where YAML needs them."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = True
    yaml.width = 10**6
    yaml.representer.add_representer(float, _number)
    stream = io.StringIO()
    # Inside a list, where fewer texts can do without quotes.
    yaml.dump([value], stream)
    return stream.getvalue().strip().removeprefix("[").removesuffix("]")


def _number(representer: Any, value: float) -> Any:
    """Write `2e-4` and `0.05`, and never more digits than were written."""
    if value == 0 or not math.isfinite(value) or 1e-3 <= abs(value) < 1e6:
        return representer.represent_float(value)
    text = f"{Decimal(repr(value)).normalize():e}".replace("e+", "e")
    return representer.represent_scalar("tag:yaml.org,2002:float", text)


def _lines(path: KeyPath, section: Mapping[str, Any], comments: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a section, in the order of the schema and indented as deep as its path."""
    indent = "  " * len(path)
    known = list(json_schema.keys(json_schema.at(path) or {}))
    for name in sorted(
        section, key=lambda name: known.index(name) if name in known else len(known)
    ):
        here = (*path, name)
        value = section[name]
        note = comments.get(".".join(map(str, here)))
        behind = f"  # {note}" if note else ""
        line = f"{indent}{name}: {inline(value)}"
        # A mapping whose keys the schema names is a section. Others, such as labels, are values.
        is_section = (
            isinstance(value, dict) and value and json_schema.keys(json_schema.at(here) or {})
        )
        is_list_of_sections = isinstance(value, list) and value and isinstance(value[-1], dict)
        if is_section:
            yield f"{indent}{name}:"
            yield from _lines(here, value, comments)
        # Sections, and what is too long for a line, stand one below the other.
        elif is_list_of_sections or (isinstance(value, list) and len(line) > _WIDTH):
            yield f"{indent}{name}:{behind}"
            for item in value:
                yield f"{indent}  - {inline(item)}"
        else:
            yield line + behind
