"""Assignments and commands of a script: what they set, and the programs that are called."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from tree_sitter import Node

from kubetune.plugins.importers.shell.beyond import BUILTINS, KEEPING, may_set_anything
from kubetune.plugins.importers.shell.nodes import field_of, line_of, text_of
from kubetune.plugins.importers.shell.script_folder import UNKNOWN, moved
from kubetune.plugins.importers.shell.state import (
    Alternatives,
    Command,
    Script,
    Value,
    Word,
    added,
    doubted,
    merged,
)
from kubetune.plugins.importers.shell.values import Values

_MOST_COMMANDS = 10_000
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
        environment, called = self._words_of(node)
        texts = [word.text for word in called]
        program = texts[0] if texts else ""
        line = line_of(node)
        if program == "exit":
            self.values.state.has_ended = True
        elif program in self.values.doubts.ending and not any(self.conditions):
            self.script.unread[line] = f"{program}: ends the script"
            self.values.state.has_ended = True
        elif program == "exec":
            # `exec >log` and `exec {NAME}>log` redirect, and the script goes on.
            if any(not text.startswith("{") for text in texts[1:]):
                self.keep(line, environment + called[1:])
                self.values.state.has_ended = True
        elif program == "set" and _is_last(texts[1:]):
            self.script.unread[line] = f"{' '.join(texts)}: nothing after it is run"
            self.values.state.has_ended = True
        elif program in ("cd", "pushd"):
            target = next((text for text in texts[1:] if not text.startswith("--")), "~")
            self.values.state.folder = moved(self.values.state.folder, target)
        elif program == "popd":
            self.values.state.folder = UNKNOWN
        elif program in ("source", ".", "eval"):
            self.script.unread[line] = f"{program}: what it sets is not known"
            if may_set_anything(program, " ".join(texts[1:])):
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
        # The script does not keep what is set for one program, and perhaps what is set for such a builtin.
        before = self.values.state.copy()
        environment = self.values.words(settings)
        if called and called[0].text in KEEPING:
            before = merged(before, [before, self.values.state])
        self.values.state = before
        return environment, called

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
        folder = self.values.state.folder
        self.script.commands.append(Command(line, tuple(words), exported, condition, folder))

    def redirect(self, node: Node) -> None:
        """Keep the file that a redirection writes."""
        target = node.child_by_field_name("destination")
        if target is not None and any(">" in child.type for child in node.children):
            name = posixpath.join(self.values.state.folder, self.values.text(target))
            self.script.written.setdefault(name, line_of(node))

    def doubt_all(self, why: str) -> None:
        """Take variables for not certain after what may set any of them anew."""
        # HOME is no variable that the script sets in a line.
        values = self.values.state.values
        for name in self.values.state.lines.keys() & values.keys():
            values[name] = doubted(values[name], why)


def _is_last(arguments: Sequence[str]) -> bool:
    """Return True for `set -n` and `set -o noexec`, after which a shell reads commands and runs none."""
    before = ""
    for argument in arguments:
        if argument in ("-", "--"):
            return False
        is_named = argument == "noexec" and re.fullmatch(r"-\w*o", before)
        if is_named or re.fullmatch(r"-[a-mp-zA-Z]*n\w*", argument):
            return True
        before = argument
    return False
