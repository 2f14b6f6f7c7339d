"""An answer with the words marked that are other than what was expected."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from itertools import groupby

from markupsafe import Markup, escape

from kubetune.reporting.look.line_breaks import whole, whole_words

_MOST = 400  # words and signs of texts that are compared


def compared_with(text: str, expected: str) -> Markup:
    """Return a text as HTML, in which a line ends at spaces alone, with marks where it is not what was expected.

    Very long texts have no marks.
    """
    words, others = (re.findall(r"\s+|\w+|[^\w\s]", part) for part in (text, expected))
    if max(len(words), len(others)) > _MOST:
        return whole_words(text)
    same: set[int] = set()
    for block in SequenceMatcher(None, words, others, False).get_matching_blocks():
        same.update(range(block.a, block.a + block.size))
    parts = []
    # What stands between two spaces is one word for the eye.
    for _, group in groupby(enumerate(words), key=lambda pair: pair[1].isspace()):
        pieces = list(group)
        marked = [
            escape(piece)
            if at in same or piece.isspace()
            else Markup("<mark>{}</mark>").format(piece)
            for at, piece in pieces
        ]
        parts.append(whole("".join(piece for _, piece in pieces), Markup().join(marked)))
    return Markup().join(parts)
