r"""TRL's rewards of mathematics: an answer is right if math_verify reads it as the same value as the solution.

    solution      answer                                  accuracy_reward
    \frac{1}{2}   So it is \boxed{0.5}                    1
    \frac{1}{2}   The final answer is $\frac{1}{3}$.      0
    \frac{1}{2}   0.5                                     0, as nothing marks the formula
    no formula    \boxed{0.5}                             None, as there is nothing to compare with

They give TRL's numbers. math_verify takes at most 10 s to read a text and 5 s to compare two values. It counts them by
SIGALRM, which Python has only in a main thread, such as the reward process has.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from kubetune.config.schema.rewards import RewardConfig
from kubetune.extras import require
from kubetune.scoring.rewards.request import Request

READ_SECONDS = 10
COMPARE_SECONDS = 5


class Mathematics:
    """One of these rewards, with its settings. Raise MissingExtra without math_verify."""

    def __init__(self, reward: RewardConfig) -> None:
        self.name = reward.title
        self.settings: dict[str, Any] = reward.settings
        require(f"rewards: {self.name}", "math_verify")
        # It imports sympy, which takes about a second: not in the time of the first group.
        importlib.import_module("math_verify")

    def __call__(self, request: Request, solution: str | None) -> list[float | None]:
        """Return the reward of each answer; None for all if the solution has no formula."""
        if solution is None:
            return [None] * len(request.texts)

        values = _values_of_solution(solution)
        reward = _REWARDS[self.name]
        return [
            reward(self, values, text, len(ids))
            for text, ids in zip(request.texts, request.ids, strict=True)
        ]

    def _accuracy(self, values: list[Any], text: str, _tokens: int) -> float | None:
        """Return 1 if the answer is right, 0 if it is not."""
        return _is_right(values, text)

    def _behind_reasoning(self, values: list[Any], text: str, _tokens: int) -> float | None:
        """Return 1 if the answer after the reasoning is right, 0 if it is not or the reasoning does not end."""
        delimiters: Sequence[str] = self.settings.get("reasoning_delimiters", ("</think>",))
        # The first delimiter that the text has, and of it the last place: a model may begin to reason again.
        for delimiter in delimiters:
            if delimiter in text:
                return _is_right(values, text.split(delimiter)[-1])
        return 0.0

    def _scaled(self, values: list[Any], text: str, tokens: int) -> float | None:
        """Return a reward between the reward of the shortest answer and that of an answer with `max_len` tokens."""
        right = _is_right(values, text)
        if right is None:
            return None
        # Half of a cosine: with the defaults a right answer gets 1.0 at 0 tokens, 0.75 at half of max_len and 0.5 from
        # max_len on, and a wrong one -1.0, -0.75 and -0.5.
        if right:
            shortest = self.settings.get("max_value_correct", 1.0)
            longest = self.settings.get("min_value_correct", 0.5)
        else:
            shortest = self.settings.get("min_value_wrong", -1.0)
            longest = self.settings.get("max_value_wrong", -0.5)
        cosine = math.cos(min(tokens / self.settings["max_len"], 1.0) * math.pi)
        return float(longest + 0.5 * (shortest - longest) * (1.0 + cosine))


# By name: the reward of a text with so many tokens, compared with the values of the solution.
_REWARDS: Final[Mapping[str, Callable[[Mathematics, list[Any], str, int], float | None]]] = {
    "accuracy_reward": Mathematics._accuracy,
    "reasoning_accuracy_reward": Mathematics._behind_reasoning,
    "get_cosine_scaled_reward": Mathematics._scaled,
}


def _values_of_solution(solution: str) -> list[Any]:
    """Return what math_verify reads in a solution, which need not mark its formulas; empty without any."""
    from math_verify import parse

    values: list[Any] = parse(solution, parsing_timeout=READ_SECONDS)
    return values


def _is_right(values: list[Any], text: str) -> float | None:
    """Return 1 if a text has the same value as the solution, else 0; None without a value of the solution."""
    from math_verify import parse, verify

    if not values:
        return None
    of_text = parse(
        text,
        extraction_config=_marked_formulas(),
        extraction_mode="first_match",
        parsing_timeout=READ_SECONDS,
    )
    return float(verify(values, of_text, timeout_seconds=COMPARE_SECONDS))


@cache
def _marked_formulas() -> list[Any]:
    """Return what is read in answers: LaTeX that a box or words mark as the answer, boxes first, units left out."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    # Were formulas without a mark read, any of them in the reasoning could pass as the answer.
    return [
        LatexExtractionConfig(
            normalization_config=NormalizationConfig(units=True),
            boxed_match_priority=0,
            try_extract_without_anchor=False,
        )
    ]
