"""The variables of a script of which nobody can be sure, found before it is followed.

if [ -d x ]; then LR=2; fi    LR: `if`, loops, functions, groups and `&&` are not followed
read LR                       LR: it is set by name
(( LR /= 2 ))                 LR: it is set in a calculation
declare -n other=LR           every variable: one has two names
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kubetune.plugins.importers.shell.statements import EXPANSION, Statement

_NAME = re.compile(r"[A-Za-z_]\w*")
# What a value has that stands for options, and not for one value.
_OPTION = re.compile(r"(?:^|[\s\"'(])(?:--?[A-Za-z]|[+~]*[\w.]+=)")
# NAME = 1, NAME += 1, NAME++, ++NAME; no comparison.
_CALCULATED = re.compile(
    r"(\$?\{?[A-Za-z_]\w*)\}?(?:\[[^]]*\])?\s*(?:=(?!=)|[-+*/%&|^]=|<<=|>>=|\+\+|--)"
    r"|(?:\+\+|--)\s*(\$?\{?[A-Za-z_]\w*)"
)
# $((…)) and all of ${…} but ${NAME}, ${NAME[@]} and ${NAME:-default}.
_CALCULATION = re.compile(r"\$\(\(|\$\{[\w@*!#]+(?!\}|\[[@*]\]\}|:-)")
# Signs of comparisons whose sides are calculated.
_COMPARED = frozenset("-eq -ne -lt -le -gt -ge".split())
# Programs that set the variables that they name, if their arguments begin like this.
_NAMING = {
    **dict.fromkeys(
        "declare getopts let local mapfile read readarray readonly typeset unset".split(), ""
    ),
    **dict.fromkeys(("printf", "wait"), r"[\"']?[-$]"),
}
# Programs after which nothing is certain, and the arguments with which something is.
_CHANGING = {
    "set": r"(?:[-+][aehmuvxCE]*o? ?(?:pipefail|errexit|nounset|xtrace)? ?)*(?:--.*)?",
    "shopt": r"-[su](?: (?:nullglob|globstar|extglob|dotglob|failglob|inherit_errexit|expand_aliases))+",
    "trap": r".*(?: (?:EXIT|0|INT|TERM|HUP|QUIT))+",
    # With -n a variable has a second name, with -i it is calculated.
    **dict.fromkeys(("declare", "local", "typeset"), r"(?!-\w*[in]).*"),
    "export": r"[\w ]*(?:=.*)?",
    **dict.fromkeys(("alias", "coproc", "enable"), "(?!)"),
}
# Files that set what they like.
SOURCES = (".", "eval", "source")
BUILTINS = (*_NAMING, *_CHANGING, *SOURCES)
_OF_THE_SHELL = "BASHPID EPOCHSECONDS EUID GROUPS LINENO PPID RANDOM SECONDS SRANDOM UID _"


@dataclass
class Doubts:
    """Why values are not certain."""

    of_names: dict[str, str] = field(default_factory=dict)
    of_all: str = ""
    options: dict[str, int] = field(default_factory=dict)  # variables that hold options, and where
    functions: dict[str, int] = field(default_factory=dict)  # and aliases, with their lines

    def of(self, name: str) -> str:
        """Return why the value of a variable is not certain; empty if it may be."""
        return self.of_names.get(name) or self.of_all

    def add(self, names: str, why: str) -> None:
        """Doubt all names in a text, or every variable if one of them is the value of another."""
        if "$" in names or "`" in names:
            self.of_all = self.of_all or why
        for name in _NAME.findall(names):
            self.of_names.setdefault(name, why)


def doubts_of(statements: Sequence[Statement]) -> Doubts:
    """Return what is not certain in a script, wherever it stands."""
    doubts = Doubts()
    doubts.add(_OF_THE_SHELL, "is a variable of the shell itself")
    for statement in statements:
        line = statement.line
        if not statement.call:
            _doubt_assignments(statement, doubts)
        else:
            _doubt_program(statement, doubts)
        if statement.looped:
            doubts.add(statement.looped, f"is set by a loop (line {line})")
            if _OPTION.search(" ".join(statement.files)):
                doubts.options[statement.looped] = line
        if statement.function:
            doubts.functions[statement.function] = line
        for text in _calculations(statement):
            for first, second in _CALCULATED.findall(text):
                doubts.add(first or second, f"is set in a calculation (line {line})")
    return doubts


def _doubt_assignments(statement: Statement, doubts: Doubts) -> None:
    """Doubt what assignments set that are not followed, and keep which hold options."""
    for name, changes, value in statement.assignments:
        if _OPTION.search(value):
            doubts.options[name] = statement.line
        if statement.depends_on():
            doubts.add(name, f"is set in line {statement.line} {statement.depends_on()}")
        elif changes:
            doubts.add(name, f"is added to (line {statement.line}), which is not followed")
        if name == "IFS":
            doubts.of_all = f"may be split by IFS (line {statement.line})"


def _doubt_program(statement: Statement, doubts: Doubts) -> None:
    """Doubt what a program sets or changes."""
    program, *arguments = statement.call
    told = " ".join(arguments)
    if program in _NAMING and re.match(_NAMING[program], told):
        names = [word if program == "let" else word.partition("=")[0] for word in arguments]
        # -vNAME, -raNAME
        text = re.sub(r"-\w*?[apv](?=\w)", " ", " ".join(names))
        doubts.add(text, f"is set by `{program}` (line {statement.line})")
    if program == "alias":
        doubts.functions |= dict.fromkeys(_NAME.findall(told), statement.line)
    is_harmless = re.fullmatch(_CHANGING.get(program, ".*"), told, re.DOTALL)
    # Outside of functions and loops, a file that is read is followed where it stands.
    if not is_harmless or (program in SOURCES and statement.within):
        doubts.of_all = f"may be set by `{program} {told[:60]}` (line {statement.line})"


def _calculations(statement: Statement) -> Iterator[str]:
    """Yield the parts of a statement in which a shell calculates, and those that set a default."""
    yield statement.calculation
    if not _COMPARED.isdisjoint(statement.words):
        yield " ".join(statement.words)
    for word in (*statement.words, *statement.files):
        for match in re.finditer(EXPANSION, word, re.DOTALL):
            if _CALCULATION.match(match[0]):
                yield match[0].replace(":=", "=")
