"""What a script does in ways that the walk does not follow, found before the walk: no such value is called certain.

    (( BS /= GPUS ))          BS: its value is calculated
    printf -v LR 7            LR: it is set by name
    while …; do N=$((N+1))    N: it may be set more than once
    shopt -s nocasematch      every variable: tests mean something else
    declare -n other=LR       every variable: one has two names

`Doubts` has the reason for a name, or for all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tree_sitter import Node

from kubetune.plugins.importers.shell.nodes import field_of, line_of, text_of

# NAME = 1, NAME += 1, NAME[2] = 1, NAME++, ++NAME; no comparison.
_CALCULATED: Final = re.compile(
    r"(?P<name>\$?\{?[A-Za-z_]\w*\}?)(?:\[[^]]*\])?\s*(?:=(?!=)|[-+*/%&|^]=|<<=|>>=|\+\+|--)"
    r"|(?:\+\+|--)\s*(?P<after>\$?\{?[A-Za-z_]\w*\}?)"
)
_COMPARED_AS_NUMBERS: Final = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")
_LOOPS: Final = ("while_statement", "c_style_for_statement", "for_statement")

# Builtins that the walk follows. Under the name of one of them a function does something else.
_FOLLOWED: Final = frozenset(
    ". : [ break builtin case command continue declare echo eval exec exit export false local mapfile printf read "
    "readonly return set shift source test true typeset unset".split()
)
# Options of `shopt` that change no value and no test that the walk decides.
_HARMLESS: Final = frozenset(
    "checkwinsize dotglob extglob failglob globstar histappend inherit_errexit nullglob".split()
)
# Options of `declare` that change what is assigned.
_CONVERTING: Final = frozenset("giluc")


@dataclass
class Doubts:
    """Why values are not certain."""

    of_names: dict[str, str] = field(default_factory=dict)
    of_all: str = ""

    def of(self, name: str) -> str:
        """Return why the value of a variable is not certain; empty if it may be."""
        return self.of_all or self.of_names.get(name, "")

    def add(self, name: str, why: str) -> None:
        """Doubt a variable, or all where its name is not known."""
        if name.isidentifier():
            self.of_names.setdefault(name, why)
        else:
            self.add_all(why)

    def add_all(self, why: str) -> None:
        """Doubt every variable."""
        self.of_all = self.of_all or why


def doubts_of(tree: Node) -> Doubts:
    """Return what is not certain in a script, wherever it stands."""
    doubts = Doubts()
    assigned: Counter[str] = Counter()
    readonly: dict[str, int] = {}
    for node in _all_below(tree):
        line = line_of(node)
        match node.type:
            case "variable_assignment":
                assigned[field_of(node, "name")] += 1
            case "declaration_command":
                _declared(node, doubts, readonly)
            case "command":
                _called(node, doubts)
            case (
                "compound_statement"
                | "arithmetic_expansion"
                | "c_style_for_statement"
                | "subscript"
            ):
                if node.type != "compound_statement" or node.children[0].type == "((":
                    _calculated(node, doubts)
            case "binary_expression":
                if field_of(node, "operator") in _COMPARED_AS_NUMBERS:
                    _calculated(node, doubts)
            case "function_definition":
                if field_of(node, "name") in _FOLLOWED:
                    doubts.add_all(f"depends on a function named as a builtin (line {line})")
            case "file_redirect":
                if text_of(node).startswith("{"):
                    doubts.add_all(f"depends on a redirection that sets a variable (line {line})")
        if node.type in _LOOPS and not _runs_as_written(node):
            for name in _set_within(node):
                doubts.add(name, f"may be set more than once (line {line})")
    for name, line in readonly.items():
        if assigned[name] > 1:
            doubts.add(name, f"is read-only (line {line})")
    return doubts


def _all_below(node: Node) -> Iterator[Node]:
    """Yield a node and all below it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.named_children


def _runs_as_written(loop: Node) -> bool:
    """Return True for a `for` over words, which the walk follows; `select` is none."""
    return loop.type == "for_statement" and loop.children[0].type == "for"


def _set_within(loop: Node) -> Iterator[str]:
    """Yield the variables that a loop sets."""
    yield field_of(loop, "variable")
    for node in _all_below(loop):
        if node.type == "variable_assignment":
            yield field_of(node, "name")


def _calculated(node: Node, doubts: Doubts) -> None:
    """Doubt what a calculation assigns."""
    for match in _CALCULATED.finditer(text_of(node)):
        name = match["name"] or match["after"]
        doubts.add(name, f"is set in a calculation (line {line_of(node)})")


def _declared(node: Node, doubts: Doubts, readonly: dict[str, int]) -> None:
    """Doubt what a declaration names in a way that is not followed."""
    line = line_of(node)
    options = "".join(text_of(child) for child in node.named_children if child.type == "word")
    names = []
    for child in node.named_children:
        text = text_of(child)
        if child.type in ("variable_name", "variable_assignment"):
            names.append(text.partition("=")[0].rstrip("+").partition("[")[0])
        elif child.type != "word" or "=" in text or "$" in text:
            # declare "$NAME=value"
            doubts.add_all(f"may be set by a declaration (line {line})")
    if "-" in options and "n" in options:
        doubts.add_all(f"may have another name (line {line})")
    for name in names:
        if "-" in options and _CONVERTING & set(options):
            doubts.add(name, f"is declared with {options} (line {line})")
        if node.children[0].type == "readonly" or ("-" in options and "r" in options):
            readonly[name] = line


def _called(node: Node, doubts: Doubts) -> None:
    """Doubt what a command sets or changes in a way that is not followed."""
    line = line_of(node)
    words = [text_of(child).strip("\"'") for child in node.named_children]
    program, arguments = words[0], words[1:]
    why = f"is set by `{program}` (line {line})"
    match program:
        case "let":
            _calculated(node, doubts)
        case "getopts":
            for name in (*arguments[1:2], "OPTARG", "OPTIND"):
                doubts.add(name, why)
        case "readarray" | "mapfile":
            for name in [word for word in arguments if not word.startswith("-")][-1:]:
                doubts.add(name, why)
        case "printf" if "-v" in arguments[:1]:
            doubts.add(arguments[1] if len(arguments) > 1 else "", why)
        case "wait" if "-p" in arguments:
            doubts.add(arguments[-1], why)
        case "time" | "coproc":
            doubts.add_all(f"may be set behind `{program}` (line {line})")
        case "alias" | "enable":
            doubts.add_all(f"depends on `{program}`, which changes what words mean (line {line})")
        case "builtin" | "command":
            inner = next((word for word in arguments if not word.startswith("-")), "")
            asks = program == "command" and arguments[:1] and arguments[0] in ("-v", "-V")
            if inner in _FOLLOWED and not asks:
                doubts.add_all(f"may be set by `{program} {inner}` (line {line})")
        case "shopt":
            changed = {word for word in arguments if not word.startswith("-")}
            if changed - _HARMLESS and arguments[:1] in (["-s"], ["-u"]):
                doubts.add_all(f"depends on `{' '.join(words)}` (line {line})")
        case "trap":
            if {"DEBUG", "ERR", "RETURN"} & set(arguments[1:]):
                doubts.add_all(f"may be set by a trap (line {line})")
