"""The words and texts of a script, with the values of its variables filled in."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tree_sitter import Node

from kubetune.plugins.importers.shell.arithmetic import calculated
from kubetune.plugins.importers.shell.nodes import is_known, line_of, text_of
from kubetune.plugins.importers.shell.state import Choice, State, Value, Word


class Values:
    """Fills in what is known at one place of a script after another."""

    def __init__(self, state: State, source: bytes) -> None:
        self.state = state
        self.unclear: dict[str, str] = {}  # why a variable that stays as `$NAME` is not known
        self._source = source

    def set(self, name: str, value: Value, node: Node) -> None:
        """Set a variable."""
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
        name = node.child_by_field_name("name")
        value = node.child_by_field_name("value")
        text = "" if value is None else self.text(value)
        # What follows on the line may read it.
        if name is not None:
            self.set(text_of(name), text, node)
        return f"{'' if name is None else text_of(name)}={text}"

    def words_of(self, node: Node) -> list[Word]:
        """Return the words of one node: "${ARGS[@]}" and $ARGS stand for many, any other for one."""
        name = _whole_variable(node)
        value = self.state.values.get(name)
        is_quoted = node.type == "string"
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, Choice) and not is_quoted and _holds_options(value):
            return [Word(word, value.why) for text in value.texts for word in text.split()]
        text = self.text(node)
        # Without quotes a value with spaces is several words.
        if node.type in ("simple_expansion", "expansion") and is_known(text):
            return [Word(word) for word in text.split()]
        return [Word(text)]

    def pattern(self, node: Node) -> str:
        """Return a pattern of `case` or `[[ … ]]`."""
        return text_of(node) if node.type in ("extglob_pattern", "regex") else self.text(node)

    def text(self, node: Node) -> str:
        """Return what a node stands for, with `$…` in it where that is not known."""
        match node.type:
            case "raw_string":
                return text_of(node)[1:-1]
            case "ansi_c_string":
                return text_of(node)[2:-1].encode().decode("unicode_escape")
            case "string":
                return self.quoted(node)
            case "concatenation":
                return "".join(self.text(child) for child in node.children)
            case "simple_expansion" | "expansion":
                return self.expansion(node)
            case "arithmetic_expansion":
                number = self.arithmetic(text_of(node)[3:-2])
                return text_of(node) if number is None else str(number)
            case "command_substitution":
                return self.substitution(node)
            case "word" | "number" | "extglob_pattern":
                return re.sub(r"\\\n", "", re.sub(r"\\([^\n])", r"\1", text_of(node)))
        return text_of(node)

    def quoted(self, node: Node) -> str:
        """Return a text in double quotes, with the spaces between its parts."""
        parts = []
        start = node.start_byte + 1
        for child in node.named_children:
            parts.append(self.between(start, child.start_byte))
            if child.type == "string_content":
                parts.append(re.sub(r"\\([$`\"\\\n])", r"\1", text_of(child)))
            else:
                parts.append(self.text(child))
            start = child.end_byte
        parts.append(self.between(start, node.end_byte - 1))
        return "".join(parts)

    def between(self, start: int, end: int) -> str:
        """Return the source between two parts of a text."""
        return self._source[start:end].decode()

    def expansion(self, node: Node) -> str:
        """Return the value of $NAME, ${NAME}, ${NAME:-default} or ${NAME:=default}; others stay as they are written."""
        written = text_of(node)
        match = re.fullmatch(r"\$(\w+)|\$\{(\w+)(?:(:?[-=+])(.*))?\}", written, re.DOTALL)
        if match is None:
            return written
        name = match[1] or match[2]
        sign = match[3] or ""
        value = self.state.values.get(name)
        if isinstance(value, Choice):
            self.unclear[name] = value.why
            return f"${name}"
        if isinstance(value, tuple):
            return value[0].text if value else ""
        is_empty = value is None or (value == "" and sign.startswith(":"))
        if sign.endswith("+"):
            return "" if is_empty else self.operand(node)
        if sign and is_empty:
            default = self.operand(node)
            if sign.endswith("="):
                self.set(name, default, node)
            return default
        if value is not None and "$(" in value and not value.startswith("$(expr "):
            self.unclear[name] = f"is set by a command (line {self.state.lines.get(name, 1)})"
            return f"${name}"
        return written if value is None else value

    def operand(self, node: Node) -> str:
        """Return what stands behind the operator of ${NAME:-…}."""
        parts = []
        is_behind = False
        for child in node.children[:-1]:
            if is_behind:
                parts.append(self.text(child))
            is_behind = is_behind or child.type in (":-", "-", ":=", "=", ":+", "+")
        return "".join(parts)

    def substitution(self, node: Node) -> str:
        """Return $(command) as it is written, but $(expr 64 / $N) with the values that are known."""
        commands = node.named_children
        if len(commands) == 1 and commands[0].type == "command":
            words = [word.text for word in self.words(commands[0].named_children)]
            if words[:1] == ["expr"]:
                return f"$({' '.join(words)})"
        written = text_of(node)
        return f"$({written[1:-1]})" if written.startswith("`") else written

    def arithmetic(self, text: str) -> int | None:
        """Return the result of a calculation with whole numbers, or None where a part is not known."""

        def value_of(match: re.Match[str]) -> str:
            value = self.state.values.get(match[1] or match[2])
            return value if isinstance(value, str) else match[0]

        return calculated(re.sub(r"\$\{?(\w+)\}?|\b([A-Za-z_]\w*)\b", value_of, text))


def _holds_options(value: Choice) -> bool:
    """Return True if a variable stands for options, such as `--bf16 true`, rather than for one value."""
    return any(text.lstrip().startswith("-") and not _is_number(text) for text in value.texts)


def _is_number(text: str) -> bool:
    """Return True for -1 and 1e-4."""
    return re.fullmatch(r"-?[\d.]+(e-?\d+)?", text) is not None


def _whole_variable(node: Node) -> str:
    """Return the name in $NAME, ${NAME}, "$NAME" and "${NAME[@]}"; empty for anything else."""
    match = re.fullmatch(r'"?\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})"?', text_of(node))
    return (match[1] or match[2]) if match else ""
