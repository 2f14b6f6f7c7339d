"""Turn pydantic's errors into problems: one for each wrong setting, with its line, what was found and what was expected."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from kubetune.base.humanize import nearest
from kubetune.base.provenance import KeyPath, Problem, Tree, dotted
from kubetune.base.secrets import ADVICE, names_secret
from kubetune.config import json_schema
from kubetune.config.aliases import ALIASES, VALUES

_LONGEST_VALUE = 60
# What to type for keys that a run without a file needs.
_FLAGS = {"model": "--model FOLDER|ID", "data.train": "--data FILE"}


def explain(errors: Sequence[ErrorDetails], tree: Tree) -> list[Problem]:
    """Return one problem for each wrong setting, in no order.

    Pydantic reports an error for each branch of a union. For `lora: {r: 0}`, which may be a section, true or null:

        lora, LoraConfig, r: should be at least 1   ← the mistake: the deepest path
        lora, bool: should be a boolean             ← says nothing about the mistake; left out
    """
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for error in errors:
        by_path.setdefault(_place(error, tree), []).append(error)

    problems: list[Problem] = []
    for path, errors_here in by_path.items():
        has_deeper = any(other != path and other[: len(path)] == path for other in by_path)
        if not has_deeper or _are_about_section(errors_here):
            problems += _explain_one(path, errors_here, tree)
    return problems


def _are_about_section(errors: Sequence[ErrorDetails]) -> bool:
    """True if an error is about the section itself, not about what may be in place of a section."""
    return any(error["type"] in ("value_error", "missing", "extra_forbidden") for error in errors)


def _place(error: ErrorDetails, tree: Tree) -> KeyPath:
    """Return the path of an error in the tree.

    Pydantic puts the names of union branches into a location: ("lora", "LoraConfig", "r") is the path ("lora", "r").
    Parts that the tree does not have are such names, except for the last part of a missing key. A word that stands
    for a list of one, as in `metric: bleu`, has no parts.
    """
    node: Any = tree.data
    path: list[str | int] = []
    last = len(error["loc"]) - 1
    for index, part in enumerate(error["loc"]):
        if isinstance(node, str):
            continue
        try:
            node = node[part]
        except (LookupError, TypeError):
            is_missing_key = error["type"] == "missing" and index == last
            if not is_missing_key:
                continue
        path.append(part)
    return tuple(path)


def _explain_one(path: KeyPath, errors: Sequence[ErrorDetails], tree: Tree) -> list[Problem]:
    # The kind of error with the best advice wins, if a union has reported several.
    origin = tree.origin(path)
    kinds = {error["type"] for error in errors}
    if "missing" in kinds:
        path, node = _needed(path)
        expected = f"expected {_expected(path)}: {_first_sentence(node)}"
        flag = _FLAGS.get(dotted(path))
        if flag is not None and str(origin) == "command line":
            expected = f"give {flag}, or name a run file"
        return [Problem(origin, f"{dotted(path)}: missing; {expected}")]
    if "extra_forbidden" in kinds:
        # A key such as `api_key` gets advice on secrets, and not a similar key.
        if names_secret(str(path[-1])):
            return [Problem(origin, f"{dotted(path)}: {ADVICE}")]
        return [Problem(origin, f"{dotted(path)}: unknown key; {suggest(path)}")]
    if "value_error" in kinds:
        text = next(
            str(error["ctx"]["error"]) for error in errors if error["type"] == "value_error"
        )
        if path:
            return [Problem(origin, f"{dotted(path)}: {text}{_from_elsewhere(path, tree)}")]
        return _between_sections(text, tree)
    if not path:
        return [Problem(origin, f"{error['msg']}") for error in errors]
    value = tree.get(path)
    meant = _meant(path, value)
    expected = f"expected {_expected(path)}"
    if meant is not None:
        expected = f"did you mean {meant}? Expected {_expected(path)}"
    return [Problem(origin, f"{dotted(path)}: found {_shown(value)}; {expected}")]


def _meant(path: KeyPath, value: Any) -> str | None:
    """Return the word that a wrong one of a list was probably meant to be, None where no word is like it."""
    if not isinstance(value, str):
        return None
    known: list[str] = []
    for option in json_schema.options(json_schema.at(path) or {}):
        known += [str(word) for word in option.get("enum", ())]
    other = VALUES.get(dotted(path), {}).get(value.lower())
    if other in known:
        return other
    close: str | None = nearest(value.lower(), known, 0.7)
    return close


def _between_sections(text: str, tree: Tree) -> list[Problem]:
    """Return the problems of checks that compare sections: a line each, `KEY: what is wrong`."""
    problems = []
    for line in text.splitlines():
        key = line.split(":")[0]
        problems.append(Problem(tree.origin(tuple(key.split("."))), line))
    return problems


def _from_elsewhere(path: KeyPath, tree: Tree) -> str:
    """Name the keys of a section that another file sets, such as the organisation's defaults. Mostly empty.

    The user who sees "name one of space_id and server_url" may have written only one of the two.
    """
    section = tree.find(path)
    if not isinstance(section, dict):
        return ""
    file_of_section = tree.origin(path).source
    keys = []
    for key in section:
        origin = tree.origin_of((*path, key))
        if origin is not None and origin.source != file_of_section:
            keys.append(f"{key} of {origin}")
    if not keys:
        return ""
    return f" ({', '.join(keys)}; where you want another, set that to null)"


def _needed(path: KeyPath) -> tuple[KeyPath, json_schema.Node]:
    """Return a missing key with its schema; for a missing section, its first required key."""
    node = json_schema.at(path) or {}
    # For a section of one kind: `data` is missing, so `data.train` is what the user has to write.
    options = json_schema.options(node)
    if len(options) == 1:
        required = options[0].get("required")
        if required:
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
    """Return the known key that an unknown one may have meant, as a question; else the keys that are known there."""
    name = str(path[-1])
    siblings = list(json_schema.keys(json_schema.at(path[:-1]) or {}))

    # Hardly another word, in the right section: `evaluation.generate.metrics`, though `evaluation.metrics` is a key.
    close = nearest(name, siblings, 0.9)
    if close:
        return f"did you mean {close}?"

    # The right name in the wrong section: `lora.seed` for `training.seed`.
    homes = [dotted(known) for known, _ in json_schema.leaves() if known[-1] == name]
    if homes:
        return f"did you mean {' or '.join(homes)}?"

    # A wrong spelling in the right section: `lora.dropuot`.
    close = nearest(name, siblings, 0.7)
    if close:
        return f"did you mean {close}?"

    # A wrong spelling in the wrong section, or of another tool's name.
    elsewhere = {alias: known.path for alias, known in ALIASES.items() if "." not in alias}
    elsewhere |= {str(known[-1]): dotted(known) for known, _ in json_schema.leaves()}
    close = nearest(name, elsewhere, 0.75)
    if close:
        return f"did you mean {elsewhere[close]}?"
    if not siblings:
        return "no keys are known here"
    return f"known here: {', '.join(siblings)}"
