r"""The statements of a shell script in their order: their words as they are written, and what stands around them.

A=1; swift sft \            A=1
  --x "$A b" >log           swift sft --x "$A b", and the file log
[ -d x ] && B=2             [ -d x ]
                            B=2, behind `[ -d x ] &&`
for C in 1 2; do f; done    (nothing), a loop that sets C
                            f, within the loop
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple


class UnreadableError(ValueError):
    """A script that cannot be read."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line}: {why}")


class Assignment(NamedTuple):
    """NAME=value, NAME+=value or NAME[2]=value."""

    name: str
    changes: str  # `+` or `[2]`; empty where the value is the whole one
    value: str


@dataclass
class Statement:
    """One command, or some assignments."""

    line: int
    words: list[str] = field(default_factory=list)  # all of them, as long as it is read
    assignments: list[Assignment] = field(default_factory=list)  # that it begins with
    call: list[str] = field(default_factory=list)  # its other words
    files: list[str] = field(default_factory=list)  # that it is redirected to or from
    chain: str = ""  # what stands before it and decides whether it is called, such as `[ -d x ] &&`
    is_apart: bool = False  # in a pipeline or the background: it sets nothing for the script
    within: str = ""  # the loop, `if`, group or function around it
    function: str = ""  # the name of a function that begins here

    def depends_on(self) -> str:
        """Return what is not followed and decides whether it sets a variable; empty for a plain statement."""
        if self.within:
            return f"within {self.within}, which is not followed"
        if self.chain:
            return f"behind `{self.chain}`, which is not followed"
        return "in a pipeline, which sets nothing for the script" if self.is_apart else ""


def _brackets(opening: str, closing: str, depth: int = 3) -> str:
    """Return the pattern of brackets with brackets, quotations and comments in them."""
    inner = _brackets(opening, closing, depth - 1) if depth else "(?!)"
    quoted = r"""\\.|'[^']*'|"(?:[^"\\]|\\.)*"|(?<=\s)\#[^\n\0]*"""
    return rf"\{opening}(?:{quoted}|{inner}|[^'\"\\{opening}{closing}])*+\{closing}"


_ROUND = _brackets("(", ")")
_CURLY = _brackets("{", "}")
# $NAME, ${…}, $(…), `…`, $((…)), $1, $@
EXPANSION = rf"\$[\w\0]+|\${_CURLY}|\${_ROUND}|`[^`]*`|\$[@*\#?$!-]"
# Pieces of a word. A bracket behind `=` begins an array, and behind < or > a process.
PART = re.compile(
    rf"'[^']*'|\"(?:\\.|{EXPANSION}|[^\"\\`])*+\"|\$'(?:[^'\\]|\\.)*'|{EXPANSION}|(?:(?<==)|[<>]){_ROUND}"
    r"|(?:\\.|[^\s\\'\"`$;&|<>()])+|\$",
    re.DOTALL,
)
_TOKEN = re.compile(
    r"(?P<blank>[ \t\r][ \t\r\0]*)|(?P<comment>(?<![^\s;&|()\0])\#[^\n\0]*\0?)|(?P<unread>\(\(|\{\w+\}[<>]|\d*<<-?(?!<))"
    r"|(?P<redirection>\d*(?:<<<|[<>]&|>>|>\||<>|[<>](?!\())|&>>?)"
    rf"|(?P<word>(?:{PART.pattern})++)|(?P<end>\n|;;?&?|&&|\|\||\|&?|&|[()])",
    re.DOTALL,
)
# A line that goes on in the next one: both are one for a shell. The mark keeps the number of lines.
_CONTINUED = re.compile(r"(?<!\\)((?:\\\\)*)\\\n")
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w\0]*)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
# Programs that call the one that they name.
_PREFIXES = ("builtin", "command", "exec", "nohup")
_OPENING = {
    "if": "an `if`",
    "case": "a `case`",
    **dict.fromkeys(("for", "select", "while", "until"), "a loop"),
    **dict.fromkeys(("{", "("), "a group or a function"),
}
_CLOSING = ("fi", "esac", "done", "}")
_LEADING = ("then", "else", "elif", "do", "!", "time")


class _Splitter:
    """Splits a script, and keeps what is open at the present place."""

    def __init__(self, text: str) -> None:
        self.source = _CONTINUED.sub("\\1\0", text)
        self.statements: list[Statement] = []
        self.present = Statement(1)
        self.blocks: list[tuple[str, int]] = []  # what is open, and its line

    def split(self) -> list[Statement]:
        """Return the statements. Raise UnreadableError if something is not closed or not read."""
        place = 0
        redirection = ""
        while place < len(self.source):
            line = self.line_of(place)
            match = _TOKEN.match(self.source, place)
            if match is None:
                raise UnreadableError(line, "a quotation or a bracket is not closed")
            place = match.end()
            text = match[0]
            match match.lastgroup:
                case "word" if redirection:
                    self.present.files.append(text)
                    redirection = ""
                case "word" if text.strip("\0"):
                    if not self.present.words:
                        self.present.line = line
                    self.present.words.append(text)
                case "redirection":
                    redirection = text
                case "unread":
                    raise UnreadableError(line, f"`{text}` is not read")
                case "end":
                    self.end(text, line)
                case "comment" if text.endswith("\0"):
                    self.end("\n", line)
        self.end("\n", self.line_of(place))
        if self.blocks:
            raise UnreadableError(self.blocks[-1][1], f"{self.blocks[-1][0]} is not closed")
        return self.statements

    def line_of(self, place: int) -> int:
        """Return the line of a place, from 1."""
        before = self.source[:place]
        return 1 + before.count("\n") + before.count("\0")

    def end(self, sign: str, line: int) -> None:
        """End the present statement with a sign such as `;`, `&&` or a bracket."""
        present = self.present
        if sign == "\n" and not present.words and (present.chain or present.is_apart):
            # `A &&` goes on in the next line.
            return
        if sign == "(" and present.words and "=" not in present.words[0]:
            present.function = present.words[-1]
            present.words = []
        self.enter_blocks()
        present.is_apart |= sign in ("|", "|&", "&")
        self.statements.append(present)
        self.present = Statement(line)
        if sign in ("&&", "||"):
            self.present.chain = f"{present.chain} {' '.join(present.words)} {sign}".strip()
        self.present.is_apart = sign in ("|", "|&")
        if sign == "(":
            self.blocks.append((_OPENING["("], line))
        elif sign == ")" and not (self.blocks and self.blocks[-1][0] == _OPENING["case"]):
            # In a `case` it ends a pattern.
            self.leave(line)

    def enter_blocks(self) -> None:
        """Open and close blocks by the words that the present statement begins with."""
        present = self.present
        words = present.words
        while words:
            if words[0] in _CLOSING:
                self.leave(present.line)
                words.clear()
            elif words[0] in _OPENING:
                self.blocks.append((_OPENING[words[0]], present.line))
                if words[0] in ("for", "select"):
                    words[:] = ["", f"{' '.join(words[1:2])}={' '.join(words[3:])}"]
                elif words[0] == "case":
                    words.clear()
                del words[:1]
            elif words[0] == "function":
                present.function = words[1]
                del words[:2]
            elif words[0] in _LEADING:
                del words[0]
            else:
                break
        if self.blocks:
            what, line = self.blocks[-1]
            present.within = f"{what} (line {line})"
        present.assignments = assignments(words)
        present.call = words[len(present.assignments) :]
        while present.call and present.call[0] in _PREFIXES:
            del present.call[0]

    def leave(self, line: int) -> None:
        """Close the innermost block."""
        if not self.blocks:
            raise UnreadableError(line, "closes what is not open")
        self.blocks.pop()


def assignments(words: list[str]) -> list[Assignment]:
    """Return the assignments that words begin with."""
    listed = []
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            break
        listed.append(Assignment(match[1].replace("\0", ""), (match[2] or "") + match[3], match[4]))
    return listed


def statements(text: str) -> list[Statement]:
    """Return the statements of a script. Raise UnreadableError if it cannot be read."""
    return _Splitter(text).split()


def words_of(text: str) -> list[str]:
    """Return the words of a text, such as those between the brackets of an array."""
    return [match[0] for match in _TOKEN.finditer(text) if match.lastgroup == "word"]
