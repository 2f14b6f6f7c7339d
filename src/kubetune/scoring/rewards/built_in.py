"""Rewards that are built in: a number for each answer, of its text, its tokens and the right answer.

Those that compare texts are the measures of evaluations (scoring/metrics), so that a model is trained by what it is
measured by. Those under TRL's names give TRL's numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

from kubetune.config.schema.evaluation import METRICS, AnswerMetric, GenerateConfig
from kubetune.config.schema.rewards import RewardConfig
from kubetune.scoring import metrics
from kubetune.scoring.rewards.json_schemas import conforms, validator_of
from kubetune.scoring.rewards.mathematics import Mathematics
from kubetune.scoring.rewards.request import Request

Settings = Mapping[str, Any]
# Function of a request and the right answer to its prompt.
Reward = Callable[[Request, str | None], list[float | None]]

# One thought, closed, and an answer after it; TRL's own pattern, so that rewards are the same.
_THOUGHT: Final = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def reward_of(reward: RewardConfig) -> Reward:
    """Return a built-in reward. The config has checked its settings.

    Raise MissingExtra for a package that it needs, ConfigError for an invalid schema.
    """
    return MAKERS[reward.title](reward)


def _measure(name: str, settings: Settings) -> metrics.Measure:
    """Return a metric of evaluations, with the same settings, as a number from 0 to 1."""
    wanted = GenerateConfig(
        metric=(cast(AnswerMetric, name),),
        pattern=settings.get("pattern"),
        labels=settings.get("labels", ()),
    )
    measure = metrics.measures_of(wanted, f"rewards: {name}")[name]
    # The measures of sacrebleu go to 100.
    most = 1.0
    if METRICS[name].is_of_all_rows:
        most = 100.0
    return lambda answer, reference: measure(answer, reference) / most


def _of_texts(
    measure: Callable[[str], float],
    request: Request,
    _: str | None,
) -> list[float | None]:
    return [measure(text) for text in request.texts]


def _of_tokens(
    measure: Callable[[Sequence[int]], float],
    request: Request,
    _: str | None,
) -> list[float | None]:
    return [measure(ids) for ids in request.ids]


def _compared(reward: RewardConfig) -> Reward:
    """Return a metric as a reward: how an answer compares with the right one; None if the record has none."""
    measure = _measure(reward.title, reward.settings)

    def of_request(request: Request, reference: str | None) -> list[float | None]:
        if reference is None:
            return [None] * len(request.texts)
        return [measure(text, reference) for text in request.texts]

    return of_request


def _json_valid(reward: RewardConfig) -> Reward:
    measure = _measure(reward.title, reward.settings)
    return partial(_of_texts, lambda text: measure(text, ""))


def _json_schema(reward: RewardConfig) -> Reward:
    return partial(_of_texts, partial(conforms, validator_of(reward)))


def _format(reward: RewardConfig) -> Reward:
    pattern = re.compile(str(reward.settings["pattern"]), re.DOTALL)
    return partial(_of_texts, lambda text: float(pattern.fullmatch(text.strip()) is not None))


def _think_format(_: RewardConfig) -> Reward:
    return partial(_of_texts, lambda text: float(_THOUGHT.match(text) is not None))


def _length(reward: RewardConfig) -> Reward:
    return partial(_of_tokens, partial(length, settings=reward.settings))


def _repetition(reward: RewardConfig) -> Reward:
    settings: Settings = reward.settings
    size = int(settings.get("ngram_size", 3))
    most = float(settings.get("max_penalty", -1.0))
    return partial(_of_tokens, partial(repetition, size=size, most=most))


def _overlong(reward: RewardConfig) -> Reward:
    settings: Settings = reward.settings
    longest = int(settings["max_completion_len"])
    margin = int(settings["soft_punish_cache"])
    return partial(_of_tokens, partial(overlong, longest=longest, margin=margin))


# Name of a reward → what makes it of its settings. `BUILT_IN` of the schema has the same names.
MAKERS: Final[dict[str, Callable[[RewardConfig], Reward]]] = {
    "exact_match": _compared,
    "contains": _compared,
    "regex": _compared,
    "numeric": _compared,
    "label": _compared,
    "json_valid": _json_valid,
    "json_equal": _compared,
    "rouge_l": _compared,
    "bleu": _compared,
    "chrf": _compared,
    "json_schema": _json_schema,
    "format": _format,
    "length": _length,
    "repetition": _repetition,
    "accuracy_reward": Mathematics,
    "reasoning_accuracy_reward": Mathematics,
    "get_cosine_scaled_reward": Mathematics,
    "think_format_reward": _think_format,
    "get_repetition_penalty_reward": _repetition,
    "get_soft_overlong_punishment": _overlong,
}


def length(ids: Sequence[int], settings: Settings) -> float:
    """Return 1 for an answer of a length that is wanted, and less for a shorter or longer one.

    `target`: 1 at so many tokens, 0 at none and at twice as many. `min_tokens`, `max_tokens`: 1 within, 0 outside.
    """
    number = len(ids)
    if "target" in settings:
        # With a target of 100, answers of 50 and of 150 tokens get 0.5.
        target = max(float(settings["target"]), 1.0)
        return max(0.0, 1.0 - abs(number - target) / target)

    least = float(settings.get("min_tokens", 0))
    most = float(settings.get("max_tokens", number))
    return float(least <= number <= most)


def repetition(ids: Sequence[int], size: int, most: float) -> float:
    """Return the share of stretches of `size` tokens that came before, times `most`, which is at most 0."""
    number = len(ids) - size + 1
    if number < 1:
        return 0.0
    # 1 2 1 2 1 has the pairs 12 21 12 21: 2 of 4 came before.
    different = {tuple(ids[place : place + size]) for place in range(number)}
    share = 1 - len(different) / number
    if not share:
        return 0.0  # not -0.0
    return share * most


def overlong(ids: Sequence[int], longest: int, margin: int) -> float:
    """Return 0 up to `longest - margin` tokens, from there on falling to -1 at `longest`."""
    begin = longest - margin
    if len(ids) <= begin:
        return 0.0
    # With 100 tokens and a margin of 20: 0 up to 80, -0.5 at 90, -1 at 100.
    if len(ids) <= longest:
        return (begin - len(ids)) / margin
    return -1.0
