"""The walk through a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Final

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from kubetune.plugins.importers.shell.comparisons import compared, tested
from kubetune.plugins.importers.shell.nodes import first_line_of, is_known, line_of, text_of
from kubetune.plugins.importers.shell.state import (
    Choice,
    Command,
    Script,
    State,
    Value,
    Word,
    added,
    merged,
)
from kubetune.plugins.importers.shell.values import Values

_DEEPEST_CALL: Final = 20  # functions that call themselves end somewhere
_MOST_COMMANDS: Final = 10_000
_QUIET_COMMANDS: Final = ("echo", "printf", "set", "trap", "shift", "wait")
# Files and commands that set up an environment, and none of a script's own variables.
_ENVIRONMENTS: Final = ("activate", "conda", ".bashrc", ".profile", "set_env.sh", "module")
# Commands before `&&` that ask something; others prepare what follows them.
_QUESTIONS: Final = ("test", "grep", "command", "which", "type", "diff", "cmp", "pgrep")


class Walk:
    """A walk through one script."""

    def __init__(self, source: bytes) -> None:
        self.root = Parser(Language(tree_sitter_bash.language())).parse(source).root_node
        self.script = Script()
        # The home folder has one name in any shell.
        self.values = Values(State({"HOME": "~"}), source)
        self.functions: dict[str, Node] = {}
        self.conditions: list[str] = []  # around the present place, not known
        self.locals: list[
            dict[str, Value | None]
        ] = []  # of each function that is called: values outside
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

    def body(self, node: Node) -> None:
        """Walk through the statements within a node."""
        for child in node.named_children:
            self.statement(child)

    def statement(self, node: Node) -> None:
        """Walk through one statement, unless an `exit` stands before it."""
        if self.values.state.ended_by:
            return
        if node.type == "ERROR":
            self.script.unread[line_of(node)] = (
                "cannot be read as bash, so what it does is not known"
            )
            return
        if node.type in self.statements:
            self.statements[node.type](node)
        elif node.type not in ("comment", "test_command", "heredoc_body", "file_redirect", "word"):
            # Groups, and commands with redirections.
            self.body(node)

    def perhaps(self, node: Node) -> None:
        """Walk through statements that may be left out."""
        self.branches([(first_line_of(node), lambda: self.body(node)), ("", lambda: None)])

    def branches(self, branches: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Walk through branches, of which the script takes one: a condition, and the walk of what depends on it."""
        before = self.values.state
        ends = []
        for condition, walk in branches:
            self.values.state = before.copy()
            self.conditions.append(condition)
            walk()
            self.conditions.pop()
            ends.append(self.values.state)
        self.values.state = merged(before, ends)

    def assignment(self, node: Node) -> None:
        """Walk through NAME=value, NAME+=value, NAME=( … ) and NAME+=( … )."""
        target = node.child_by_field_name("name")
        if target is None or target.type != "variable_name":
            return  # one item of an array
        name = text_of(target)
        value_node = node.child_by_field_name("value")
        value: Value = ""
        if value_node is not None and value_node.type == "array":
            value = tuple(self.values.words(value_node.named_children))
        elif value_node is not None:
            value = self.values.text(value_node)
        if any(child.type == "+=" for child in node.children):
            value = added(self.values.state.values.get(name, ""), value)
        self.values.set(name, value, node)

    def declaration(self, node: Node) -> None:
        """Walk through `export`, `declare`, `local` and `readonly`."""
        exports = node.children[0].type == "export"
        is_local = self.locals and node.children[0].type in ("local", "declare", "typeset")
        for child in node.named_children:
            name_node = (
                child.child_by_field_name("name") if child.type != "variable_name" else child
            )
            if is_local and name_node is not None:
                name = text_of(name_node)
                self.locals[-1].setdefault(name, self.values.state.values.get(name))
            if child.type == "variable_assignment":
                self.assignment(child)
            if exports and name_node is not None:
                self.values.state.exported |= {text_of(name_node)}

    def unset(self, node: Node) -> None:
        """Walk through `unset NAME`."""
        for child in node.named_children:
            self.values.state.values.pop(text_of(child), None)

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
            shown = first_line_of(conditions[-1]) if conditions else ""
            self.branches([(shown, taken), (f"not {shown}", other)])
        elif holds:
            taken()
        else:
            other()

    def case_statement(self, node: Node) -> None:
        """Walk through `case`: the first branch whose pattern fits, or all where the value is not known."""
        value_node = node.child_by_field_name("value")
        value = "$" if value_node is None else self.values.text(value_node)
        branches: list[tuple[str, Callable[[], None]]] = []
        has_default = False
        for item in node.named_children:
            if item.type != "case_item":
                continue
            patterns = [
                self.values.pattern(child) for child in item.children_by_field_name("value")
            ]
            walk = self.case_item(item)
            has_default = has_default or "*" in patterns
            if not is_known(value):
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
            self.functions[text_of(name)] = body

    def for_statement(self, node: Node) -> None:
        """Walk once through a loop; its variable is known if it has one value."""
        name = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        if name is None or body is None:
            return
        words = self.values.words(node.children_by_field_name("value"))
        texts = tuple(word.text for word in words)
        if len(texts) == 1 and is_known(texts[0]):
            self.values.set(text_of(name), texts[0], node)
            self.body(body)
            return
        why = f"has several values (line {line_of(node)})"
        self.values.set(text_of(name), Choice(texts, why), node)
        self.values.state = merged(self.values.state, [self.values.state.copy(), self.after(body)])

    def after(self, body: Node) -> State:
        """Return the state behind a body that is called for certain, and may be called more than once."""
        before = self.values.state
        self.values.state = before.copy()
        self.body(body)
        after = self.values.state
        self.values.state = before
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
        before = self.values.state.copy()
        self.body(node)
        self.values.state = before

    def command(self, node: Node) -> None:
        """Walk through one command: a builtin, a function of the script, or a program."""
        nodes = [child for child in node.named_children if not child.type.endswith("redirect")]
        before = self.values.state.copy()
        words = self.values.words(nodes)
        if nodes and nodes[0].type == "variable_assignment":
            self.values.state = before
        # NAME=value before a program is its environment.
        texts = [word.text for word in words]
        while texts and re.match(r"\w+=", texts[0]):
            del texts[0]
        if not texts:
            return
        program, *arguments = texts
        if program in ("exit", "return", "exec"):
            if program == "exec":
                self.call(node, words[1:])
            self.values.state.ended_by = "return" if program == "return" else "exit"
        elif program in ("read", "mapfile"):
            for name in arguments:
                why = f"is read when the script runs (line {line_of(node)})"
                self.values.set(name, Choice((), why), node)
        elif program == "eval" and all(is_known(text) for text in arguments):
            # The same shell reads it, so what it sets stays set.
            self.values.state = self.call_text(" ".join(arguments), node)
        elif program in ("source", ".", "eval"):
            self.doubt(program, arguments, node)
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
        for name in sorted(self.values.state.exported):
            value = self.values.state.values.get(name)
            if isinstance(value, Choice):
                self.values.unclear[name] = value.why
                value = f"${name}"
            if isinstance(value, str):
                exported[name] = value
        condition = next(filter(None, reversed(self.conditions)), "")
        self.script.commands.append(Command(line_of(node), tuple(words), exported, condition))

    def call_function(self, name: str, arguments: Sequence[str]) -> None:
        """Walk through a function of the script with its arguments: $1, $2 …"""
        if len(self.locals) >= _DEEPEST_CALL:
            return
        values = self.values.state.values
        # Its arguments and what it declares `local` are other variables than those of the same name outside.
        outside = {str(number): values.pop(str(number), None) for number in range(1, 10)}
        values |= {str(number): text for number, text in enumerate(arguments, 1)}
        self.locals.append(outside)
        self.body(self.functions[name])
        self.locals.pop()
        state = self.values.state
        if state.ended_by == "return":
            state.ended_by = ""
        for variable, value in outside.items():
            state.values.pop(variable, None)
            if value is not None:
                state.values[variable] = value

    def doubt(self, program: str, arguments: Sequence[str], node: Node) -> None:
        """Take variables for not certain behind what may set any of them anew."""
        self.script.unread[line_of(node)] = f"{program}: what it sets is not known"
        if any(name in " ".join(arguments) for name in _ENVIRONMENTS):
            return
        why = f"`{program}` may set anew (line {line_of(node)})"
        values = self.values.state.values
        # HOME and a function's arguments are no variables that the script sets in a line.
        for name in self.values.state.lines.keys() & values.keys():
            value = values[name]
            if isinstance(value, str):
                values[name] = Choice((value,), why)
            elif isinstance(value, tuple):
                values[name] = tuple(Word(word.text, word.why or why) for word in value)

    def call_text(self, text: str, node: Node) -> State:
        """Walk through a text as bash would read it, and return the state behind it."""
        inner = Walk(text.encode())
        inner.values.state = self.values.state.copy()
        inner.conditions = self.conditions
        inner.body(inner.root)
        for command in inner.script.commands:
            moved = Command(line_of(node), command.words, command.exported, command.condition)
            self.script.commands.append(moved)
        self.values.unclear |= inner.values.unclear
        return inner.values.state

    def truth(self, node: Node) -> bool | None:
        """Walk through a condition, and return whether it holds; None where that is not known."""
        if node.type == "list":
            return self.truth_of_list(node)
        if node.type == "negated_command":
            holds = self.truth(node.named_children[0])
            return None if holds is None else not holds
        if node.type == "test_command":
            return tested(node.named_children[0], self.values) if node.named_children else False
        if node.type == "compound_statement" and node.children[0].type == "((":
            number = self.values.arithmetic(text_of(node)[2:-2])
            return None if number is None else number != 0
        if node.type == "command":
            words = [word.text for word in self.values.words(node.named_children)]
            if words in (["true"], [":"], ["false"]):
                return words != ["false"]
            if words[0] == "test" and len(words) == 4:
                return compared(words[1], words[2], words[3])
        self.statement(node)
        # An assignment holds. Of any other command nobody knows whether it ends well.
        return True if node.type in ("variable_assignment", "declaration_command") else None

    def truth_of_list(self, node: Node) -> bool | None:
        """Walk through `A && B` and `A || B`, and return whether it holds."""
        left, right = node.named_children[0], node.named_children[-1]
        is_and = any(child.type == "&&" for child in node.children)
        holds = self.truth(left)
        if self.values.state.ended_by:
            return None
        if holds is not None:
            return self.truth(right) if holds == is_and else holds
        # `cd work && train`: what prepares is taken to end well; its success decides no variable, though.
        condition = first_line_of(left)
        program = condition.split()[0] if condition.split() else ""
        if is_and and left.type == "command" and program not in _QUESTIONS:
            condition = ""
        if not is_and:
            condition = f"not {condition}"
        self.branches([(condition, lambda: self.statement(right)), ("", lambda: None)])
        return None
