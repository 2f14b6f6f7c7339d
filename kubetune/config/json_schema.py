"""The config's JSON Schema, and what it says of one key in words: for error messages and the documentation.

Made from schema, so that messages, docs and editors can never disagree with what is checked.
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
    """JSON Schema (2020-12) of what a run file may hold, in our own spelling."""
    return Config.model_json_schema(mode="validation")


def editor_schema() -> Node:
    """The schema that is published for editors: other tools' spellings are valid too, and shown as deprecated."""
    base = schema()
    aliases = {
        name: {"description": f"Other spelling of `{alias.path}`.", "deprecated": True}
        for name, alias in ALIASES.items()
        if "." not in name
    }
    dialect = "https://json-schema.org/draft/2020-12/schema"
    # What is missing may stand there in another spelling; the loader says so when it does not.
    top = {"$schema": dialect, **base, "title": "kubetune run", "required": []}
    return {**top, "properties": {**aliases, **base["properties"]}}


def options(node: Node) -> list[Node]:
    """Kinds of value that may stand there: the branches of a union, references followed, null left out."""
    if "$ref" in node:
        return options(schema()["$defs"][node["$ref"].rsplit("/", 1)[1]])
    if "anyOf" in node:
        return [option for branch in node["anyOf"] for option in options(branch)]
    return [] if node.get("type") == "null" else [node]


def keys(node: Node) -> dict[str, Node]:
    """The keys of a section, in the order of the schema; none where `node` is no section."""
    return {
        name: key for option in options(node) for name, key in option.get("properties", {}).items()
    }


def at(path: KeyPath) -> Node | None:
    """The schema of the value at a path, or None where no such key is known."""
    node: Node | None = schema()
    for part in path:
        if node is None:
            return None
        branches = options(node)
        if isinstance(part, int):
            node = next((b["items"] for b in branches if "items" in b), None)
        else:
            free = [
                b["additionalProperties"]
                for b in branches
                if isinstance(b.get("additionalProperties"), dict)
            ]
            free += [value for b in branches for value in b.get("patternProperties", {}).values()]
            node = keys(node).get(part) or next(iter(free), None)
    return node


def wants_text(path: KeyPath) -> bool:
    """A place where only text can stand, so that `name=123` on a command line means the text."""
    node = at(path)
    return node is not None and all(o.get("type") == "string" for o in options(node))


def expected(node: Node) -> str:
    """Values that may stand there, in words: `a whole number from 1 to 64`."""
    return " or ".join(dict.fromkeys(_words(option) for option in options(node)))


def _words(node: Node) -> str:
    if "const" in node:
        return str(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(map(str, node["enum"]))
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
            return "a section" if "properties" in node else "a mapping"
        case _:
            if "examples" in node:
                return f"text such as {' or '.join(node['examples'])}"
            return f"text that matches {node['pattern']}" if "pattern" in node else "text"


def _bounds(node: Node) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    parts = [
        f"{word} {bound:,}"
        for word, bound in (
            ("of at least", low),
            ("above", above),
            ("of at most", high),
            ("below", below),
        )
        if bound is not None
    ]
    return f" {' and '.join(parts)}" if parts else ""


def leaves(node: Node | None = None, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Every key that is reached without a list, with its schema; sections come before their keys."""
    for name, key in keys(schema() if node is None else node).items():
        yield (*path, name), key
        yield from leaves(key, (*path, name))
