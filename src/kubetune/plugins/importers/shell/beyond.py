"""What a script does in ways that the walk does not follow, found before the walk: no such value is called certain.

    (( BS /= GPUS ))          BS: its value is calculated
    read LR                   LR: it is set by name
    while …; do N=$((N+1))    N: loops, functions and `case` are not followed
    shopt -s nocasematch      every variable: tests mean something else
    declare -n other=LR       every variable: one has two names

`Doubts` has the reason for a name, or for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tree_sitter import Node

from kubetune.plugins.importers.shell.nodes import (
    all_below,
    field_of,
    is_calculated_test,
    line_of,
    text_of,
)

# Statements whose commands may be called, several times or not at all, and what they are.
NOT_FOLLOWED = {
    "case_statement": "a `case`",
    "for_statement": "a loop",
    "c_style_for_statement": "a loop",
    "while_statement": "a loop",
    "function_definition": "a function",
}
# Files and commands that set up an environment, and none of a script's own variables.
_ENVIRONMENTS = ("activate", "conda", ".bashrc", ".profile", "set_env.sh", "module")
# NAME = 1, NAME += 1, NAME[2] = 1, NAME++, ++NAME; no comparison.
_CALCULATED = re.compile(
    r"(?P<name>\$?\{?[A-Za-z_]\w*\}?)(?:\[[^]]*\])?\s*(?:=(?!=)|[-+*/%&|^]=|<<=|>>=|\+\+|--)"
    r"|(?:\+\+|--)\s*(?P<after>\$?\{?[A-Za-z_]\w*\}?)"
)
_DEFAULT = re.compile(r"\$\{(\w+):?=.*", re.DOTALL)
_CALCULATING = ("arithmetic_expansion", "c_style_for_statement", "subscript")
_COMPARED_AS_NUMBERS = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")
_NAME = re.compile(r"\b[A-Za-z_]\w*")
# Commands that set the variables that they name, if their arguments begin like this.
_SETTING = {
    "getopts": "", "mapfile": "", "printf": r"[-$]", "read": "", "readarray": "", "wait": r"(.* )?-\w*p",
}  # fmt: skip
# NAME, -vNAME, or a variable that holds one of them.
_SET_NAME = re.compile(r"(?:-\w*?[apv])?([A-Za-z_]\w*|\$.*)", re.DOTALL)
# Commands with arguments that begin like this: words mean something else after them, or code is called that sets what it
# likes.
_UNFOLLOWED = {
    "alias": "", "builtin": "", "command": "(?!-[vV])", "coproc": "", "enable": "", "time": "", "mapfile": r"(.* )?-\w*C",
    "readarray": r"(.* )?-\w*C", "set": r"(?!-- )(.* )?(-[a-mp-zA-Z]*n|noexec|posix)\b",
}  # fmt: skip
# Options of `shopt` that change no value and no test that the walk decides, and signals of a trap after which a script
# does not go on.
_HARMLESS = {
    "shopt": "checkwinsize dotglob extglob failglob globstar histappend inherit_errexit nullglob".split(),
    "trap": "EXIT 0 INT TERM HUP QUIT SIGINT SIGTERM SIGHUP SIGQUIT".split(),
}
# Names that mean something else where a function has them.
BUILTINS = frozenset(
    ". : [ declare echo eval exec exit export false local printf read readonly set source test true typeset unset".split()
)
# Variables that a shell sets, or reads, in its own way.
_OF_THE_SHELL = "BASHPID EPOCHSECONDS EUID GROUPS LINENO PPID RANDOM SECONDS SRANDOM UID _".split()
# What sets variables wherever it stands: {NAME}>file, and ${NAME:OFFSET:LENGTH} with more than numbers, since both are
# calculated. The parser does not read all of them.
_SETTING_ANYWHERE = {
    r"\{[A-Za-z_]\w*\}[<>]": "a redirection that sets a variable",
    r"\$\{[!\w@*]+(?:\[[^]]*\])?:(?![-=+?])[^}]*[A-Za-z_]": "a calculation in ${…:…}",
}

# Options of `declare` that change what is assigned to the variable, or to any.
_CONVERTING = frozenset("gluc")
_RENAMING = frozenset("in")


@dataclass
class Doubts:
    """Why values are not certain."""

    of_names: dict[str, str] = field(default_factory=dict)
    of_all: str = ""
    # Variables whose values are calculated where they are read.
    calculated: set[str] = field(default_factory=set)
    # Functions and aliases, with their lines, and those functions that surely end the script.
    functions: dict[str, int] = field(default_factory=dict)
    ending: set[str] = field(default_factory=set)

    def of(self, name: str) -> str:
        """Return why the value of a variable is not certain; empty if it may be."""
        return self.of_all or self.of_names.get(name, "")

    def add(self, name: str, why: str) -> None:
        """Doubt a variable, or all if its name is not known."""
        if name.isidentifier():
            self.of_names.setdefault(name, why)
        else:
            self.of_all = self.of_all or why


def doubts_of(tree: Node) -> Doubts:
    """Return what is not certain in a script, wherever it stands."""
    doubts = Doubts(dict.fromkeys(_OF_THE_SHELL, "is a variable of the shell itself"))
    for pattern, what in _SETTING_ANYWHERE.items():
        if re.search(pattern, text_of(tree)):
            doubts.add("", f"depends on {what}")
    assigned: dict[str, list[Node]] = {}  # where a variable is set
    readonly: dict[str, int] = {}
    unsetting = 0  # the last line that unsets a variable whose name is not known
    for node in all_below(tree):
        line = line_of(node)
        match node.type:
            case "variable_assignment":
                assigned.setdefault(_assigned(node, doubts), []).append(node)
            case "declaration_command":
                _declared(node, doubts, readonly)
            case "unset_command" if "$" in text_of(node) and not _is_in_function(node):
                unsetting = max(unsetting, line)
            case "unset_command":
                for child in node.named_children:
                    doubts.add(text_of(child), f"is changed by `unset` (line {line})")
            case "command":
                _called(node, doubts)
            case "function_definition":
                _defined(node, doubts)
        is_comparison = field_of(node, "operator") in _COMPARED_AS_NUMBERS
        if is_comparison or is_calculated_test(node) or node.type in _CALCULATING:
            _calculated(text_of(node), line, doubts)
        if node.type in NOT_FOLLOWED:
            why = f"may be set in {NOT_FOLLOWED[node.type]} (line {line}), which is not followed"
            for name in _set_within(node):
                doubts.add(name, why)
    _calculate_in_turn(assigned, doubts)
    for name, nodes in assigned.items():
        if name in readonly and len(nodes) > 1:
            doubts.add(name, f"is read-only (line {readonly[name]})")
        if min(map(line_of, nodes)) <= unsetting:
            doubts.add(name, f"is perhaps changed by `unset` (line {unsetting})")
    return doubts


def _assigned(node: Node, doubts: Doubts) -> str:
    """Return the variable of an assignment. Doubt what it changes beside that."""
    name, bracket, _ = field_of(node, "name").partition("[")
    line = line_of(node)
    if bracket:
        doubts.add(name, f"is set item by item (line {line})")
    # `IFS=, read A B` is for that command alone.
    is_for_one = node.parent is not None and node.parent.type == "command"
    if name == "IFS" and not is_for_one:
        doubts.add("", f"may be split otherwise, by IFS (line {line})")
    return name


def _is_in_function(node: Node) -> bool:
    """Return True for what may run later than where it stands."""
    around = node.parent
    while around is not None and around.type != "function_definition":
        around = around.parent
    return around is not None


def may_set_anything(program: str, text: str) -> bool:
    """Return True for `source`, `.` and `eval`, unless the file is known to set up an environment alone."""
    is_reading = program in ("source", ".", "eval")
    return is_reading and not any(name in text for name in _ENVIRONMENTS)


def _set_within(outer: Node) -> Iterator[str]:
    """Yield the variables that a statement sets; an empty name stands for all."""
    if outer.type == "for_statement":
        yield field_of(outer, "variable")
    for node in all_below(outer):
        default = _DEFAULT.fullmatch(text_of(node))
        if node.type == "variable_assignment":
            yield field_of(node, "name").partition("[")[0]
        elif node.type == "expansion" and default:
            yield default[1]
        elif node.type == "command" and may_set_anything(field_of(node, "name"), text_of(node)):
            yield ""


def _defined(node: Node, doubts: Doubts) -> None:
    """Keep the name of a function."""
    name = field_of(node, "name")
    line = line_of(node)
    doubts.functions[name] = line
    if name in BUILTINS:
        doubts.add("", f"depends on a function named as a builtin (line {line})")
    body = node.child_by_field_name("body")
    if body is None or body.type != "compound_statement" or "return" in text_of(body):
        return
    if any(field_of(child, "name") == "exit" for child in body.named_children):
        doubts.ending.add(name)


def _calculated(text: str, line: int, doubts: Doubts) -> None:
    """Doubt what a calculation assigns."""
    for match in _CALCULATED.finditer(text):
        name = match["name"] or match["after"]
        doubts.add(name, f"is set in a calculation (line {line})")
    doubts.calculated.update(_NAME.findall(text))


def _calculate_in_turn(assigned: dict[str, list[Node]], doubts: Doubts) -> None:
    """Doubt what the values of variables assign that are read in calculations.

    A="B=7"; echo $((A))     B is 7
    """
    done: set[str] = set()
    while waiting := doubts.calculated & assigned.keys() - done:
        done |= waiting
        for name in sorted(waiting):
            for node in assigned[name]:
                _calculated(field_of(node, "value"), line_of(node), doubts)


def _declared(node: Node, doubts: Doubts, readonly: dict[str, int]) -> None:
    """Doubt what a declaration names in a way that is not followed."""
    line = line_of(node)
    program = text_of(node.children[0])
    options: set[str] = set()
    names: list[str] = []
    for child in node.named_children:
        text = text_of(child)
        if child.type in ("variable_name", "variable_assignment"):
            names.append(re.split(r"[+=[]", text)[0])
        elif text.startswith("-"):
            options |= set(text)
        elif child.type != "word" or "=" in text or "$" in text:
            # declare "$NAME=value"
            doubts.add("", f"may be set by a declaration (line {line})")
    if options & _RENAMING:
        doubts.add("", f"may have another name, or be calculated (line {line})")
    for name in names:
        if program == "local" or options & _CONVERTING:
            doubts.add(name, f"is declared by `{program}` (line {line})")
        if program == "readonly" or "r" in options:
            readonly[name] = line


def _called(node: Node, doubts: Doubts) -> None:
    """Doubt what a command sets or changes in a way that is not followed."""
    line = line_of(node)
    words: list[str] = []
    for child in node.named_children:
        # NAME=value before a program is its environment.
        if words or child.type != "variable_assignment":
            words.append(text_of(child).strip("\"'"))
    program, *arguments = words or [""]
    text = " ".join(arguments)
    if program == "let":
        _calculated(text, line, doubts)
    if program == "alias":
        for argument in arguments:
            doubts.functions[argument.partition("=")[0]] = line
    if program in _SETTING and re.match(_SETTING[program], text):
        for argument in arguments:
            match = _SET_NAME.fullmatch(argument)
            if match is not None:
                doubts.add(match[1], f"is set by `{program}` (line {line})")
    is_unfollowed = program in _UNFOLLOWED and re.match(_UNFOLLOWED[program], text)
    is_changing = program in _HARMLESS and not set(arguments[1:]) <= set(_HARMLESS[program])
    if is_unfollowed or is_changing:
        doubts.add("", f"may be set otherwise by `{' '.join(words)}` (line {line})")
