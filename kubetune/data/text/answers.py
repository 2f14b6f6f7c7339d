"""Where the answer of a row begins, and what a measure of answers looks for in one: a number, a label word, JSON.

Texts only, without a model: the check of data looks at references by it, and an evaluation at answers too.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Final

TARGETS: Final = {
    "numeric": "number",
    "label": "word of evaluation.generate.labels",
    "json_equal": "JSON",
}
"""What measures look for in a reference, of those that find nothing in some."""

# A number with its sign. A minus directly behind a digit is none, but part of a range or a date.
_NUMBER: Final = re.compile(r"(?:(?<!\d)-)?(?:\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+)")
# A code block that is all of the answer.
_FENCE: Final = re.compile(r"```\w*\s*\n(.*?)\n?```", re.DOTALL)
INVALID: Final = object()
"""What `parse_json` returns for a text that is no JSON, since null is JSON."""


def last_answer(trained: bytes) -> tuple[int, bool] | None:
    """Return where the last answer of a sequence begins, and whether the sequence is trained whole.

    `trained`: a 1 for each token that is trained, else a 0. A sequence that is trained whole is cut in its middle; None is
    returned where no token is trained.

        trained    0 0 1 1 0 0 1 1    →  6, False
        trained    1 1 1 1 1 1        →  3, True
    """
    end = trained.rfind(1) + 1
    if not end:
        return None
    begin = trained.rfind(0, 0, end) + 1
    # Nothing predicts the first token, so a text that is trained whole may begin to be trained at its second.
    if begin > 1:
        return begin, False
    return max(1, end // 2), True


def without_thoughts(text: str) -> str:
    """Return an answer without the thoughts before it.

        <think>2 and 2 …</think> 4    →  4
        2 and 2 …</think> 4           →  4    the chat template has put `<think>` into the prompt
        <think>2 and 2 …              →       cut off before its answer
        Write <think>…</think>        →  the same: here the answer is about such tags

    Qwen3's template writes empty thoughts before each last answer, so references have some too.
    """
    thoughts, end, answer = text.partition("</think>")
    is_opened = thoughts.lstrip().startswith("<think>")
    if is_opened or (end and "<think>" not in thoughts):
        return answer.lstrip()
    return text


def normalised(text: str) -> str:
    """Return a text without what right answers may differ in: case, width of letters, spaces, a full stop at the end."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(words).removesuffix(".").rstrip()


def last_number(text: str) -> float | None:
    """Return the last number of a text, in which commas group thousands; None where it has none."""
    numbers = _NUMBER.findall(text.replace("\u2212", "-"))  # the minus sign of typeset text
    return float(numbers[-1].replace(",", "")) if numbers else None


def label_pattern(labels: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that finds a label word in a normalised text."""
    # Longer words first: `not good` is not `good`.
    words = sorted(map(normalised, labels), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)")


def parse_json(text: str) -> Any:
    """Return the value of a text, or of the code block that it is; INVALID where that is no JSON. NaN is none."""
    fence = _FENCE.fullmatch(text.strip())
    try:
        return json.loads(fence[1] if fence else text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return INVALID


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def lacks_target(name: str, reference: str, labels: Sequence[str]) -> bool:
    """True if a measure compares with something that this reference does not hold, so that each answer is wrong."""
    reference = without_thoughts(reference)
    if name == "numeric":
        return last_number(reference) is None
    if name == "label":
        return label_pattern(labels).search(normalised(reference)) is None
    if name == "json_equal":
        return parse_json(reference) is INVALID
    return False
