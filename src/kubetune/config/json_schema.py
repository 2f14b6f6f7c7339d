"""The config's JSON Schema, and what it says about a key in words: for error messages and the documentation.

It is made from `schema`, so that messages, docs and editors always agree with what is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from kubetune.base.provenance import KeyPath
from kubetune.config.aliases import ALIASES
from kubetune.config.schema import Config

Node = dict[str, Any]


@cache
def schema() -> Node:
    """Return the JSON Schema (2020-12) of a run file, with our own names only."""
    return Config.model_json_schema(mode="validation")


def editor_schema() -> Node:
    """Return the schema that is published for editors. Other tools' names are valid too, marked as deprecated."""
    base = schema()
    aliases = {}
    for name, alias in ALIASES.items():
        # Names within sections, such as lora.rank, are not offered.
        if "." not in name:
            description = f"Other spelling of `{alias.path}`."
            aliases[name] = {"description": description, "deprecated": True}

    dialect = "https://json-schema.org/draft/2020-12/schema"
    # Nothing is "required" at the top: `model` may be missing because the file says `base_model`. The loader checks it.
    top = {"$schema": dialect, **base, "title": "kubetune run", "required": []}
    return {**top, "properties": {**aliases, **base["properties"]}}


def options(node: Node) -> list[Node]:
    """Return the kinds of value that a node allows, without null: branches of a union, with references followed.

    `lora` may be a section, true or null: its options are the schema of the section and {"type": "boolean"}.
    """
    if "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[1]
        return options(schema()["$defs"][name])
    if "anyOf" in node:
        branches: list[Node] = []
        for branch in node["anyOf"]:
            branches += options(branch)
        return branches
    if node.get("type") == "null":
        return []
    return [node]


def keys(node: Node) -> dict[str, Node]:
    """Return the keys of a section, in the order of the schema. Empty if `node` is no section."""
    result: dict[str, Node] = {}
    for option in options(node):
        result.update(option.get("properties", {}))
    return result


def at(path: KeyPath) -> Node | None:
    """Return the schema of the value at a path. None if there is no such key."""
    node: Node | None = schema()
    for part in path:
        if node is None:
            return None
        if isinstance(part, int):
            node = _items(node)
        else:
            node = keys(node).get(part) or _any_key(node)
    return node


def _items(node: Node) -> Node | None:
    """Return the schema of a list's items. None if no list may be there."""
    for option in options(node):
        if "items" in option:
            items: Node = option["items"]
            return items
    return None


def _any_key(node: Node) -> Node | None:
    """Return the schema of the values of a mapping with free keys, such as `labels`. None if there is none."""
    for option in options(node):
        values = option.get("additionalProperties")
        if isinstance(values, dict):
            return values
    for option in options(node):
        for pattern_values in option.get("patternProperties", {}).values():
            result: Node = pattern_values
            return result
    return None


def wants_text(path: KeyPath) -> bool:
    """True if only text is valid at a path. Then `name=123` on a command line means the text "123"."""
    node = at(path)
    if node is None:
        return False
    return all(option.get("type") == "string" for option in options(node))


def expected(node: Node) -> str:
    """Return the values that are valid, in words: `a whole number from 1 to 64`."""
    return " or ".join(dict.fromkeys(_words(option) for option in options(node)))


def _words(node: Node) -> str:
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(map(str, node["enum"]))
    # A kind of value: "a whole number from 1 to 64", "a list of 2", "text such as team-a".
    match node.get("type"):
        case "boolean":
            return "true or false"
        case "integer":
            return "a whole number" + _bounds(node)
        case "number":
            return "a number" + _bounds(node)
        case "array" if "prefixItems" in node:
            return f"a list of {len(node['prefixItems'])}"
        case "array":
            return "a list"
        case "object":
            if "properties" in node:
                return "a section"
            return "a mapping"
        case _:
            if "examples" in node:
                return f"text such as {' or '.join(node['examples'])}"
            if "pattern" in node:
                return f"text that matches {node['pattern']}"
            return "text"


def _bounds(node: Node) -> str:
    """Return the range of a number in words, with a space before it. Empty if every number is valid."""
    low = node.get("minimum")
    high = node.get("maximum")
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    words = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "maximum": "of at most",
        "exclusiveMaximum": "below",
    }
    parts = []
    for key, word in words.items():
        if key in node:
            parts.append(f"{word} {node[key]:,}")
    if not parts:
        return ""
    return f" {' and '.join(parts)}"


def leaves(node: Node | None = None, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Yield every key that is not inside a list, with its schema. A section comes before its keys."""
    # Depth first: `lora`, `lora.r`, `lora.alpha`, …
    if node is None:
        node = schema()
    for name, key in keys(node).items():
        yield (*path, name), key
        yield from leaves(key, (*path, name))
