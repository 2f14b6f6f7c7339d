"""Fold and split texts of any script: into what is the same in all widths of letters, and into words."""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import Final

# Scripts without spaces between words, as a class of characters: Thai, Lao, Tibetan, Burmese, Khmer, kana, Chinese.
# Each of their characters counts as a word, as in the measures of Chinese question answering (CMRC 2018, MLQA).
UNSPACED: Final = (
    r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_PIECE: Final = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")

# Decompositions that would make another text: 10⁵ is no 105, 2½ no 21/2.
_KEPT: Final = ("<super>", "<sub>", "<fraction>", "<circle>")


def folded(text: str) -> str:
    """Return a text in one width of letters, by Unicode's form NFKC; what is raised or lowered stays so."""
    if text.isascii():
        return text
    characters = []
    for character in text:
        is_kept = unicodedata.decomposition(character).startswith(_KEPT)
        characters.append(character if is_kept else unicodedata.normalize("NFKC", character))
    return unicodedata.normalize("NFC", "".join(characters))


def pieces_of(text: str) -> list[str]:
    """Return what stands between spaces; of scripts without spaces, each character."""
    #     red 红色的 car      →  red 红 色 的 car
    return _PIECE.findall(text)


def words_of(text: str) -> list[str]:
    """Return the words in lower case, without what is no letter and no digit.

    Of English that is what rouge-score makes of it; of other scripts, rouge-score leaves nothing.
    """
    #     Don’t stop, café_2!      →  don t stop café 2
    return _word().findall(folded(text).lower())


@cache
def _word() -> re.Pattern[str]:
    """Return a pattern of a word: letters and digits with the marks on them, which are no letters for `\\w`."""
    marks = []
    for code in range(0x300, 0x20000):
        if unicodedata.category(chr(code)).startswith("M"):
            marks.append(chr(code))
    return re.compile(rf"[{UNSPACED}]|(?:[^\W_{UNSPACED}]|[{''.join(marks)}])+")
