"""Where a line may end on a page: after a word of code, and never between a number and its sign.

A browser breaks `--limits=memory=1Gi` behind its dashes and `p = 2e-28` at either space. No rule of a style sheet
forbids that, so the words are marked here.
"""

from __future__ import annotations

import re

from markupsafe import Markup, escape

# Signs behind which a browser ends a line within a word.
_BREAKING = re.compile(r"[-?!}].")
# p ≤ 0.0001 · 93 % · 3 min 2 s · step 150
_SIGNS = re.compile(
    r"(?<=\bp) (?=[=≤])|(?<=[=≤]) (?=\d)|(?<=\d) (?=%|(?:min|h|d|s|ms|[KMGT]iB)\b)|(?<=\bstep) (?=\d)"
)


def unbroken(text: str) -> str:
    """Return a text in which no line ends between a number and its sign, its unit or its relation."""
    return _SIGNS.sub("\u00a0", text)


def whole_words(text: str) -> Markup:
    """Return a text as HTML in which a line ends at spaces alone, as long as each word fits into one."""
    parts = []
    for part in re.split(r"(\s+)", text):
        parts.append(whole(part, escape(part)))
    return Markup().join(parts)


def whole(word: str, as_html: Markup) -> Markup:
    """Return the HTML of a word so that no line ends within it."""
    if _BREAKING.search(word):
        return Markup('<span class="whole">{}</span>').format(as_html)
    return as_html


def code_lines(text: str) -> Markup:
    """Return the lines of a file or a log as HTML, each in an element of its own, so that what wraps is indented."""
    lines = [
        Markup("<span>{}\n</span>").format(whole_words(line))
        for line in text.rstrip("\n").split("\n")
    ]
    return Markup().join(lines)


def spans(text: str) -> Markup:
    """Return a text as HTML, in which words between backticks are code."""
    parts = []
    for index, part in enumerate(re.split("`([^`]+)`", text)):
        is_code = index % 2 == 1
        parts.append(
            Markup("<code>{}</code>").format(whole_words(part)) if is_code else escape(part)
        )
    return Markup().join(parts)
