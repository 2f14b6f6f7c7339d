"""What a value of another tool's file says: nothing, a flag, a list, or what only a running shell knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kubetune.plugins.importers.writing import inline

# $NAME, $1, ${NAME}, ${NAME[0]}, ${NAME%.*} or $(command): only a shell knows the value.
_VARIABLE = re.compile(r"\$(\w+)|\$\{([\w.]+)\}|\$[@*#({]")
# Words of YAML 1.1, which the tools read.
_FLAGS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}


def is_empty(value: Any) -> bool:
    """True for `key:` with nothing after it."""
    return value is None or value in ("", [], {})


def as_flag(value: Any) -> Any:
    """Return True or False for the words that YAML 1.1 has for them, and any other value as it is."""
    return _FLAGS.get(value.lower(), value) if isinstance(value, str) else value


def as_list(value: Any) -> list[Any]:
    """Return a list; texts are split at commas, as on the tools' command lines."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def unknown_values(theirs: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the keys whose value only a running shell knows, and why. `variables`: what is known of a script's."""
    unknown = {}
    for key, value in theirs.items():
        text = inline(value)
        match = _VARIABLE.search(text)
        if match is None:
            continue
        name = match[1] or match[2]
        if name == key and key in variables:
            reason = variables[key]
        elif name:
            reason = f"{text} holds ${name}, which {variables.get(name, 'the file does not set')}"
        else:
            reason = f"{text} is what only a running shell knows"
        unknown[key] = f"{reason}; put its value there"
    return unknown
