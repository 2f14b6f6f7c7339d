"""One problem for each setting that pydantic refuses, with its line, what was found and what was expected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from kubetune.base.humanize import nearest
from kubetune.base.provenance import KeyPath, Problem, Tree, dotted
from kubetune.base.secrets import ADVICE, names_secret
from kubetune.config import json_schema
from kubetune.config.aliases import ALIASES

_LONGEST_VALUE = 60


def explain(errors: Sequence[ErrorDetails], tree: Tree) -> list[Problem]:
    """One problem for each setting that is wrong, in no order.

    A union reports an error for each of its branches: they are one problem, and the one nearest to the mistake wins.
    """
    found: dict[KeyPath, list[ErrorDetails]] = {}
    for error in errors:
        found.setdefault(_place(error, tree), []).append(error)
    deepest = [
        path
        for path in found
        if not any(p != path and p[: len(path)] == path for p in found) or _own(found[path])
    ]
    return [problem for path in deepest for problem in _explain_one(path, found[path], tree)]


def _own(errors: Sequence[ErrorDetails]) -> bool:
    """Errors about the section itself, not about what it may be instead of a section."""
    return any(error["type"] in ("value_error", "missing", "extra_forbidden") for error in errors)


def _place(error: ErrorDetails, tree: Tree) -> KeyPath:
    """Path of an error in the tree: its location without the names of union branches that pydantic puts in."""
    node: Any = tree.data
    path: list[str | int] = []
    for index, part in enumerate(error["loc"]):
        try:
            node = node[part]
        except (LookupError, TypeError):
            if error["type"] != "missing" or index < len(error["loc"]) - 1:
                continue
        path.append(part)
    return tuple(path)


def _explain_one(path: KeyPath, errors: Sequence[ErrorDetails], tree: Tree) -> list[Problem]:
    origin = tree.origin(path)
    kinds = {error["type"] for error in errors}
    if "missing" in kinds:
        path, node = _needed(path)
        return [
            Problem(
                origin,
                f"{dotted(path)}: missing; expected {_expected(path)}: {_first_sentence(node)}",
            )
        ]
    if "extra_forbidden" in kinds:
        if names_secret(str(path[-1])):
            return [Problem(origin, f"{dotted(path)}: {ADVICE}")]
        return [Problem(origin, f"{dotted(path)}: unknown key; {suggest(path)}")]
    if "value_error" in kinds:
        text = next(str(e["ctx"]["error"]) for e in errors if e["type"] == "value_error")
        if path:
            return [Problem(origin, f"{dotted(path)}: {text}{_from_elsewhere(path, tree)}")]
        # The checks between sections name the key they blame at the beginning of each line.
        return [
            Problem(tree.origin(tuple(line.split(":")[0].split("."))), line)
            for line in text.splitlines()
        ]
    if not path:
        return [Problem(origin, f"{error['msg']}") for error in errors]
    return [
        Problem(
            origin, f"{dotted(path)}: found {_shown(tree.get(path))}; expected {_expected(path)}"
        )
    ]


def _from_elsewhere(path: KeyPath, tree: Tree) -> str:
    """The keys of a section that stand in another file than the section does, such as one of defaults; mostly none."""
    section, here = tree.find(path), tree.origin(path).source
    origins = {
        key: tree.origin_of((*path, key)) for key in (section if isinstance(section, dict) else ())
    }
    told = [
        f"{key} of {origin}"
        for key, origin in origins.items()
        if origin is not None and origin.source != here
    ]
    return f" ({', '.join(told)}; where you want another, set that to null)" if told else ""


def _needed(path: KeyPath) -> tuple[KeyPath, json_schema.Node]:
    """A missing key, or for a missing section the first key it cannot do without."""
    node = json_schema.at(path) or {}
    options = json_schema.options(node)
    if len(options) == 1 and (required := options[0].get("required")):
        return _needed((*path, required[0]))
    return path, node


def _expected(path: KeyPath) -> str:
    return json_schema.expected(json_schema.at(path) or {})


def _first_sentence(node: json_schema.Node) -> str:
    return str(node.get("description", "")).partition(". ")[0].removesuffix(".")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def suggest(path: KeyPath) -> str:
    """The key that somebody who wrote an unknown one may have meant, as a question; else those that are known."""
    name = str(path[-1])
    siblings = list(json_schema.keys(json_schema.at(path[:-1]) or {}))
    paths = {str(known[-1]): dotted(known) for known, _ in json_schema.leaves()}
    homes = [dotted(known) for known, _ in json_schema.leaves() if known[-1] == name]
    if homes:
        return f"did you mean {' or '.join(homes)}?"
    if close := nearest(name, siblings, 0.7):
        return f"did you mean {close}?"
    elsewhere = paths | {
        alias: a.path for alias, a in ALIASES.items() if alias not in paths and "." not in alias
    }
    if close := nearest(name, elsewhere, 0.75):
        return f"did you mean {elsewhere[close]}?"
    return f"known here: {', '.join(siblings)}" if siblings else "no keys are known here"
