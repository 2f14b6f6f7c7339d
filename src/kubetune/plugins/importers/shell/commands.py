"""Assignments and commands of a script: what they set, and the programs that are called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from tree_sitter import Node

from kubetune.plugins.importers.shell.beyond import BUILTINS, may_set_anything
from kubetune.plugins.importers.shell.nodes import field_of, line_of, text_of
from kubetune.plugins.importers.shell.state import (
    Alternatives,
    Command,
    Script,
    Value,
    Word,
    added,
    doubted,
)
from kubetune.plugins.importers.shell.values import Values

_MOST_COMMANDS: Final = 10_000
_QUIET_COMMANDS: Final = ("echo", "printf", "set", "trap", "shift", "wait")


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

    def assign(self, node: Node) -> None:
        """Follow NAME=value, NAME+=value, NAME=( … ) and NAME+=( … )."""
        name = field_of(node, "name")
        if not name.isidentifier():
            return  # one item of an array
        source = node.child_by_field_name("value")
        value: Value = ""
        if source is not None and source.type == "array":
            value = tuple(self.values.words(source.named_children))
        elif source is not None:
            value = self.values.text(source)
        if any(child.type == "+=" for child in node.children):
            value = added(self.values.get(name) or "", value)
        self.values.set(name, value, node)

    def declare(self, node: Node) -> None:
        """Follow `export`, `declare` and `readonly`."""
        for child in node.named_children:
            if child.type == "variable_assignment":
                self.assign(child)
            if node.children[0].type == "export":
                self.values.state.exported |= {text_of(child).partition("=")[0]}

    def follow(self, node: Node) -> None:
        """Follow one command: a program that is kept, `exit`, or what may set any variable."""
        nodes = [child for child in node.named_children if not child.type.endswith("redirect")]
        before = self.values.state.copy()
        words = self.values.words(nodes)
        texts = [word.text for word in words]
        # NAME=value before a program is its environment.
        while texts and re.match(r"\w+=", texts[0]):
            self.values.state = before
            del texts[0]
        program = texts[0] if texts else ""
        line = line_of(node)
        if program == "exit":
            self.values.state.has_ended = True
        elif program == "exec":
            self.keep(line, words[1:])
            self.values.state.has_ended = True
        elif program in ("source", ".", "eval"):
            self.script.unread[line] = f"{program}: what it sets is not known"
            if may_set_anything(program, " ".join(texts[1:])):
                self.doubt_all(f"`{program}` may set anew (line {line})")
        elif program in BUILTINS and program != field_of(node, "name"):
            # A variable stands for the builtin, of which `beyond` has seen nothing.
            self.doubt_all(f"`{program}` may set anew (line {line})")
        elif program and program not in _QUIET_COMMANDS:
            self.keep(line, words)

    def keep(self, line: int, words: Sequence[Word]) -> None:
        """Keep a program that the script calls."""
        if len(self.script.commands) >= _MOST_COMMANDS:
            return
        exported = {}
        for name in sorted(self.values.state.exported):
            value = self.values.get(name)
            if isinstance(value, Alternatives):
                value = self.values.left_open(name, value.why)
            if isinstance(value, str):
                exported[name] = value
        condition = ""
        for around in self.conditions:
            condition = around or condition
        self.script.commands.append(Command(line, tuple(words), exported, condition))

    def doubt_all(self, why: str) -> None:
        """Take variables for not certain after what may set any of them anew."""
        # HOME is no variable that the script sets in a line.
        values = self.values.state.values
        for name in self.values.state.lines.keys() & values.keys():
            values[name] = doubted(values[name], why)
