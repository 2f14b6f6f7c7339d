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
from collections.abc import Iterator, Sequence
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
# ${NAME:OFFSET:LENGTH} calculates both numbers. The parser does not read all of them.
_OFFSETS = re.compile(r"\$\{[!\w@*]+(?:\[[^]]*\])?:(?![-=+?])([^}]*)")
_NAME = re.compile(r"\b[A-Za-z_]\w*")
# Commands that set the variables that they name, and options that a name follows, with or without a space.
_SETTING = ("getopts", "mapfile", "read", "readarray")
_SETTING_WITH = {"printf": "v", "read": "a", "wait": "p"}
# Commands that, with the option C, call another one for the lines that they read.
_CALLING = ("mapfile", "readarray")
# Commands after which words mean something else, or other commands set what they like.
_UNFOLLOWED = ("alias", "builtin", "command", "coproc", "enable", "time")
# Names that mean something else where a function has them.
BUILTINS = frozenset(
    ". : [ declare echo eval exec exit export false local printf read readonly set source test true typeset unset".split()
)
# NAME=value before one of them stays where a shell keeps to POSIX.
KEEPING = frozenset(
    ". : break continue eval exec exit export readonly return set shift source times trap unset".split()
)
# Variables that a shell sets, or reads, in its own way.
_OF_THE_SHELL = "BASHPID EPOCHSECONDS EUID GROUPS LINENO PPID RANDOM SECONDS SRANDOM UID _".split()
# {NAME}>file
_REDIRECTED = re.compile(r"\{[A-Za-z_]\w*\}[<>]")
# Signals of a trap after which a script does not go on.
_AT_ENDS = frozenset("EXIT 0 INT TERM HUP QUIT SIGINT SIGTERM SIGHUP SIGQUIT".split())
# Options of `shopt` that change no value and no test that the walk decides.
_HARMLESS = frozenset(
    "checkwinsize dotglob extglob failglob globstar histappend inherit_errexit nullglob -s -u".split()
)
# Options of `declare` that change what is assigned.
_CONVERTING = frozenset("giluc")


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
    if _REDIRECTED.search(text_of(tree)):
        doubts.add("", "depends on a redirection that sets a variable")
    _calculated_offsets(tree, doubts)
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
    command = node.parent
    is_for_one = (
        command is not None
        and command.type == "command"
        and field_of(command, "name") not in KEEPING
    )
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


def _calculated_offsets(tree: Node, doubts: Doubts) -> None:
    """Doubt what the numbers of ${NAME:OFFSET:LENGTH} assign."""
    source = (tree.text or b"").decode()
    for match in _OFFSETS.finditer(source):
        line = line_of(tree) + source.count("\n", 0, match.start())
        _calculated(match[1], line, doubts)


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
    options = ""
    names: list[str] = []
    for child in node.named_children:
        text = text_of(child)
        if child.type in ("variable_name", "variable_assignment"):
            name, _, value = text.partition("=")
            name = name.rstrip("+").partition("[")[0]
            # All values are filled in before the first of them is assigned.
            if not set(re.findall(r"\w+", value)).isdisjoint(names):
                doubts.add(name, f"is set from a variable of the same declaration (line {line})")
            names.append(name)
        elif child.type == "word" and text.startswith("-"):
            options += text
        elif child.type != "word" or "=" in text or "$" in text:
            # declare "$NAME=value"
            doubts.add("", f"may be set by a declaration (line {line})")
    if "n" in options:
        doubts.add("", f"may have another name (line {line})")
    has_no_effect = node.children[0].type == "local" and not _is_in_function(node)
    for name in names:
        if has_no_effect:
            doubts.add(name, f"is declared `local` outside of a function (line {line})")
        if "i" in options:
            doubts.calculated.add(name)
        if _CONVERTING & set(options):
            doubts.add(name, f"is declared with {options} (line {line})")
        if node.children[0].type == "readonly" or "r" in options:
            readonly[name] = line


def _called(node: Node, doubts: Doubts) -> None:
    """Doubt what a command sets or changes in a way that is not followed."""
    line = line_of(node)
    words: list[str] = []
    for child in node.named_children:
        # NAME=value before a program is its environment.
        if words or child.type != "variable_assignment":
            words.append(text_of(child).strip("\"'"))
    if not words:
        return
    program, arguments = words[0], words[1:]
    if program == "let":
        _calculated(text_of(node), line, doubts)
    if program == "alias":
        for argument in arguments:
            doubts.functions[argument.partition("=")[0]] = line
    first = arguments[0] if arguments else ""
    if program in _SETTING_WITH and _may_be_option(first, node):
        for name in (first, *arguments[1:2]):
            doubts.add(name, f"may be set by `{program} {first}` (line {line})")
    for name in _set_by(program, arguments):
        if name.isidentifier() or name.startswith("$"):
            doubts.add(name, f"is set by `{program}` (line {line})")
    asks = program == "command" and arguments[:1] in (["-v"], ["-V"])
    changes = (
        (program in _UNFOLLOWED and not asks)
        or (program == "shopt" and not set(arguments) <= _HARMLESS)
        or (program in _CALLING and any(re.match(r"-\w*C", word) for word in arguments))
        or (program == "trap" and not _AT_ENDS.issuperset(arguments[1:]))
    )
    if changes:
        doubts.add("", f"may be set otherwise by `{' '.join(words)}` (line {line})")


def _may_be_option(word: str, node: Node) -> bool:
    """Return True for a variable that may hold an option of the command `node`, as in `O=-v; printf $O NAME 7`."""
    variable = re.fullmatch(r"\$\{?(\w+)\}?", word)
    if variable is None:
        return False
    root = node
    while root.parent is not None:
        root = root.parent
    values = re.findall(rf"\b{variable[1]}\+?=[\"']?(.?)", text_of(root))
    return not values or not {"-", "$", "`"}.isdisjoint(values)


def _set_by(program: str, arguments: Sequence[str]) -> list[str]:
    """Return the words of a command that may name variables that it sets."""
    names = list(arguments)
    is_setting = program in _SETTING
    if program in _SETTING_WITH:
        for argument in arguments:
            # `printf -vNAME`, `read -raNAME`
            match = re.match(rf"-\w*?{_SETTING_WITH[program]}(.*)", argument)
            if match:
                names.append(match[1])
                is_setting = True
    return names if is_setting else []
