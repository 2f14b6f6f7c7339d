"""Read the last number of a text as what it is part of: `3/10` is not 10, and `14:30` not 30.

The measure `numeric`, the check of the data and the proposal of a run all ask `read_number`, so they agree on what a
reference says.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from typing import Final, NamedTuple

from kubetune.data.text.words import folded, pieces_of

# Words of a line up to which it is an answer and nothing else. In a longer one, its last number is the result.
SHORT: Final = 8
# A longer number is compared as a text: Python refuses to read thousands of digits.
_MOST_DIGITS: Final = 300
# Characters before a number that may say what it is part of.
_MOST_BEFORE: Final = 60

# `1,250`, `1,00,000` and `1'000` are grouped; `1,25` and `0,500` are something else.
_GROUPS: Final = r"[,'\u2019_]"
_DIGITS: Final = rf"(?:[1-9]\d{{0,2}}(?:{_GROUPS}\d{{2,3}})*{_GROUPS}\d{{3}}|\d+)"
_NUMBER: Final = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,3}})?"
# `2+1/2` is `2 1/2` as `_SPELLINGS` writes it.
_FRACTION: Final = re.compile(rf"(?:(\d+)\+(?=\d+/))?({_NUMBER})(?:/({_NUMBER}))?")

# Letters of other scripts end a word, since Chinese has no spaces around numbers.
_WORD: Final = re.compile(r"[!-~×÷·–√π€£¥₹°¹²³⁰-⁹⁺⁻’]+")
# What makes something else of the number behind it: `H2O`, `x_1`, `√3`, `\sqrt{3}`, `\frac{x}{2}`.
_NAMED: Final = re.compile(
    r"(?:[A-Za-z]+(?:[-_^]\{?)?|[√^]\W*|\\(?:[dtc]?frac|sqrt|log|ln|sin|cos|tan)\b.*)$"
)
# And of the number before it: `10⁵`, `3π`, `9am`.
_CHANGED: Final = re.compile(r"[¹²³⁰-⁹⁺⁻^√π]+|\\(?:pi|sqrt)\b|[AaPp]m\b")
_MINUS: Final = re.compile(r"(?:^|[^A-Za-z\d)])-[$€£¥₹]?$")
# GSM8K writes `####` before the result.
_LINE: Final = re.compile(r"\n|####")


class ReadNumber(NamedTuple):
    """The last number of a text."""

    # A text for what has digits and is no number: a time, a date, a ratio, a list.
    value: Fraction | str
    is_whole: bool  # False if its line has other numbers, of which nothing is compared


def read_number(text: str) -> ReadNumber | None:
    """Return the last number of a text; None if it has no digit.

    The sum is 1,250.          →  1250
    2 + 3 = 5                  →  5           not whole
    \\frac{3}{10} of it         →  3/10
    2024-01-15, at 9:30        →  '9:30'      not whole
    1.234,50 €                 →  '1.234,50'
    """
    for line in reversed(_LINE.split(_respelled(text))):
        words = [word for word in _WORD.findall(line) if _has_digit(word)]
        if not words:
            continue
        *others, word = words
        # What is before an equals sign is how the number came about.
        left, _, right = word.rpartition("=")
        if _has_digit(right):
            word = right
            others += [left] if _has_digit(left) else []
        return ReadNumber(_value(word), not others or len(pieces_of(line)) > SHORT)
    return None


def _has_digit(text: str) -> bool:
    return re.search(r"\d", text) is not None


def _value(word: str) -> Fraction | str:
    """Return the number that a word is, or a text that stands for it. Signs of money and units do not count."""
    digits = re.search(r"\d.*\d|\d", word)
    assert digits is not None
    core = digits[0]
    before = word[: digits.start()][-_MOST_BEFORE:]
    # `.5`, but `Rs.500`
    if re.search(r"(?:^|[^\w.])\.$", before):
        core = f".{core}"
        before = before[:-1]
    named = _NAMED.search(before)
    changed = _CHANGED.match(word, digits.end())
    if named is not None:
        before = before[: named.start()]
    sign = -1 if _MINUS.search(before) else 1

    value = _fraction(core)
    if value is not None and named is None and changed is None:
        return sign * value
    text = f"{named[0] if named else ''}{core}{changed[0] if changed else ''}"
    return f"{'-' if sign < 0 else ''}{text}".casefold()


def _fraction(core: str) -> Fraction | None:
    """Return the value of digits and what is between them; None if that is not one number."""
    parts = _FRACTION.fullmatch(core) if len(core) <= _MOST_DIGITS else None
    if parts is None:
        return None
    whole, above, below = parts.groups()
    divisor = _exact(below or "1")
    if not divisor:
        return None
    return _exact(whole or "0") + _exact(above) / divisor


def _exact(number: str) -> Fraction:
    return Fraction(re.sub(_GROUPS, "", number))


def _respelled(text: str) -> str:
    """Return a text in which each number is one word, in ASCII as far as that says the same."""
    text = folded(text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


def _compatible(match: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", match[0])


def _ascii(digit: re.Match[str]) -> str:
    return str(unicodedata.decimal(digit[0]))


def _grouped(number: re.Match[str]) -> str:
    return number[0].replace(" ", ",")


_Spelling = str | Callable[[re.Match[str]], str]

# Ways to write a number, and the one that is read; each is of what those above it leave.
_SPELLINGS: Final[tuple[tuple[re.Pattern[str], _Spelling], ...]] = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"(?![0-9])\d", _ascii),
        (r"(?<=\d)(?=[¼-¾⅐-⅞])", " "),  # 2½
        (r"[¼-¾⅐-⅞]", _compatible),
        (r"(?<=10)[⁺⁻]?[¹²³⁰-⁹]+", lambda raised: f"^{_compatible(raised)}"),
        ("\u2212", "-"),  # the minus sign of typeset text
        ("[\u2044\u2215]", "/"),
        ("\u066b", "."),  # Arabic
        ("\u066c", ","),
        (r"\b(?:USD|EUR|GBP|CHF|JPY|CNY|RMB|INR|Rs)(?=\d)", "$"),
        (r"<<[^<>\n]*>>", ""),  # the sums of GSM8K
        (r"</?[A-Za-z][^<>\n]*>", " "),
        (r"\{,\}|,\\!", ","),
        (r"\\[,;:]|\\(?:boxed|fbox|text|mathrm|mathbf|left|right)\b", " "),
        (r"\\[dtc]?frac *(\d) *(\d)", r"\\frac{\1}{\2}"),
        (rf"(\d) *\\[dtc]?frac *\{{ *({_NUMBER}) *\}} *\{{ *({_NUMBER}) *\}}", r"\1 \2/\3"),
        (rf"\\[dtc]?frac *\{{ *(-?{_NUMBER}) *\}} *\{{ *({_NUMBER}) *\}}", r"\1/\2"),
        (r"(?<=\d) *(?:×|\\times\b|\\cdot\b|·|\*|x) *10\^\{?([+-]?\d{1,3})\}?(?!\d)", r"e\1"),
        (r"(?<![\d.,:/] )(?<![\d.,:/])[1-9]\d{0,2}(?: \d{3})+(?!\d)", _grouped),  # 1 250 000
        # 2 1/2
        (r"(?<![\d/.,:])(\d+) +(\d{1,2}/\d+)(?![\d/]|[.,]\d)", r"\1+\2"),
        # 5 - 10, 3 / 10, 5 : 4
        (r"(?<=[\d%]) +([-–*/:×÷·+^]) +(?=[$€£]?[.(]?\d)", r"\1"),
        (r"(?<=\d) *([AaPp])\.?[Mm]\b", r"\1m"),
        # 72 cm^2: the power belongs to the unit.
        (r"(?<=\d)([ {]*(?:[cdkm]?m|in|ft|yd|mi|units?)(?:/s)?[ }]*)\^\{?[23]\}?(?!\d)", r"\1"),
    )
)
