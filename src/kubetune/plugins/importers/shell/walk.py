"""The walk through a script: statements, branches and loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tree_sitter import Node

from kubetune.plugins.importers.shell.assignments import assign, declare, unset
from kubetune.plugins.importers.shell.beyond import Doubts
from kubetune.plugins.importers.shell.calls import Calls
from kubetune.plugins.importers.shell.comparisons import fits_pattern, negated, tested
from kubetune.plugins.importers.shell.nodes import field_of, first_line_of, is_known
from kubetune.plugins.importers.shell.state import Alternatives, Script, ShellState, merged
from kubetune.plugins.importers.shell.values import Values

# Commands before `&&` that ask something; others prepare what follows them.
_QUESTIONS: Final = ("test", "grep", "command", "which", "type", "diff", "cmp", "pgrep")
_LEAVING: Final = ("break", "continue")
_SILENT: Final = ("comment", "test_command", "heredoc_body", "file_redirect", "word")
# A condition that is not known, and the walk of what depends on it.
Branch = tuple[str, Callable[[], None]]
# The conditions of an `if` or `elif`, and its statements; `else` has no conditions.
Clause = tuple[list[Node], list[Node]]


class Walk:
    """A walk through one script.

    It goes through the statements in the order in which a shell runs them. `values` says what is known of the variables
    at the present place, and `calls` keeps the commands that are met. A branch of which nobody knows whether it is taken
    is walked through with a copy of the variables, and what the copies say is merged behind it.
    """

    def __init__(self, doubts: Doubts) -> None:
        self.script = Script()
        # The home folder has one name in any shell.
        self.values = Values(ShellState({"HOME": "~"}))
        self.values.doubts = doubts
        # States in which a branch has left a function or a loop that goes on elsewhere.
        self.left: list[ShellState] = []
        self.calls = Calls(self.script, self.values, self.function_body)

    def body(self, node: Node) -> None:
        """Walk through the statements within a node."""
        self.all(node.named_children)

    def all(self, nodes: Sequence[Node]) -> None:
        """Walk through statements."""
        for node in nodes:
            self.statement(node)

    def statement(self, node: Node) -> None:
        """Walk through one statement, unless an `exit` stands before it."""
        if self.values.state.ended_by:
            return
        behind = node.next_sibling
        if behind is not None and behind.type == "&":
            # Another process, which sets nothing here.
            before = self.values.state.copy()
            self.statement_itself(node)
            self.values.state = before
            return
        self.statement_itself(node)

    def statement_itself(self, node: Node) -> None:
        """Walk through one statement."""
        match node.type:
            case "command":
                self.calls.command(node)
            case "variable_assignment":
                assign(node, self.values)
            case "declaration_command":
                declare(node, self.values, self.calls.outside)
            case "unset_command":
                for name in unset(node, self.values):
                    self.calls.functions.pop(name, None)
            case "if_statement":
                self.if_statement(node)
            case "case_statement":
                self.case_statement(node)
            case "list":
                self.truth_of_list(node)
            case "function_definition":
                self.calls.define(field_of(node, "name"), node)
            case "for_statement":
                self.for_statement(node)
            case "while_statement":
                self.while_statement(node)
            case "c_style_for_statement":
                self.perhaps(node)
            case "subshell" | "pipeline":
                self.subshell(node)
            case "ERROR":
                why = "cannot be read as bash, so what it does is not known"
                self.script.unread[self.values.line_of(node)] = why
            case other if other not in _SILENT:
                # Groups, and commands with redirections.
                self.body(node)

    def subshell(self, node: Node) -> None:
        """Walk through ( … ) or A | B; what they set is gone behind them."""
        before = self.values.state.copy()
        self.body(node)
        self.values.state = before

    def function_body(self, node: Node) -> None:
        """Walk through a function. Behind it the variables are as one of its ends leaves them."""
        self.until_left(node, ("return",))

    def until_left(self, node: Node, ways: Sequence[str]) -> None:
        """Walk through statements that may be left early, by `return`, or by `break` or `continue`."""
        before = self.values.state.copy()
        outside, self.left = self.left, []
        self.body(node)
        ends = [self.values.state]
        for state in self.left:
            if state.ended_by in ways:
                ends.append(state)
            else:
                outside.append(state)
        self.left = outside
        for state in ends:
            if state.ended_by in ways:
                state.ended_by = ""
        self.values.state = merged(before, ends) if len(ends) > 1 else ends[0]

    def branches(self, branches: Sequence[Branch]) -> None:
        """Walk through branches, of which the script takes one.

        The condition of a branch that is certain to be walked through, such as the statements behind a loop, is empty:
        commands in it are called for certain.
        """
        before = self.values.state
        ends = []
        for condition, walk in branches:
            self.values.state = before.copy()
            self.calls.conditions.append(condition)
            walk()
            self.calls.conditions.pop()
            ends.append(self.values.state)
        self.left += [state for state in ends if state.ended_by not in ("", "exit")]
        self.values.state = merged(before, ends)

    def perhaps(self, node: Node) -> None:
        """Walk through statements that may be left out."""
        self.branches([(first_line_of(node), lambda: self.body(node)), _NOTHING])

    def if_statement(self, node: Node) -> None:
        """Walk through `if`, `elif` and `else`: the branch that is taken, or all of them where that is not known."""
        clauses = [_clause(node)]
        for child in node.named_children:
            if child.type == "elif_clause":
                clauses.append(_clause(child))
            elif child.type == "else_clause":
                clauses.append(([], child.named_children))
        self.first_of(clauses)

    def first_of(self, clauses: Sequence[Clause]) -> None:
        """Walk through the first clause whose conditions hold.

        if A; then X; elif B; then Y; else Z; fi

        A holds            X
        A does not hold    first_of([B: Y, Z])
        A is not known     branches(X, first_of([B: Y, Z]))
        """
        if not clauses:
            return
        conditions, statements = clauses[0]
        holds: bool | None = True
        for condition in conditions:
            holds = self.truth(condition)
        if holds:
            self.all(statements)
        elif holds is False:
            self.first_of(clauses[1:])
        else:
            shown = first_line_of(conditions[-1])
            taken = (shown, lambda: self.all(statements))
            others = (f"not {shown}", lambda: self.first_of(clauses[1:]))
            self.branches([taken, others])

    def case_statement(self, node: Node) -> None:
        """Walk through `case`: the first branch whose pattern fits, or all where the value is not known."""
        value = "".join(map(self.values.text, node.children_by_field_name("value")))
        branches: list[Branch] = []
        has_default = False
        for item in node.named_children:
            if item.type != "case_item":
                continue
            pattern_nodes = item.children_by_field_name("value")
            patterns = [self.values.pattern(child) for child in pattern_nodes]
            has_default = has_default or "*" in patterns
            walk = self.walk_behind(item, pattern_nodes)
            fits = [fits_pattern(value, pattern) for pattern in patterns]
            if True in fits and not branches:
                walk()
                return
            if True in fits or None in fits:
                branches.append((f"case {value} in {'|'.join(patterns)}", walk))
            if True in fits:
                has_default = True
                break
        if branches and not has_default:
            branches.append(_NOTHING)
        if branches:
            self.branches(branches)

    def walk_behind(self, item: Node, patterns: Sequence[Node]) -> Callable[[], None]:
        """Return the walk of a branch of `case`."""
        statements = [child for child in item.named_children if child not in patterns]
        return lambda: self.all(statements)

    def for_statement(self, node: Node) -> None:
        """Walk once through a loop; its variable is known if it has one value."""
        name = field_of(node, "variable")
        body = node.child_by_field_name("body")
        if body is None:
            return
        words = self.values.words(node.children_by_field_name("value"))
        texts = tuple(word.text for word in words)
        if len(texts) == 1 and is_known(texts[0]):
            self.values.set(name, texts[0], node)
            self.until_left(body, _LEAVING)
            return
        why = f"has several values (line {self.values.line_of(node)})"
        self.values.set(name, Alternatives(texts, why), node)
        # What it calls is called for certain, and what it sets may be set more than once.
        self.branches([_NOTHING, ("", lambda: self.until_left(body, _LEAVING))])

    def while_statement(self, node: Node) -> None:
        """Walk once through a loop, which may be left out unless its condition is `true`."""
        body = node.child_by_field_name("body")
        condition = node.child_by_field_name("condition")
        if body is None or condition is None:
            return
        holds = self.truth(condition)
        if node.children[0].type == "until":
            holds = negated(holds)
        if holds:
            self.until_left(body, _LEAVING)
        elif holds is None:
            shown = first_line_of(body)
            self.branches([(shown, lambda: self.until_left(body, _LEAVING)), _NOTHING])

    def truth(self, node: Node) -> bool | None:
        """Walk through a condition, and return whether it holds; None where that is not known."""
        if node.type == "list":
            return self.truth_of_list(node)
        if node.type == "negated_command":
            return negated(self.truth(node.named_children[0]))
        holds = tested(node, self.values)
        if holds is None:
            self.statement(node)
        # An assignment holds. Of any other command nobody knows whether it ends well.
        if node.type in ("variable_assignment", "declaration_command"):
            return True
        return holds

    def truth_of_list(self, node: Node) -> bool | None:
        """Walk through `A && B` and `A || B`, and return whether it holds.

        [ a = a ] && X        A holds: X is walked through, and decides
        [ a = b ] && X        A does not hold: X is not walked through
        [ -d data ] && X      not known: X is a branch
        cd work && X          not known, but taken to end well: X is called for certain
        """
        left = node.named_children[0]
        right = node.named_children[-1]
        is_and = any(child.type == "&&" for child in node.children)
        holds = self.truth(left)
        if self.values.state.ended_by:
            return None
        if holds is not None and holds != is_and:
            return holds
        if holds is not None:
            return self.truth(right)
        # `cd work && train`: what prepares is taken to end well; its success decides no variable, though.
        condition = first_line_of(left)
        program = condition.partition(" ")[0]
        if not is_and:
            condition = f"not {condition}"
        elif left.type == "command" and program not in _QUESTIONS:
            condition = ""
        self.branches([(condition, lambda: self.statement(right)), _NOTHING])
        return None


def _clause(node: Node) -> Clause:
    """Return the conditions and statements of `if` or `elif`."""
    conditions: list[Node] = []
    statements: list[Node] = []
    part = conditions
    for child in node.children:
        if child.type == "then":
            part = statements
        elif child.is_named and child.type not in ("elif_clause", "else_clause"):
            part.append(child)
    return conditions, statements


def _nothing() -> None:
    """Walk through no statement."""


_NOTHING: Final[Branch] = ("", _nothing)
