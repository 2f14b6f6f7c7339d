"""The words and texts of a script, with the values of its variables filled in."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tree_sitter import Node

from kubetune.plugins.importers.shell.arithmetic import calculated
from kubetune.plugins.importers.shell.beyond import Doubts
from kubetune.plugins.importers.shell.nodes import is_known, joined, line_of, text_of
from kubetune.plugins.importers.shell.state import (
    ShellState,
    Value,
    Word,
    doubted,
    first_of,
    holds_options,
)

_EXPANSION = re.compile(r"\$(\w+)|\$\{(\w+)(?:(:?[-=+])(.*))?\}", re.DOTALL)
_VARIABLE = re.compile(r'"?\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})"?')
_NAME_IN_A_CALCULATION = re.compile(r"\$\{?(\w+)\}?|\b([A-Za-z_]\w*)\b")
# Escapes that mean the same in $'…' as in Python.
_PLAIN_ESCAPES = re.compile(r"(?:[ -\[\]-~]|\\[abfnrtv\\'\"])*")
# Values of these are several words if they hold blanks, and none if they are empty.
_SPLIT = ("simple_expansion", "expansion")
_BLANKS = re.compile(r"[ \t\n]+")


# {a,b} without quotes.
_BRACES = re.compile(r"(?<!\\)\{[^{}]*,[^{}]*(?<!\\)\}")


class Values:
    """Fills in what is known at one place of a script after another."""

    def __init__(self, doubts: Doubts) -> None:
        # The home folder has one name in any shell.
        self.state = ShellState({"HOME": Word("~")})
        self.doubts = doubts
        self.unclear: dict[str, str] = {}  # why a variable that stays as `$NAME` is not known

    def get(self, name: str) -> Value | None:
        """Return the value of a variable, or None if nothing sets it."""
        return self.state.values.get(name)

    def set(self, name: str, value: Value, node: Node) -> None:
        """Set a variable. One of which the script does more than is followed is not certain."""
        why = self.doubts.of(name)
        if why:
            value = doubted(value, why)
        self.state.values[name] = value
        self.state.lines[name] = line_of(node)

    def words(self, nodes: Sequence[Node]) -> list[Word]:
        """Return the words that nodes stand for; an array stands for many."""
        words: list[Word] = []
        for node in nodes:
            if node.type == "comment":
                continue
            if node.type == "command_name":
                words += self.words(node.named_children)
            elif node.type == "variable_assignment":
                words.append(Word(self.assigned_text(node)))
            else:
                words += self.words_of(node)
        return words

    def assigned_text(self, node: Node) -> str:
        """Return NAME=value before a command as text."""
        name, _, _ = text_of(node).partition("=")
        value = node.child_by_field_name("value")
        text = ""
        if value is not None:
            text = self.text(value)
        # What follows on the line may read it.
        self.set(name, Word(text), node)
        return f"{name}={text}"

    def words_of(self, node: Node) -> list[Word]:
        """Return the words of one node: "${ARGS[@]}" and $ARGS stand for many, any other for one."""
        value = self.get(_whole_variable(node))
        if isinstance(value, tuple):
            # $ARGS is the first word of an array.
            return list(value) if "[" in text_of(node) else list(value[:1])
        if value is not None and value.why and node.type != "string" and holds_options(value.text):
            return [Word(word, value.why) for word in value.text.split()]
        if _is_expanded(node):
            written = text_of(node)
            return [Word(written, f"`{written}` stands for several words of a shell")]
        return [Word(text) for text in self.split_texts(node)]

    def split_texts(self, node: Node) -> list[str]:
        """Return the words that values without quotes leave of one word.

        A="1 2"

        $A    1, 2          x$A    x1, 2          x"$A"    x1 2          $NONE    (no word)
        """
        parts = node.children if node.type == "concatenation" else [node]
        words = [""]
        written: set[int] = set()  # words that are there even if they are empty
        for part in parts:
            text = self.text(part)
            if part.type in _SPLIT and is_known(text):
                first, *others = _BLANKS.split(text)
                words[-1] += first
                words += others
            else:
                words[-1] += text
                written.add(len(words) - 1)
        return [word for number, word in enumerate(words) if word or number in written]

    def text(self, node: Node) -> str:
        """Return what a node stands for, with `$…` in it where that is not known."""
        written = text_of(node)
        match node.type:
            case "raw_string":
                return written[1:-1]
            case "ansi_c_string" if _PLAIN_ESCAPES.fullmatch(written[2:-1]):
                return written[2:-1].encode().decode("unicode_escape")
            case "string":
                return self.quoted(node)
            case "concatenation":
                return "".join(self.text(child) for child in node.children)
            case "simple_expansion" | "expansion":
                return self.expansion(node)
            case "arithmetic_expansion":
                number = self.arithmetic(written[3:-2])
                if number is not None:
                    return str(number)
            case "command_substitution":
                return self.substitution(node)
            case "word" | "number" | "extglob_pattern":
                return re.sub(r"\\(.)", r"\1", written)
        return written

    def quoted(self, node: Node) -> str:
        """Return a text in double quotes, with the spaces between its parts, which are no nodes.

        "a  $B c"   →   nodes `a`, `$B`, ` c`; the spaces before `$B` are taken from the source
        """
        source = node.text or b""
        parts = []
        start = 1
        for child in node.named_children:
            offset = child.start_byte - node.start_byte
            parts.append(joined(source[start:offset]))
            if child.type == "string_content":
                parts.append(re.sub(r"\\([$`\"\\])", r"\1", text_of(child)))
            else:
                parts.append(self.text(child))
            start = child.end_byte - node.start_byte
        parts.append(joined(source[start:-1]))
        return "".join(parts)

    def expansion(self, node: Node) -> str:
        """Return the value of $NAME, ${NAME}, ${NAME:-default} or ${NAME:=default}; others stay as they are written.

        A=1  E=

        $A           1           ${A:-2}      1          ${A:+set}    set
        ${E:-2}      2           ${E-2}       (empty)    ${E:+set}    (empty)
        ${NEW:-2}    2           ${NEW-2}     2          $NEW         $NEW
        ${A%.*}      ${A%.*}     ${M[$A]}     ${M[$A]}
        """
        written = text_of(node)
        match = _EXPANSION.fullmatch(written)
        if match is None:
            return written
        name = match[1] or match[2]
        sign = match[3] or ""
        value = first_of(self.get(name))
        if value is not None and value.why:
            return self.left_open(name, value.why)
        is_empty = value is None or (value.text == "" and sign.startswith(":"))
        if sign.endswith("+"):
            return "" if is_empty else self.operand(node)
        if sign and is_empty:
            default = self.operand(node)
            if sign.endswith("="):
                self.set(name, Word(default), node)
            return default
        if value is None:
            return written
        if "$(" in value.text:
            line = self.state.lines.get(name, 1)
            return self.left_open(name, f"is set by a command (line {line})")
        return value.text

    def left_open(self, name: str, why: str) -> str:
        """Return a variable as a script writes it, and keep why its value is not known."""
        self.unclear[name] = why
        return f"${name}"

    def operand(self, node: Node) -> str:
        """Return what stands after the operator of ${NAME:-…}."""
        parts = []
        is_behind = False
        for child in node.children[:-1]:
            if is_behind:
                parts.append(self.text(child))
            is_behind = is_behind or child.type in (":-", "-", ":=", "=", ":+", "+")
        return "".join(parts)

    def substitution(self, node: Node) -> str:
        """Return the result of $(expr 64 / $N) where N is known, and any other $(command) as it is written."""
        commands = node.named_children
        if len(commands) == 1 and commands[0].type == "command":
            texts = [word.text for word in self.words(commands[0].named_children)]
            number = calculated(" ".join(texts[1:]))
            # `expr 10/2` is a text, since its signs need spaces around them.
            is_split = all(len(text) == 1 or text.lstrip("-").isdigit() for text in texts[1:])
            if texts[0] == "expr" and number is not None and is_split:
                return str(number)
        written = text_of(node)
        if written.startswith("`"):
            return f"$({written[1:-1]})"
        return written

    def arithmetic(self, text: str) -> int | None:
        """Return the result of a calculation with whole numbers, or None where a part is not known."""

        def value_of(match: re.Match[str]) -> str:
            value = first_of(self.get(match[1] or match[2]))
            return match[0] if value is None or value.why else value.text

        return calculated(_NAME_IN_A_CALCULATION.sub(value_of, text))


def _whole_variable(node: Node) -> str:
    """Return the name in $NAME, ${NAME}, "$NAME" and "${NAME[@]}"; empty for anything else."""
    match = _VARIABLE.fullmatch(text_of(node))
    if match is None:
        return ""
    return match[1] or match[2]


def _is_expanded(node: Node) -> bool:
    """True for a word with braces that a shell makes several words of: data/{a,b}.jsonl, {1..3}."""
    parts = node.children if node.type == "concatenation" else [node]
    literal = ""
    for part in parts:
        # The parser ends a word within {$A,b} after the $.
        if part.type in ("brace_expression", "$"):
            return True
        # What is quoted, or a variable's, is not looked into.
        literal += text_of(part) if part.type == "word" else "x"
    return _BRACES.search(literal) is not None
