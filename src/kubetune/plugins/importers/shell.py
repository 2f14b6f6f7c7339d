"""What a shell script surely does: the commands that it calls, with the values of their variables.

Nothing is run. The script is walked as a shell would walk it, and what only a running shell can tell is marked:

    SIZE=${SIZE:-small}                       SIZE is small: a default counts where nothing sets the variable
    if [ $SIZE = small ]; then LR=2e-4; fi    LR is 2e-4: both sides are known
    if [ -d data ]; then LR=3e-4; fi          LR is 2e-4 or 3e-4: words with it keep `$LR`, and `unclear` says why
    [ -d data ] && ARGS+=(--bf16)             "${ARGS[@]}" has --bf16 as a word that is not certain
    train() { swift sft --seed $1; }          called where `train 3` stands, with 3
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

_DEEPEST_CALL: Final = 20  # functions that call themselves end somewhere
_MOST_COMMANDS: Final = 10_000
_QUIET_COMMANDS: Final = ("echo", "printf", "set", "trap", "shift", "wait")
# Commands before `&&` that ask something; others prepare what follows them.
_QUESTIONS: Final = ("test", "grep", "command", "which", "type", "diff", "cmp", "pgrep")
_NOT_KNOWN: Final = re.compile(r"[$`]")


@dataclass(frozen=True)
class Word:
    """A word of a command, filled in as far as it is known; what is not known stays as `$NAME` or `$(…)`."""

    text: str
    why: str = ""  # why it may not be there at all


@dataclass(frozen=True)
class Choice:
    """A variable that is set to different values in branches, of which the script takes one."""

    texts: tuple[str, ...]
    why: str


# An array has words.
Value = str | tuple[Word, ...] | Choice


@dataclass(frozen=True)
class Command:
    """One command that the script calls."""

    line: int
    words: tuple[Word, ...]  # NAME=value before the command counts as a word
    exported: dict[str, str]  # variables of its environment
    condition: str  # what it depends on and is not known, such as `[ -d data ]`; empty where it is surely called


@dataclass
class Script:
    """What was learnt of a script."""

    commands: list[Command] = field(default_factory=list)
    unclear: dict[str, str] = field(default_factory=dict)  # why a variable's value is not certain
    unread: dict[int, str] = field(
        default_factory=dict
    )  # by line: what the script does and is not followed


def read_script(text: str) -> Script:
    """Return the commands that a script calls, in their order."""
    walk = _Walk(text.encode())
    walk.body(walk.root)
    return walk.script


@dataclass
class _State:
    """The variables at one place of the script."""

    values: dict[str, Value] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)  # where each was set last
    exported: frozenset[str] = frozenset()
    ended_by: str = ""  # exit or return, behind which nothing is called

    def copy(self) -> _State:
        """Return a state that a branch may change."""
        return _State(dict(self.values), dict(self.lines), self.exported, self.ended_by)


class _Walk:
    """A walk through one script."""

    def __init__(self, source: bytes) -> None:
        self.root = Parser(Language(tree_sitter_bash.language())).parse(source).root_node
        self.script = Script()
        # The home folder has one name in any shell.
        self.state = _State({"HOME": "~"})
        self.functions: dict[str, Node] = {}
        self.conditions: list[str] = []  # around the present place, not known
        self.depth = 0
        self.statements: dict[str, Callable[[Node], None]] = {
            "command": self.command,
            "variable_assignment": self.assignment,
            "declaration_command": self.declaration,
            "unset_command": self.unset,
            "if_statement": self.if_statement,
            "case_statement": self.case_statement,
            "list": self.list_of_two,
            "function_definition": self.function_definition,
            "for_statement": self.for_statement,
            "c_style_for_statement": self.perhaps,
            "while_statement": self.while_statement,
            "subshell": self.subshell,
            "pipeline": self.subshell,
        }

    # Statements.

    def body(self, node: Node) -> None:
        """Walk through the statements within a node."""
        for child in node.named_children:
            self.statement(child)

    def statement(self, node: Node) -> None:
        """Walk through one statement, unless an `exit` stands before it."""
        if self.state.ended_by:
            return
        if node.type == "ERROR":
            self.script.unread[_line(node)] = "cannot be read as bash, so what it does is not known"
            return
        if node.type in self.statements:
            self.statements[node.type](node)
        elif node.type not in ("comment", "test_command", "heredoc_body", "file_redirect", "word"):
            # Groups, and commands with redirections.
            self.body(node)

    def perhaps(self, node: Node) -> None:
        """Walk through statements that may be left out."""
        self.branches([(_first_line(node), lambda: self.body(node)), ("", lambda: None)])

    def branches(self, branches: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Walk through branches, of which the script takes one: a condition, and the walk of what depends on it."""
        before = self.state
        ends = []
        for condition, walk in branches:
            self.state = before.copy()
            self.conditions.append(condition)
            walk()
            self.conditions.pop()
            ends.append(self.state)
        self.state = self.merged(before, ends)

    def merged(self, before: _State, ends: Sequence[_State]) -> _State:
        """Return what is known behind branches. One that ends the script says nothing of what follows."""
        alive = [state for state in ends if not state.ended_by]
        if not alive:
            return ends[0]
        merged = before.copy()
        merged.exported = frozenset().union(*(state.exported for state in alive))
        for name in dict.fromkeys(name for state in alive for name in state.values):
            values = [state.values.get(name) for state in alive]
            if all(value == values[0] for value in values) and values[0] is not None:
                merged.values[name] = values[0]
                continue
            lines = sorted({state.lines[name] for state in alive if name in state.lines})
            where = f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"
            merged.values[name] = _choice(values, f"is set in branches ({where})")
            merged.lines[name] = lines[-1]
        return merged

    def set(self, name: str, value: Value, node: Node) -> None:
        """Set a variable."""
        self.state.values[name] = value
        self.state.lines[name] = _line(node)

    def assignment(self, node: Node) -> None:
        """Walk through NAME=value, NAME+=value, NAME=( … ) and NAME+=( … )."""
        target = node.child_by_field_name("name")
        if target is None or target.type != "variable_name":
            return  # one item of an array
        name = _text(target)
        value_node = node.child_by_field_name("value")
        value: Value = ""
        if value_node is not None and value_node.type == "array":
            value = tuple(self.words(value_node.named_children))
        elif value_node is not None:
            value = self.text(value_node)
        if any(child.type == "+=" for child in node.children):
            value = _added(self.state.values.get(name, ""), value)
        self.set(name, value, node)

    def declaration(self, node: Node) -> None:
        """Walk through `export`, `declare`, `local` and `readonly`."""
        exports = node.children[0].type == "export"
        for child in node.named_children:
            name_node = (
                child.child_by_field_name("name") if child.type != "variable_name" else child
            )
            if child.type == "variable_assignment":
                self.assignment(child)
            if exports and name_node is not None:
                self.state.exported |= {_text(name_node)}

    def unset(self, node: Node) -> None:
        """Walk through `unset NAME`."""
        for child in node.named_children:
            self.state.values.pop(_text(child), None)

    def if_statement(self, node: Node) -> None:
        """Walk through `if`, `elif` and `else`: the branch that is taken, or all of them where that is not known."""
        conditions = []
        statements: list[Node] = []
        rest: list[Node] = []
        is_condition = True
        for child in node.children:
            if child.type == "then":
                is_condition = False
            elif child.type in ("elif_clause", "else_clause"):
                rest.append(child)
            elif child.is_named and is_condition:
                conditions.append(child)
            elif child.is_named:
                statements.append(child)
        self.either(conditions, statements, rest)

    def either(self, conditions: list[Node], statements: list[Node], rest: list[Node]) -> None:
        """Walk through `if CONDITIONS; then STATEMENTS`, and through the clauses behind it where these do not hold."""
        holds = None
        for condition in conditions:
            holds = self.truth(condition)

        def taken() -> None:
            for statement in statements:
                self.statement(statement)

        def other() -> None:
            if not rest:
                return
            clause, *others = rest
            if clause.type == "else_clause":
                self.body(clause)
                return
            split = [child.type for child in clause.children].index("then")
            first = [child for child in clause.children[:split] if child.is_named]
            then = [child for child in clause.children[split:] if child.is_named]
            self.either(first, then, others)

        if holds is None:
            shown = _first_line(conditions[-1]) if conditions else ""
            self.branches([(shown, taken), (f"not {shown}", other)])
        elif holds:
            taken()
        else:
            other()

    def case_statement(self, node: Node) -> None:
        """Walk through `case`: the first branch whose pattern fits, or all where the value is not known."""
        value_node = node.child_by_field_name("value")
        value = "$" if value_node is None else self.text(value_node)
        branches: list[tuple[str, Callable[[], None]]] = []
        has_default = False
        for item in node.named_children:
            if item.type != "case_item":
                continue
            patterns = [self.pattern(child) for child in item.children_by_field_name("value")]
            walk = self.case_item(item)
            has_default = has_default or "*" in patterns
            if not _is_known(value):
                branches.append((f"case {value} in {'|'.join(patterns)}", walk))
            elif any(fnmatchcase(value, pattern) for pattern in patterns):
                walk()
                return
        if branches and not has_default:
            branches.append(("", lambda: None))
        if branches:
            self.branches(branches)

    def case_item(self, item: Node) -> Callable[[], None]:
        """Return the walk of a branch of `case`."""
        patterns = item.children_by_field_name("value")

        def walk() -> None:
            for child in item.named_children:
                if child not in patterns:
                    self.statement(child)

        return walk

    def list_of_two(self, node: Node) -> None:
        """Walk through `A && B` and `A || B`."""
        self.truth(node)

    def function_definition(self, node: Node) -> None:
        """Keep a function for its calls."""
        name = node.child_by_field_name("name")
        body = node.child_by_field_name("body")
        if name is not None and body is not None:
            self.functions[_text(name)] = body

    def for_statement(self, node: Node) -> None:
        """Walk once through a loop; its variable is known if it has one value."""
        name = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        if name is None or body is None:
            return
        words = self.words(node.children_by_field_name("value"))
        texts = tuple(word.text for word in words)
        if len(texts) == 1 and _is_known(texts[0]):
            self.set(_text(name), texts[0], node)
            self.body(body)
            return
        why = f"has several values (line {_line(node)})"
        self.set(_text(name), Choice(texts, why), node)
        self.state = self.merged(self.state, [self.state.copy(), self.after(body)])

    def after(self, body: Node) -> _State:
        """Return the state behind a body that is called for certain, and may be called more than once."""
        before = self.state
        self.state = before.copy()
        self.body(body)
        after = self.state
        self.state = before
        return after

    def while_statement(self, node: Node) -> None:
        """Walk once through a loop, which may be left out unless its condition is `true`."""
        body = node.child_by_field_name("body")
        condition = node.child_by_field_name("condition")
        if body is None or condition is None:
            return
        holds = self.truth(condition)
        if node.children[0].type == "until" and holds is not None:
            holds = not holds
        if holds:
            self.body(body)
        elif holds is None:
            self.perhaps(body)

    def subshell(self, node: Node) -> None:
        """Walk through ( … ) or A | B; what they set is gone behind them."""
        before = self.state.copy()
        self.body(node)
        self.state = before

    def command(self, node: Node) -> None:
        """Walk through one command: a builtin, a function of the script, or a program."""
        nodes = [child for child in node.named_children if not child.type.endswith("redirect")]
        before = self.state.copy()
        words = self.words(nodes)
        if nodes and nodes[0].type == "variable_assignment":
            self.state = before
        programs = [word.text for word in words if not re.match(r"\w+=", word.text)]
        if not programs:
            return
        program, *arguments = programs
        if program in ("exit", "return", "exec"):
            if program == "exec":
                self.call(node, words[1:])
            self.state.ended_by = "return" if program == "return" else "exit"
        elif program in ("source", ".", "eval", "read", "mapfile"):
            self.script.unread[_line(node)] = f"{program}: what it sets is not known"
            for name in arguments if program in ("read", "mapfile") else ():
                self.set(
                    name, Choice((), f"is read when the script runs (line {_line(node)})"), node
                )
        elif program in self.functions:
            self.call_function(program, arguments)
        elif program in ("bash", "sh") and "-c" in arguments[:-1]:
            self.call_text(arguments[arguments.index("-c") + 1], node)
        elif program not in _QUIET_COMMANDS:
            self.call(node, words)

    def call(self, node: Node, words: Sequence[Word]) -> None:
        """Keep a program that the script calls."""
        if len(self.script.commands) >= _MOST_COMMANDS:
            return
        exported = {}
        for name in sorted(self.state.exported):
            value = self.state.values.get(name)
            if isinstance(value, Choice):
                self.script.unclear[name] = value.why
                value = f"${name}"
            if isinstance(value, str):
                exported[name] = value
        condition = next(filter(None, reversed(self.conditions)), "")
        self.script.commands.append(Command(_line(node), tuple(words), exported, condition))

    def call_function(self, name: str, arguments: Sequence[str]) -> None:
        """Walk through a function of the script with its arguments: $1, $2 …"""
        if self.depth >= _DEEPEST_CALL:
            return
        numbers = {str(number): text for number, text in enumerate(arguments, 1)}
        outside = {key: self.state.values.get(key) for key in map(str, range(1, 10))}
        for key in outside:
            self.state.values.pop(key, None)
        self.state.values |= numbers
        self.depth += 1
        self.body(self.functions[name])
        self.depth -= 1
        if self.state.ended_by == "return":
            self.state.ended_by = ""
        for key, value in outside.items():
            self.state.values.pop(key, None)
            if value is not None:
                self.state.values[key] = value

    def call_text(self, text: str, node: Node) -> None:
        """Walk through `bash -c TEXT`."""
        inner = _Walk(text.encode())
        inner.state = self.state.copy()
        inner.conditions = self.conditions
        inner.body(inner.root)
        for command in inner.script.commands:
            moved = Command(_line(node), command.words, command.exported, command.condition)
            self.script.commands.append(moved)
        self.script.unclear |= inner.script.unclear

    # Conditions.

    def truth(self, node: Node) -> bool | None:
        """Walk through a condition, and return whether it holds; None where that is not known."""
        if node.type == "list":
            return self.truth_of_list(node)
        if node.type == "negated_command":
            holds = self.truth(node.named_children[0])
            return None if holds is None else not holds
        if node.type == "test_command":
            return self.tested(node.named_children[0]) if node.named_children else False
        if node.type == "compound_statement" and node.children[0].type == "((":
            number = self.arithmetic(_text(node)[2:-2])
            return None if number is None else number != 0
        if node.type == "command":
            words = [word.text for word in self.words(node.named_children)]
            if words in (["true"], [":"], ["false"]):
                return words != ["false"]
            if words[0] == "test" and len(words) == 4:
                return _compared(words[1], words[2], words[3])
        self.statement(node)
        # An assignment holds. Of any other command nobody knows whether it ends well.
        return True if node.type in ("variable_assignment", "declaration_command") else None

    def truth_of_list(self, node: Node) -> bool | None:
        """Walk through `A && B` and `A || B`, and return whether it holds."""
        left, right = node.named_children[0], node.named_children[-1]
        is_and = any(child.type == "&&" for child in node.children)
        holds = self.truth(left)
        if self.state.ended_by:
            return None
        if holds is not None:
            return self.truth(right) if holds == is_and else holds
        # `cd work && train`: what prepares is taken to end well; its success decides no variable, though.
        condition = _first_line(left)
        program = condition.split()[0] if condition.split() else ""
        if is_and and left.type == "command" and program not in _QUESTIONS:
            condition = ""
        if not is_and:
            condition = f"not {condition}"
        self.branches([(condition, lambda: self.statement(right)), ("", lambda: None)])
        return None

    def tested(self, node: Node) -> bool | None:
        """Return whether what stands in [ … ] or [[ … ]] holds; None where that is not known."""
        if node.type == "parenthesized_expression":
            return self.tested(node.named_children[0])
        if node.type == "unary_expression":
            return self.tested_alone(node)
        if node.type != "binary_expression":
            text = self.text(node)
            return bool(text) if _is_known(text) else None
        # `[ -z $A -a -z $B ]` is parsed with the operator within the left side: that is not followed.
        left, right = node.named_children[0], node.named_children[-1]
        sign_node = node.child_by_field_name("operator")
        sign = "" if sign_node is None else _text(sign_node)
        if sign in ("&&", "||", "-a", "-o"):
            is_and = sign in ("&&", "-a")
            sides = (self.tested(left), self.tested(right))
            if (not is_and) in sides:
                return not is_and
            return None if None in sides else is_and
        if right.type in ("extglob_pattern", "regex"):
            return _matches(self.text(left), sign, self.pattern(right))
        return _compared(self.text(left), sign, self.text(right))

    def tested_alone(self, node: Node) -> bool | None:
        """Return whether `! …`, `-z TEXT` or `-n TEXT` holds."""
        sign = _text(node.children[0])
        value = node.named_children[-1]
        if sign == "!":
            holds = self.tested(value)
            return None if holds is None else not holds
        text = self.text(value)
        if sign not in ("-z", "-n") or not _is_known(text):
            return None
        return (text == "") == (sign == "-z")

    # Values.

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
            self.set(_text(name), text, node)
        return f"{'' if name is None else _text(name)}={text}"

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
        if node.type in ("simple_expansion", "expansion") and _is_known(text):
            return [Word(word) for word in text.split()]
        return [Word(text)]

    def pattern(self, node: Node) -> str:
        """Return a pattern of `case` or `[[ … ]]`."""
        return _text(node) if node.type in ("extglob_pattern", "regex") else self.text(node)

    def text(self, node: Node) -> str:
        """Return what a node stands for, with `$…` in it where that is not known."""
        match node.type:
            case "raw_string":
                return _text(node)[1:-1]
            case "ansi_c_string":
                return _text(node)[2:-1].encode().decode("unicode_escape")
            case "string":
                return self.quoted(node)
            case "concatenation":
                return "".join(self.text(child) for child in node.children)
            case "simple_expansion" | "expansion":
                return self.expansion(node)
            case "arithmetic_expansion":
                number = self.arithmetic(_text(node)[3:-2])
                return _text(node) if number is None else str(number)
            case "command_substitution":
                return self.substitution(node)
            case "word" | "number" | "extglob_pattern":
                return re.sub(r"\\\n", "", re.sub(r"\\([^\n])", r"\1", _text(node)))
        return _text(node)

    def quoted(self, node: Node) -> str:
        """Return a text in double quotes, with the spaces between its parts."""
        parts = []
        start = node.start_byte + 1
        for child in node.named_children:
            parts.append(self.between(start, child.start_byte))
            if child.type == "string_content":
                parts.append(re.sub(r"\\([$`\"\\\n])", r"\1", _text(child)))
            else:
                parts.append(self.text(child))
            start = child.end_byte
        parts.append(self.between(start, node.end_byte - 1))
        return "".join(parts)

    def between(self, start: int, end: int) -> str:
        """Return the source between two parts of a text."""
        source = self.root.text or b""
        offset = self.root.start_byte
        return source[start - offset : end - offset].decode()

    def expansion(self, node: Node) -> str:
        """Return the value of $NAME, ${NAME}, ${NAME:-default} or ${NAME:=default}; others stay as they are written."""
        written = _text(node)
        match = re.fullmatch(r"\$(\w+)|\$\{(\w+)(?:(:?[-=+])(.*))?\}", written, re.DOTALL)
        if match is None:
            return written
        name = match[1] or match[2]
        sign = match[3] or ""
        value = self.state.values.get(name)
        if isinstance(value, Choice):
            self.script.unclear[name] = value.why
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
            self.script.unclear[name] = (
                f"is set by a command (line {self.state.lines.get(name, 1)})"
            )
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
        written = _text(node)
        return f"$({written[1:-1]})" if written.startswith("`") else written

    def arithmetic(self, text: str) -> int | None:
        """Return the result of a calculation with whole numbers, or None where a part is not known."""

        def value_of(match: re.Match[str]) -> str:
            value = self.state.values.get(match[1] or match[2])
            return value if isinstance(value, str) else match[0]

        filled = re.sub(r"\$\{?(\w+)\}?|\b([A-Za-z_]\w*)\b", value_of, text)
        # The shell's words for and, or, not are not Python's.
        filled = filled.replace("&&", " and ").replace("||", " or ")
        filled = re.sub(r"!(?!=)", " not ", filled)
        try:
            return _calculated(ast.parse(filled.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ArithmeticError, RecursionError):
            return None


def _choice(values: Sequence[Value | None], why: str) -> Value:
    """Return the value of a variable that branches set differently.

    (--a 1), (--a 1 --b 2)   →   --a 1, and --b 2 which may not be there
    """
    if not any(isinstance(value, tuple) for value in values):
        texts: list[str] = []
        for value in values:
            texts += value.texts if isinstance(value, Choice) else [str(value or "")]
        return Choice(tuple(dict.fromkeys(texts)), why)
    lists = [value if isinstance(value, tuple) else () for value in values]
    same = 0
    while all(len(words) > same and words[same] == lists[0][same] for words in lists):
        same += 1
    rest = {}
    for words in lists:
        rest[words[same:]] = [Word(word.text, word.why or why) for word in words[same:]]
    return (*lists[0][:same], *(word for words in rest.values() for word in words))


def _added(earlier: Value, value: Value) -> Value:
    """Return the value of NAME+=value."""
    if isinstance(value, tuple):
        first = (Word(earlier),) if isinstance(earlier, str) and earlier else ()
        return (*(earlier if isinstance(earlier, tuple) else first), *value)
    if isinstance(earlier, Choice):
        return Choice(tuple(f"{text}{value}" for text in earlier.texts), earlier.why)
    if isinstance(earlier, tuple):
        return earlier
    return f"{earlier}{value}"


def _holds_options(value: Choice) -> bool:
    """Return True if a variable stands for options, such as `--bf16 true`, rather than for one value."""
    return any(text.lstrip().startswith("-") and not _is_number(text) for text in value.texts)


def _is_number(text: str) -> bool:
    """Return True for -1 and 1e-4."""
    return re.fullmatch(r"-?[\d.]+(e-?\d+)?", text) is not None


def _whole_variable(node: Node) -> str:
    """Return the name in $NAME, ${NAME}, "$NAME" and "${NAME[@]}"; empty for anything else."""
    match = re.fullmatch(r'"?\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})"?', _text(node))
    return (match[1] or match[2]) if match else ""


def _compared(left: str, sign: str, right: str) -> bool | None:
    """Return whether a comparison of texts or numbers holds; None where a side is not known."""
    if not _is_known(left) or not _is_known(right):
        return None
    if sign in ("=", "==", "!="):
        return (left == right) == (sign != "!=")
    signs = {
        "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
        "-ge": operator.ge,
    }  # fmt: skip
    if sign in signs and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
        return bool(signs[sign](int(left), int(right)))
    return None


def _matches(left: str, sign: str, pattern: str) -> bool | None:
    """Return whether a text fits a pattern of [[ … ]]; None where that is not known."""
    if not _is_known(left) or not _is_known(pattern) or sign not in ("=", "==", "!="):
        return None
    return fnmatchcase(left, pattern) == (sign != "!=")


_OPERATIONS: Final[dict[type[ast.AST], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # A shell divides towards zero.
    ast.Div: lambda left, right: int(left / right),
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _calculated(node: ast.expr) -> int:
    """Return the value of a calculation. Raise ValueError for anything else."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_calculated(left), _calculated(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATIONS:
            return int(_OPERATIONS[type(op)](_calculated(left), _calculated(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_calculated(operand)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _calculated(operand))
        case ast.BoolOp(op=op, values=values):
            results = [bool(_calculated(value)) for value in values]
            return int(all(results) if isinstance(op, ast.And) else any(results))
    raise ValueError(ast.dump(node))


def _is_known(text: str) -> bool:
    """Return True if a text has nothing in it that only a running shell knows."""
    return _NOT_KNOWN.search(text) is None


def _text(node: Node) -> str:
    """Return the source of a node."""
    return (node.text or b"").decode()


def _line(node: Node) -> int:
    """Return the line in which a node begins, from 1."""
    return node.start_point.row + 1


def _first_line(node: Node) -> str:
    """Return the first line of a node's source, shortened."""
    return _text(node).partition("\n")[0][:80]
