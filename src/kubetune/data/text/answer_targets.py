"""Find the answer of a row, and in an answer what a measure compares: a number, a label word, JSON.

These are functions of texts, without a model: the check of the data uses them on references, and evaluations on answers
too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kubetune.data.text.numbers import read_number
from kubetune.data.text.words import UNSPACED, folded

# Without any of these math_verify reads nothing: a digit, or what marks a formula of LaTeX.
_MATHEMATICAL: Final = re.compile(r"\d|\$|\\[\[(]|\\boxed|\\begin")

# A code block that is all of the answer.
_FENCE: Final = re.compile(r"```\w*\s*\n(.*?)\n?```", re.DOTALL)
# What `parse_json` returns for a text that is no JSON. Not None, because null is JSON.
INVALID: Final = object()


def last_answer(trained: bytes) -> tuple[int, bool] | None:
    """Return where the last answer of a sequence begins, and whether the sequence is trained whole.

    `trained`: a byte for each token, 1 if it is trained. A sequence that is trained whole has its "answer" begin in its
    middle. None if no token is trained.

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
    """Return a text without differences that do not matter: case, width of letters, spaces, a full stop at the end."""
    line = " ".join(folded(text).casefold().split())
    # English, Chinese and Hindi; one only, since `…` is more than an end.
    for stop in (".", "\u3002", "\u0964"):
        if line.endswith(stop):
            return line.removesuffix(stop).rstrip()
    return line


def label_pattern(labels: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that finds a label word in a normalised text."""
    # Longer words first: `not good` is not `good`.
    words = sorted(map(normalised, labels), key=len, reverse=True)
    # A letter beside it makes another word of it, but for scripts without spaces: 我认为是正面的 holds 正面.
    letter = rf"[^\W{UNSPACED}]"
    return re.compile(rf"(?<!{letter})(?:{'|'.join(map(re.escape, words))})(?!{letter})")


def parse_json(text: str) -> Any:
    """Return the value of a text that is JSON, or a code block with JSON; INVALID for others. NaN is no JSON."""
    fence = _FENCE.fullmatch(text.strip())
    if fence is not None:
        text = fence[1]
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return INVALID


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


class Target(NamedTuple):
    """Something in a reference that a measure or a reward compares with."""

    title: str
    is_in: Callable[[str, Sequence[str]], bool]  # of the reference and the words of `label`


_FORMULA: Final = Target(
    "formula or number", lambda text, _: _MATHEMATICAL.search(text) is not None
)
# The measures and rewards whose target a reference may lack. Others compare with any reference.
TARGETS: Final[Mapping[str, Target]] = {
    "numeric": Target("number", lambda text, _: read_number(text) is not None),
    "label": Target(
        "word of evaluation.generate.labels",
        lambda text, labels: label_pattern(labels).search(normalised(text)) is not None,
    ),
    "json_equal": Target("JSON", lambda text, _: parse_json(text) is not INVALID),
    # They read a solution by math_verify.
    "accuracy_reward": _FORMULA,
    "reasoning_accuracy_reward": _FORMULA,
    "get_cosine_scaled_reward": _FORMULA,
}


def lacks_target(name: str, reference: str, labels: Sequence[str]) -> bool:
    """True if a reference lacks what a measure of TARGETS compares with, so that every answer would be wrong."""
    return not TARGETS[name].is_in(without_thoughts(reference), labels)
