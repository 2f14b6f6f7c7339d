"""Assignments and commands of a script: what they set, and the programs that are called."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tree_sitter import Node

from kubetune.plugins.importers.shell.beyond import BUILTINS, may_set_anything
from kubetune.plugins.importers.shell.nodes import field_of, line_of, text_of
from kubetune.plugins.importers.shell.script_folder import UNKNOWN, moved
from kubetune.plugins.importers.shell.state import (
    Command,
    Script,
    Value,
    Word,
    added,
    doubted,
)
from kubetune.plugins.importers.shell.values import Values

_QUIET_COMMANDS = ("[", "echo", "printf", "set", "shift", "test", "trap", "wait")
# `--seed 1` and `trainer.seed=1` are no programs.
_ARGUMENT = re.compile(r"-|[+~]*[\w./]+=")


class Commands:
    """Follows single commands, and keeps the programs that are called.

    swift sft --seed 1     kept, with the exported variables and the conditions around it
    exec swift sft         kept, and nothing after it is called
    source env.sh          not followed: what the script has set is not certain after it
    """

    def __init__(self, values: Values) -> None:
        self.script = Script()
        self.values = values
        self.conditions: list[str] = []  # around the present place, not known

    def assign(self, nodes: Sequence[Node]) -> None:
        """Follow NAME=value, NAME+=value, NAME=( … ) and NAME+=( … ). All values are filled in before any is assigned."""
        values = [self.assigned(node) for node in nodes]
        for node, value in zip(nodes, values, strict=True):
            name = field_of(node, "name")
            # One item of an array is doubted before.
            if name.isidentifier():
                self.values.set(name, value, node)

    def assigned(self, node: Node) -> Value:
        """Return the value that an assignment gives."""
        source = node.child_by_field_name("value")
        value: Value = Word("")
        if source is not None and source.type == "array":
            value = tuple(self.values.words(source.named_children))
        elif source is not None:
            value = Word(self.values.text(source))
        if any(child.type == "+=" for child in node.children):
            value = added(self.values.get(field_of(node, "name")) or Word(""), value)
        return value

    def declare(self, node: Node) -> None:
        """Follow `export`, `declare` and `readonly`."""
        declared = node.named_children
        self.assign([child for child in declared if child.type == "variable_assignment"])
        if node.children[0].type == "export":
            self.values.state.exported |= {text_of(child).partition("=")[0] for child in declared}

    def follow(self, node: Node) -> None:
        """Follow one command: a program that is kept, `exit`, or what may set any variable."""
        environment, called = self._words_of(node)
        program, *arguments = [word.text for word in called] or [""]
        state = self.values.state
        line = line_of(node)
        if program == "exit":
            state.has_ended = True
        elif program in self.values.doubts.ending and not any(self.conditions):
            self.script.unread[line] = f"{program}: ends the script"
            state.has_ended = True
        elif program == "exec":
            # `exec >log` and `exec {NAME}>log` redirect, and the script goes on.
            if any(not text.startswith("{") for text in arguments):
                self.keep(line, environment + called[1:])
                state.has_ended = True
        elif program in ("cd", "pushd"):
            folders = [text for text in arguments if not text.startswith("--")]
            state.folder = moved(state.folder, folders[0] if folders else "~")
        elif program == "popd":
            state.folder = UNKNOWN
        elif program in ("source", ".", "eval"):
            self.script.unread[line] = f"{program}: what it sets is not known"
            if may_set_anything(program, " ".join(arguments)):
                self.doubt_all(f"`{program}` may set anew (line {line})")
        elif program in BUILTINS and program != field_of(node, "name"):
            # A variable stands for the builtin, of which `beyond` has seen nothing.
            self.doubt_all(f"`{program}` may set anew (line {line})")
        elif _ARGUMENT.match(program):
            self.script.unread[line] = (
                f"{program}: begins a command of its own; a backslash joins lines only as the last character of one"
            )
        elif program and program not in _QUIET_COMMANDS:
            self.keep(line, environment + called)

    def _words_of(self, node: Node) -> tuple[list[Word], list[Word]]:
        """Return the environment of a command and its own words, filled in.

        SEED=1 swift sft --seed $SEED     SEED=1 is its environment, and set after the other words are filled in
        """
        nodes = [child for child in node.named_children if not child.type.endswith("redirect")]
        settings = [child for child in nodes if child.type == "variable_assignment"]
        rest = [child for child in nodes if child not in settings]
        called = self.values.words(rest)
        # The script does not keep what is set for one program.
        before = self.values.state.copy()
        environment = self.values.words(settings)
        self.values.state = before
        return environment, called

    def keep(self, line: int, words: Sequence[Word]) -> None:
        """Keep a program that the script calls."""
        exported = {}
        for name in sorted(self.values.state.exported):
            value = self.values.get(name)
            if isinstance(value, Word):
                exported[name] = self.values.left_open(name, value.why) if value.why else value.text
        conditions = [condition for condition in self.conditions if condition]
        condition = conditions[-1] if conditions else ""
        folder = self.values.state.folder
        self.script.commands.append(Command(line, tuple(words), exported, condition, folder))

    def redirect(self, node: Node) -> None:
        """Keep the file that a redirection writes."""
        target = node.child_by_field_name("destination")
        if target is not None and any(">" in child.type for child in node.children):
            self.script.written.setdefault(self.values.text(target), line_of(node))

    def doubt_all(self, why: str) -> None:
        """Take variables for not certain after what may set any of them anew."""
        # HOME is no variable that the script sets in a line.
        values = self.values.state.values
        for name in self.values.state.lines.keys() & values.keys():
            values[name] = doubted(values[name], why)
