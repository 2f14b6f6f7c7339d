"""What a script does in ways that are not read: variables of which nobody can be sure, and what refuses the script.

if [ -d x ]; then LR=2; fi    LR is not certain: `if`, loops, functions, groups and `&&` are not followed
read LR; (( LR /= 2 ))        refused: nobody knows what they set
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kubetune.plugins.importers.shell.statements import EXPANSION, Statement, UnreadableError

# What a value has that stands for options, and not for one value.
_OPTION = re.compile(r"(?:^|[\s\"'(])(?:--?[A-Za-z]|[+~]*[\w.]+=)")
# $((…)) and all of ${…} but ${NAME}, ${NAME[@]} and ${NAME:-default}, if they set something.
_SETTING = re.compile(
    r"(?:\$\(\(|\$\{[\w@*!#]+(?!\}|\[[@*]\]\}|:-)).*?(?:(?<![=!<>])=(?!=)|\+\+|--)", re.DOTALL
)
# Files that set what they like; in a line of their own they are followed.
SOURCES = (".", "eval", "source")
# Programs that set variables or change how a script is read, and arguments with which they do neither.
BUILTINS = {
    **dict.fromkeys(
        "alias coproc declare enable getopts let local mapfile read readarray readonly typeset unset".split(),
        "(?!)",
    ),
    "export": r"(?:\w+(?:=.*)?)*",
    "printf": r"(?![\"']?[-$]).*",
    "set": r"(?:[-+][aehmuvxCE]*o? ?(?:pipefail|errexit|nounset|xtrace)? ?)*(?:--.*)?",
    "shopt": "-[su](?: (?:nullglob|globstar|extglob|dotglob|failglob))+",
    "trap": r".*(?: (?:EXIT|0|INT|TERM|HUP|QUIT))+",
    "wait": "(?!-).*",
}
_OF_THE_SHELL = "BASHPID EPOCHSECONDS EUID GROUPS LINENO PPID RANDOM SECONDS SRANDOM UID _".split()


@dataclass
class Doubts:
    """Why values are not certain, wherever in the script they are read."""

    of_names: dict[str, str] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)  # variables that hold options, and where
    functions: dict[str, int] = field(default_factory=dict)  # with their lines


def doubts_of(statements: Sequence[Statement]) -> Doubts:
    """Return what is not certain in a script. Raise UnreadableError if nobody knows what a statement sets."""
    doubts = Doubts(dict.fromkeys(_OF_THE_SHELL, "is a variable of the shell itself"))
    for statement in statements:
        line = statement.line
        if statement.function:
            doubts.functions[statement.function] = line
        _require_read(statement)
        if statement.call:
            continue
        for name, changes, value in statement.assignments:
            if _OPTION.search(value):
                doubts.options[name] = line
            if statement.depends_on() or changes:
                how = statement.depends_on() or f"by {changes}=, which is not followed"
                doubts.of_names[name] = f"is set in line {line} {how}"
    return doubts


def _require_read(statement: Statement) -> None:
    """Raise UnreadableError if nobody knows what a statement sets."""
    program, *arguments = statement.call or [""]
    is_read = re.fullmatch(BUILTINS.get(program, ".*"), " ".join(arguments), re.DOTALL)
    words = " ".join((*statement.words, *statement.files))
    calculations = (match[0] for match in re.finditer(EXPANSION, words, re.DOTALL))
    if (
        not is_read
        or (program in SOURCES and statement.within)
        or any(_SETTING.match(text) for text in calculations)
        or any(name == "IFS" for name, _, _ in statement.assignments if not statement.call)
    ):
        shown = words[:60]
        raise UnreadableError(
            statement.line, f"`{shown}` may set variables in a way that is not read"
        )
