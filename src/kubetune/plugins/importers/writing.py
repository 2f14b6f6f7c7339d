"""Write a run file as a person would: sections in the order of the schema, short lists in one line, plain numbers.

load.as_yaml writes only what differs from the defaults. Here every setting that was chosen is shown.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kubetune.base.provenance import KeyPath
from kubetune.config import json_schema

_WIDTH = 100
# Texts that need no quotes in YAML, unless they are one of its words.
_PLAIN = re.compile(r"[A-Za-z_./~$][\w./~$@-]*(?:[ :#][\w./~$@-]+)*")
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n", "~")


def run_file(settings: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return the text of a run file with these settings by path; `comments` are at the end of their lines."""
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

    text = ""
    for name in _in_order((), tree):
        lines = list(_lines((name,), tree[name], comments))
        # A section of several lines is a block of its own.
        if text and len(lines) > 1:
            text += "\n"
        text += "".join(f"{line}\n" for line in lines)
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
    if isinstance(value, float) and math.isfinite(value):
        # As people write it: 5e-6, where Python writes 5e-06.
        return repr(value).replace("e-0", "e-")
    text = str(value)
    if isinstance(value, str) and _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return json.dumps(value, ensure_ascii=False, default=str)


def _in_order(path: KeyPath, section: Mapping[str, Any]) -> list[str]:
    """Return the keys of a section in the order of the schema, and those that it does not have at the end."""
    known = list(json_schema.keys(json_schema.at(path) or {}))
    others = [name for name in section if name not in known]
    return [name for name in known if name in section] + others


def _lines(path: KeyPath, value: Any, comments: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a setting or a section, indented as deep as its path."""
    indent = "  " * (len(path) - 1)
    note = comments.get(".".join(map(str, path)))
    suffix = ""
    if note:
        suffix = f"  # {note}"
    line = f"{indent}{path[-1]}: {inline(value)}"
    # A mapping whose keys the schema names is a section. Others, such as labels, are values.
    if isinstance(value, dict) and value and json_schema.keys(json_schema.at(path) or {}):
        yield f"{indent}{path[-1]}:"
        for name in _in_order(path, value):
            yield from _lines((*path, name), value[name], comments)
    # Sections in a list, and what is too long for a line, lie one below the other.
    elif isinstance(value, list) and value and (isinstance(value[-1], dict) or len(line) > _WIDTH):
        yield f"{indent}{path[-1]}:{suffix}"
        for item in value:
            yield f"{indent}  - {inline(item)}"
    else:
        yield line + suffix
