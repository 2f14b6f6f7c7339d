"""Commands that a script calls: builtins, its own functions, and programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from tree_sitter import Node

from kubetune.plugins.importers.shell.assignments import Outside, doubt_all
from kubetune.plugins.importers.shell.nodes import is_known, parsed
from kubetune.plugins.importers.shell.state import Alternatives, Command, Script, Word
from kubetune.plugins.importers.shell.values import Values

_DEEPEST_CALL: Final = 20  # functions that call themselves end somewhere
_MOST_COMMANDS: Final = 10_000
_QUIET_COMMANDS: Final = ("echo", "printf", "set", "trap", "shift", "wait")
# Files and commands that set up an environment, and none of a script's own variables.
_ENVIRONMENTS: Final = ("activate", "conda", ".bashrc", ".profile", "set_env.sh", "module")


class Calls:
    """Keeps what a script calls. `walk_body` walks through the statements within a node.

    swift sft --seed 1     a program: kept in `script.commands`
    train 3                a function of the script: its body is walked through
    eval "A=1", sh -c …    a text: parsed and walked through
    source env.sh          not followed: what the script has set is not certain behind it
    read A                 A is not known
    exit                   nothing behind it is walked through
    """

    def __init__(self, script: Script, values: Values, walk_body: Callable[[Node], None]) -> None:
        self.script = script
        self.values = values
        self.walk_body = walk_body
        # By name; several, or None, if branches define it differently.
        self.functions: dict[str, list[Node | None]] = {}
        self.outside: list[Outside] = []  # of each function that is being called
        self.conditions: list[str] = []  # around the present place, not known

    def define(self, name: str, function: Node) -> None:
        """Keep a function of the script. Behind a branch it may be the one that was there before, or none."""
        if any(self.conditions):
            self.functions[name] = [*self.functions.get(name, [None]), function]
        else:
            self.functions[name] = [function]

    def command(self, node: Node) -> None:
        """Follow one command."""
        nodes = [child for child in node.named_children if not child.type.endswith("redirect")]
        before = self.values.state.copy()
        words = self.values.words(nodes)
        # NAME=value before a program is its environment, and a function's only while it runs.
        texts = [word.text for word in words]
        names = []
        while texts and (assigned := re.match(r"(\w+)=", texts[0])):
            names.append(assigned[1])
            del texts[0]
        calls_function = bool(texts) and texts[0] in self.functions
        if names and not calls_function:
            self.values.state = before
        if texts:
            self.call(node, words, texts[0], texts[1:])
        if calls_function:
            for name in names:
                self.values.restore(name, before)

    def call(
        self, node: Node, words: Sequence[Word], program: str, arguments: Sequence[str]
    ) -> None:
        """Follow the call of a program with its arguments; `words` are those of the whole command."""
        line = self.values.line_of(node)
        match program:
            case _ if program in self.functions:
                self.call_one_of(program, arguments)
            case "exit" | "return" | "break" | "continue":
                self.values.state.ended_by = program
            case "shift" | "set" if program == "shift" or "--" in arguments:
                for number in range(1, 10):
                    moved = Alternatives((), f"is another one behind `{program}` (line {line})")
                    self.values.set(str(number), moved, node)
            case "exec":
                self.keep(line, words[1:])
                self.values.state.ended_by = "exit"
            case "read" | "mapfile":
                for name in arguments:
                    self.values.set(
                        name, Alternatives((), f"is read when the script runs (line {line})"), node
                    )
            case "eval" if is_known("".join(arguments)):
                # The same shell reads it, so what it sets stays set.
                self.walk_text(" ".join(arguments), line)
            case "source" | "." | "eval":
                self.doubt(program, arguments, line)
            case "bash" | "sh" if "-c" in arguments[:-1]:
                before = self.values.state.copy()
                self.walk_text(arguments[arguments.index("-c") + 1], line)
                self.values.state = before
            case _ if program not in _QUIET_COMMANDS:
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
        command = Command(line, tuple(words), exported, condition)
        self.script.commands.append(command)

    def call_one_of(self, name: str, arguments: Sequence[str]) -> None:
        """Walk through a function, or through each that the name may stand for."""
        functions = self.functions[name]
        if len(functions) == 1 and functions[0] is not None:
            self.call_function(functions[0], arguments)
            return
        for function in functions:
            if function is not None:
                self.call_function(function, arguments)
        doubt_all(self.values, f"depends on which `{name}` is defined")

    def call_function(self, function: Node, arguments: Sequence[str]) -> None:
        """Walk through a function of the script with its arguments: $1, $2 …

        train() {                      train 3 is called:
          local LR=$1                  1 is 3, and what 1 was outside is kept
          SEED=5                       LR is 3, and what LR was outside is kept
        }                              behind it 1 and LR are as before, and SEED is 5
        """
        if len(self.outside) >= _DEEPEST_CALL:
            return
        # Its arguments and what it declares `local` are other variables than those of the same name outside.
        values = self.values.state.values
        outside: Outside = {}
        for number in range(1, 10):
            outside[str(number)] = values.pop(str(number), None)
        for number, text in enumerate(arguments, 1):
            values[str(number)] = text
        self.outside.append(outside)
        self.walk_body(function)
        self.outside.pop()

        state = self.values.state
        for name, value in outside.items():
            state.values.pop(name, None)
            if value is not None:
                state.values[name] = value

    def walk_text(self, text: str, line: int) -> None:
        """Walk through a text that a command of this line reads as bash does."""
        line_before = self.values.line_of_text
        self.values.line_of_text = line
        self.walk_body(parsed(text))
        self.values.line_of_text = line_before

    def doubt(self, program: str, arguments: Sequence[str], line: int) -> None:
        """Name a file that the shell reads, and that is not followed."""
        self.script.unread[line] = f"{program}: what it sets is not known"
        text = " ".join(arguments)
        if not any(name in text for name in _ENVIRONMENTS):
            doubt_all(self.values, f"`{program}` may set anew (line {line})")
