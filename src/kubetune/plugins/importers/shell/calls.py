"""What a script surely does: the commands that it calls, with the values of its variables. Nothing is run.

    SIZE=${SIZE:-small}           SIZE is small: a default counts if nothing sets the variable
    N=$((64 / 4))                 N is 16
    ARGS=(--lr 1e-4)              "${ARGS[@]}" is two words
    source env.sh                 no variable is certain that was set before

A variable that is not certain anywhere in the script (`doubts`) is not certain at all, and stays as `$NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kubetune.plugins.importers.shell.doubts import BUILTINS, SOURCES, Doubts, doubts_of
from kubetune.plugins.importers.shell.filler import Filler
from kubetune.plugins.importers.shell.statements import (
    Statement,
    UnreadableError,
    assignments,
    statements,
)

_QUIET = ("[", "[[", "cd", "echo", "exit", "popd", "pushd", "shift", "test", *BUILTINS, *SOURCES)
# What stands before `&&` and asks something. Other programs are taken to end well.
_ASKS = re.compile(r"(?:^|&& )(?:\[|test |grep |command |which |diff |cmp |pgrep )|\|\|")
# `--seed 1` and `trainer.seed=1` are no programs.
_ARGUMENT = re.compile(r"-|[+~]*[\w./]+=")


@dataclass(frozen=True)
class Command:
    """One command that the script calls."""

    line: int
    # NAME=value before the command counts as a word; what is not known stays as `$NAME`.
    words: tuple[str, ...]
    exported: dict[str, str]  # variables of its environment
    condition: str  # what it depends on and is not known; empty where it is surely called
    problem: str  # why its words are not all known


@dataclass
class Script:
    """What was learnt of a script."""

    doubts: Doubts
    commands: list[Command] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)  # why a variable stays as `$NAME`
    # Words of commands, with their lines.
    named: list[tuple[int, str]] = field(default_factory=list)
    moved: int = 0  # the line in which the script changes its folder
    # By line: what is not followed.
    unread: dict[int, str] = field(default_factory=dict)


def read_script(text: str) -> Script:
    """Return what a script does. Raise UnreadableError if it cannot be read."""
    listed = statements(text)
    script = Script(doubts_of(listed))
    filler = Filler(script.doubts, script.reasons, {"HOME": "~"})
    exported: set[str] = set()
    for number, statement in enumerate(listed):
        script.named += [(statement.line, filler.joined(file)) for file in statement.files]
        is_sure = not statement.depends_on()
        program, *arguments = statement.call or [""]
        if program == "export":
            exported.update(word.partition("=")[0] for word in arguments)
            # All words are filled in before any is assigned.
            filled = filler.copy()
            for name, _, value in assignments(arguments) if is_sure else ():
                filler.set(name, filled.assigned(value))
        elif program:
            _call(statement, script, filler.copy(_late(statement, listed[number:])), exported)
            if program in SOURCES:
                filler.spoil(f"may be set anew by `{program}` (line {statement.line})")
            if is_sure and (program == "exit" or "exec" in statement.words):
                break
        elif is_sure:
            for name, _, value in statement.assignments:
                filler.set(name, filler.assigned(value))
    return script


def _late(statement: Statement, following: Sequence[Statement]) -> set[str]:
    """Return the variables that are set behind a statement in a loop or a function, which may run after that."""
    if not statement.within:
        return set()
    return {assignment.name for other in following for assignment in other.assignments}


def _call(statement: Statement, script: Script, filler: Filler, exported: set[str]) -> None:
    """Keep a command that the script calls, or why it is not followed."""
    line = statement.line
    words = [word for raw in statement.call for word in filler.words(raw)] or [""]
    program = words[0]
    script.named += [(line, word) for word in words]
    if program in ("cd", "pushd", "popd"):
        script.moved = script.moved or line
    if program in SOURCES:
        script.unread[line] = f"{program}: what it sets is not known"
    if program in BUILTINS and program != statement.call[0]:
        raise UnreadableError(line, f"`{program}` stands in a variable")
    if _ARGUMENT.match(program) and not (statement.within or statement.chain):
        why = "begins a command of its own, since a backslash joins lines only as the last character of one"
        raise UnreadableError(line, f"{program} {why}")
    if program not in ("", *_QUIET) and not _ARGUMENT.match(program):
        environment = {}
        for name, _, value in statement.assignments:
            environment[name] = filler.joined(value)
            filler.set(name, environment[name])
        words = [f"{name}={value}" for name, value in environment.items()] + words
        condition = ""
        if statement.within or _ASKS.search(statement.chain):
            condition = f"stands {statement.depends_on()}"
        problem = next(filter(None, map(filler.problem, statement.call)), "")
        known = {name: filler.value(f"${name}") for name in sorted(exported & filler.values.keys())}
        script.commands.append(Command(line, tuple(words), known, condition, problem))
