"""What every part of the walk asks of a node of the parsed script."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import tree_sitter_bash
from tree_sitter import Language, Node, Parser, Point, Range

# A line that goes on in the next one: a shell takes backslash and end of line out before it reads words.
_JOINTS = re.compile(rb"(?<!\\)(?:\\\\)*((?:\\\n)+)")
# What a joint becomes in the source, whose lines keep their numbers. The parser never sees it.
_JOINED = "\0\n"
# `[` is a command like any other. The grammar takes its words for an expression, and not all that a shell takes, such
# as `[ 10 \> 9 ]`; under another name they stay words.
_BRACKET = re.compile(rb"(?<![^\s;&|(`])\[(?=[ \t]|\\\n)")
_RENAMED = "\1"
# Where a shell keeps backslashes, as it does in a here-document whose end is quoted.
_LITERAL = ("ansi_c_string", "comment", "raw_string")
_QUOTED_END = re.compile(r"""<<-?\s*\w*["'\\]""")
# Passes over a script: what is joined or ended may open a quotation or a block, or close one, for what follows.
_MOST_PASSES = 50


def parsed(text: str) -> Node:
    r"""Return the tree of a script, its continued lines joined and its assignments ended as a shell does.

    LR=1e-\     →   LR=1e-4
    4

    A=1 B=2     →   A=1 B=2;
    C=3             C=3;        without these, the parser takes both lines for the environment of a program `if`
    if …            if …
    """
    source = _BRACKET.sub(_RENAMED.encode(), text.encode())
    joints: list[int] = []
    ends: set[int] = set()
    for _ in range(_MOST_PASSES):
        tree = _tree(source, joints, ends)
        before = joints
        joints = []
        for match in _JOINTS.finditer(source):
            if not _is_literal(tree, match.start(1)):
                joints += range(match.start(1), match.end(), 2)
        if joints != before:
            continue
        new_ends = set(_open_ends(tree, source, joints)) - ends
        if not new_ends:
            break
        ends |= new_ends
    return tree


def _tree(source: bytes, joints: Sequence[int], ends: Collection[int]) -> Node:
    """Return the tree of a source without the two bytes at each joint, and with a semicolon at each end."""
    ranges = []
    marked = bytearray(source)
    begin = 0
    for cut in sorted([*joints, *ends, len(source)]):
        # The parser counts lines by what it reads: it is told where each piece begins. Nobody asks for columns.
        first = Point(source.count(b"\n", 0, begin), 0)
        last = Point(source.count(b"\n", 0, cut), 0)
        if cut in ends:
            marked[cut : cut + 1] = b";"
            ranges.append(Range(first, last, begin, cut + 1))
            begin = cut + 1
        else:
            marked[cut : cut + 2] = _JOINED.encode()
            ranges.append(Range(first, last, begin, cut))
            begin = cut + 2
    language = Language(tree_sitter_bash.language())
    return Parser(language, included_ranges=ranges).parse(bytes(marked[: len(source)])).root_node


def _open_ends(tree: Node, source: bytes, joints: Sequence[int]) -> Iterator[int]:
    """Yield where a semicolon belongs: behind assignments whose line ends before the name of their command."""
    joined_bytes = {*joints, *(joint + 1 for joint in joints)}
    for node in all_below(tree):
        if node.type != "command":
            continue
        parts = [child for child in node.children if child.type != "comment"]
        for part, following in pairwise(parts):
            if part.type == "command_name":
                break
            between = range(part.end_byte, following.start_byte)
            read = [place for place in between if place not in joined_bytes]
            if any(source[place] == ord("\n") for place in read):
                yield read[0]


def all_below(node: Node) -> Iterator[Node]:
    """Yield a node and all below it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


def _is_literal(tree: Node, start: int) -> bool:
    """Return True if a shell keeps the backslash at this byte."""
    node = tree.descendant_for_byte_range(start, start + 1)
    while node is not None:
        around = node.parent
        if node.type in _LITERAL:
            return True
        if node.type == "heredoc_body" and around is not None:
            return _QUOTED_END.match(text_of(around)) is not None
        node = around
    return False


def is_known(text: str) -> bool:
    """Return True if a text has nothing in it that only a running shell knows."""
    return "$" not in text and "`" not in text


def is_calculated_test(node: Node) -> bool:
    """Return True for (( … ))."""
    return node.type == "compound_statement" and node.children[0].type == "(("


def text_of(node: Node) -> str:
    """Return the source of a node, its continued lines joined."""
    return joined(node.text or b"")


def joined(source: bytes) -> str:
    """Return a piece of the source as the script has it, its continued lines joined."""
    return source.decode().replace(_JOINED, "").replace(_RENAMED, "[")


def field_of(node: Node, name: str) -> str:
    """Return the source of one part of a node; empty where it has none of that name."""
    part = node.child_by_field_name(name)
    if part is None:
        return ""
    return text_of(part)


def line_of(node: Node) -> int:
    """Return the line in which a node begins, from 1."""
    return node.start_point.row + 1


def first_line_of(node: Node) -> str:
    """Return the first line of a node's source, shortened."""
    return text_of(node).partition("\n")[0][:80]
