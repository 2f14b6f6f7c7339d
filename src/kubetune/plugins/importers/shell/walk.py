"""The walk through a script: its statements in their order, and its branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tree_sitter import Node

from kubetune.plugins.importers.shell.beyond import NOT_FOLLOWED
from kubetune.plugins.importers.shell.commands import Commands
from kubetune.plugins.importers.shell.comparisons import negated, tested
from kubetune.plugins.importers.shell.nodes import first_line_of, is_known, line_of, text_of
from kubetune.plugins.importers.shell.script_folder import UNKNOWN
from kubetune.plugins.importers.shell.state import merged
from kubetune.plugins.importers.shell.values import Values

# Commands before `&&` that ask something; others prepare what follows them.
_QUESTIONS = ("[", "test", "grep", "command", "which", "type", "diff", "cmp", "pgrep")
_SILENT = ("comment", "test_command", "heredoc_body", "word")
# A condition that is not known, and the walk of what depends on it.
Branch = tuple[str, Callable[[], None]]
# The conditions of an `if` or `elif`, and its statements; `else` has no conditions.
Clause = tuple[list[Node], list[Node]]


class Walk:
    """A walk through one script, in the order in which a shell runs its statements.

    A branch of which nobody knows whether it is taken is walked through with a copy of the variables, and what the
    copies say is merged after it. Loops, functions and `case` are not followed: their commands count as such that may
    be called, and what they set was doubted before (`beyond`).
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self.commands = Commands(values)

    def all(self, nodes: Sequence[Node]) -> None:
        """Walk through statements."""
        for node in nodes:
            self.statement(node)

    def statement(self, node: Node) -> None:
        """Walk through one statement, unless an `exit` stands before it."""
        if self.values.state.has_ended:
            return
        after = node.next_sibling
        is_background = after is not None and after.type == "&"
        if is_background or node.type in ("subshell", "pipeline") or node.type in NOT_FOLLOWED:
            self.elsewhere(node)
        else:
            self.statement_itself(node)

    def elsewhere(self, node: Node) -> None:
        """Walk through code that sets no variable for the lines after it, such as a subshell, or is not followed."""
        before = self.values.state.copy()
        if node.type in NOT_FOLLOWED:
            self.commands.conditions.append(
                f"{NOT_FOLLOWED[node.type]} calls it (line {line_of(node)})"
            )
            self.all(node.named_children)
            self.commands.conditions.pop()
            if self.values.state.folder != before.folder:
                before.folder = UNKNOWN
        else:
            self.statement_itself(node)
        self.values.state = before

    def statement_itself(self, node: Node) -> None:
        """Walk through one statement."""
        match node.type:
            case "command":
                self.commands.follow(node)
            case "variable_assignment":
                self.commands.assign([node])
            case "declaration_command":
                self.commands.declare(node)
            case "if_statement":
                self.if_statement(node)
            case "list":
                self.truth_of_list(node)
            case "file_redirect":
                self.commands.redirect(node)
            case "ERROR":
                self.commands.doubt_all(f"depends on line {line_of(node)}, which cannot be parsed")
            case other if other not in _SILENT:
                # Groups, and commands with redirections.
                self.all(node.named_children)

    def branches(self, branches: Sequence[Branch]) -> None:
        """Walk through branches, of which the script takes one.

        The condition of a branch that is certain to be walked through, such as the statement after `cd work &&`, is
        empty: commands in it are called for certain.
        """
        before = self.values.state
        ends = []
        for condition, walk in branches:
            self.values.state = before.copy()
            self.commands.conditions.append(condition)
            walk()
            self.commands.conditions.pop()
            ends.append(self.values.state)
        self.values.state = merged(before, ends)

    def if_statement(self, node: Node) -> None:
        """Walk through `if`, `elif` and `else`: the branch that is taken, or all of them if that is not known."""
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

    def truth(self, node: Node) -> bool | None:
        """Walk through a condition, and return whether it holds; None if that is not known."""
        if node.type == "list":
            return self.truth_of_list(node)
        if node.type == "negated_command":
            return negated(self.truth(node.named_children[0]))
        holds = tested(node, self.values)
        if holds is None:
            self.statement(node)
        # A plain assignment holds. Of any command nobody knows whether it ends well.
        if node.type == "variable_assignment" and is_known(text_of(node)):
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
        if self.values.state.has_ended:
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
        self.branches([(condition, lambda: self.statement(right)), ("", lambda: None)])
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
