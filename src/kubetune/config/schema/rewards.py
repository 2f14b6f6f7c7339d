"""What rewards an answer that the model drew: `rewards`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, model_validator

from kubetune.config.schema.base import AsTuple, Section, section_of


@dataclass(frozen=True)
class RewardTraits:
    """What a built-in reward reads and needs. What it computes has the same name in `scoring/rewards/built_in`."""

    # Its settings, and those of them that it cannot do without.
    settings: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    # True if it compares an answer with the right one.
    compares: bool = False


_COMPARING: Final = RewardTraits(compares=True)
_REPETITION: Final = RewardTraits(("ngram_size", "max_penalty"))

# The first are metrics of evaluations, the last six TRL's.
BUILT_IN: Final[dict[str, RewardTraits]] = {
    "exact_match": _COMPARING,
    "contains": _COMPARING,
    "regex": RewardTraits(("pattern",), needs=("pattern",), compares=True),
    "numeric": _COMPARING,
    "label": RewardTraits(("labels",), needs=("labels",), compares=True),
    "json_valid": RewardTraits(),
    "json_equal": _COMPARING,
    "rouge_l": _COMPARING,
    "bleu": _COMPARING,
    "chrf": _COMPARING,
    "json_schema": RewardTraits(("schema",)),
    "format": RewardTraits(("pattern",), needs=("pattern",)),
    "length": RewardTraits(("target", "max_tokens", "min_tokens")),
    "repetition": _REPETITION,
    "accuracy_reward": _COMPARING,
    "reasoning_accuracy_reward": RewardTraits(("reasoning_delimiters",), compares=True),
    "get_cosine_scaled_reward": RewardTraits(
        (
            "max_len",
            "min_value_wrong",
            "max_value_wrong",
            "min_value_correct",
            "max_value_correct",
        ),
        needs=("max_len",),
        compares=True,
    ),
    "think_format_reward": RewardTraits(),
    "get_repetition_penalty_reward": _REPETITION,
    "get_soft_overlong_punishment": RewardTraits(
        ("max_completion_len", "soft_punish_cache"),
        needs=("max_completion_len", "soft_punish_cache"),
    ),
}

# Settings that are no number: their type, and its name for messages.
_KINDS: Final[dict[str, tuple[type, str]]] = {
    "pattern": (str, "a regular expression"),
    "labels": (tuple, "a list of words"),
    "reasoning_delimiters": (tuple, "a list of texts"),
    "schema": (dict, "a JSON schema; name a file of it by `file`"),
}

# The least that a setting may be; by less, no answer would be better than another.
_LEAST: Final = {"ngram_size": 1, "target": 1, "max_tokens": 1, "max_completion_len": 1}

# Names of metrics that a data set has, and a single answer has not.
_OF_DATA_SETS: Final = frozenset(
    "loss perplexity token_accuracy accuracy f1 f1_macro f1_micro precision recall matthews_correlation mae pearson "
    "spearman".split()
)


class RewardConfig(Section):
    """One reward of an answer: built in, by its name, a function of a Python file of yours, or what a model says of it."""

    name: str | None = Field(
        None,
        description=f"A reward that is built in: {', '.join(BUILT_IN)}. With `file`, `reward_model` or `teacher`: its "
        "name in metrics, which may be left out.",
    )
    file: str | None = Field(
        None,
        min_length=1,
        description="Python file of yours; with `name: json_schema`, the file of the schema.",
    )
    function: str | None = Field(
        None,
        description="Function in it, in the form of TRL (`prompts, completions, **columns`), verl (`data_source, "
        "solution_str, ground_truth, extra_info`) or OpenRLHF (`queries, prompts, labels`).",
    )
    reward_model: str | None = Field(
        None,
        min_length=1,
        description="A reward model, whose score of the answer is the reward: the run directory of `task: reward_model`, "
        "or a folder or hub id of a classifier with one output.",
    )
    teacher: str | None = Field(
        None,
        min_length=1,
        description="A language model with the same tokenizer: the mean log-probability of the answer's tokens is the "
        "reward. A run directory, a folder or a hub id.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a model on the hub that is named here."
    )
    weight: float = Field(1.0, description="Weight in the sum of all rewards.")
    column: str | None = Field(
        None,
        description="Column of the records that holds the right answer; left out: the answer of the record, or what "
        "else docs/grpo.md calls the right answer.",
    )
    settings: dict[str, float | str | Annotated[tuple[str, ...], AsTuple] | dict[str, Any]] = Field(
        default_factory=dict,
        description="Settings of a reward that is built in, such as `{pattern: '#### (.*)'}`.",
    )

    @property
    def title(self) -> str:
        """Name of the reward in metrics."""
        if self.name or self.function:
            return self.name or self.function or ""
        return "reward_model" if self.reward_model is not None else "teacher"

    @property
    def compares(self) -> bool:
        """True if the reward is built in, and compares an answer with the right one."""
        if self.is_code or self.is_model or self.name is None:
            return False
        return BUILT_IN[self.name].compares

    @property
    def is_code(self) -> bool:
        """True if the reward is a function of the user's."""
        return self.function is not None

    @property
    def is_model(self) -> bool:
        """True if the reward is what a model says of the answer."""
        return self.reward_model is not None or self.teacher is not None

    @model_validator(mode="after")
    def _is_one_of_them(self) -> RewardConfig:
        is_schema = self.name == "json_schema" and not self.is_code
        if self.is_model:
            problems = self._problems_of_model()
        elif self.file is not None and not is_schema:
            problems = self._problems_of_file()
        else:
            problems = self._problems_of_name()
        if self.revision is not None and not self.is_model:
            problems.append("revision: belongs to reward_model and teacher; leave it out")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _problems_of_file(self) -> list[str]:
        problems = []
        if not self.function or not self.function.isidentifier():
            problems.append(
                f"function: found {self.function!r}; expected the name of a function of {self.file}"
            )
        if self.settings:
            problems.append("settings: a function of yours has its own; leave them out")
        return problems + self._problems_of_title()

    def _problems_of_model(self) -> list[str]:
        problems = []
        kind = "teacher" if self.teacher is not None else "reward_model"
        for key in ("reward_model", "file", "function", "settings", "column"):
            if key != kind and getattr(self, key):
                problems.append(f"{key}: means nothing beside {kind}; leave one of both out")
        return problems + self._problems_of_title()

    def _problems_of_title(self) -> list[str]:
        if self.name is None or re.fullmatch(r"[\w.-]+", self.name):
            return []
        return [f"name: found {self.name!r}; expected letters, digits, dots and dashes"]

    def _problems_of_name(self) -> list[str]:
        if self.name is None:
            return [
                "name: missing; expected a reward that is built in, file and function, reward_model, or teacher"
            ]
        if self.function is not None:
            return ["function: found it without file; expected the Python file that has it"]
        if self.name.removeprefix("eval_") in _OF_DATA_SETS or "_pass_at_" in self.name:
            return [
                f"name: {self.name} is a metric of a whole data set, which a single answer does not have; expected one of "
                f"{', '.join(BUILT_IN)}"
            ]
        if self.name not in BUILT_IN:
            return [
                f"name: found {self.name!r}; built in are {', '.join(BUILT_IN)}; expected one of them, or file and "
                "function of your own"
            ]
        problems = []
        traits = BUILT_IN[self.name]
        for key, value in self.settings.items():
            if key not in traits.settings:
                problems.append(
                    f"settings.{key}: unknown key; `{self.name}` has {', '.join(traits.settings) or 'none'}"
                )
            else:
                problems += _problems_of_setting(key, value)
        for key in traits.needs:
            if key not in self.settings:
                problems.append(f"settings.{key}: missing; `{self.name}` needs it")
        if self.name == "json_schema" and ("schema" in self.settings) == (self.file is not None):
            problems.append("json_schema: expected one of `settings: {schema: {…}}` and `file`")
        problems += self._problems_of_length()
        if self.column is not None and not traits.compares:
            problems.append(f"column: means nothing to `{self.name}`, which compares with nothing")
        return problems

    def _problems_of_length(self) -> list[str]:
        """Return what is wrong with the settings of `length`, of which some have no effect on any answer."""
        if self.name != "length":
            return []
        limits = [key for key in ("min_tokens", "max_tokens") if key in self.settings]
        if not self.settings:
            return [
                "settings: missing; `length` rewards every answer alike without target, min_tokens or max_tokens"
            ]
        if "target" in self.settings and limits:
            return [
                f"settings.{limits[0]}: means nothing together with target; leave one of them out"
            ]
        least = self.settings.get("min_tokens")
        most = self.settings.get("max_tokens")
        if isinstance(least, float) and isinstance(most, float) and least > most:
            return [
                f"settings.min_tokens is {least:g}, max_tokens {most:g}, so no answer is of such a length; expected no "
                "more than that"
            ]
        return []


def _problems_of_setting(key: str, value: Any) -> list[str]:
    """Return what is wrong with a setting, which would end the run only once the reward is loaded."""
    kind, expected = _KINDS.get(key, (float, "a number"))
    if not isinstance(value, kind) or value == ():
        return [f"settings.{key}: found {value!r}; expected {expected}"]
    if isinstance(value, float):
        least = _LEAST.get(key, -math.inf)
        if value < least:
            return [f"settings.{key}: found {value:g}; expected at least {least}"]
        if key == "max_penalty" and value > 0:
            return [f"settings.{key}: found {value:g}; expected 0 or less, as it is added"]
    if kind is str:
        try:
            re.compile(str(value))
        except re.error as error:
            return [f"settings.{key}: found {value!r}, which is no regular expression: {error}"]
    # No text can be split by an empty one, and lengths are divided by max_len.
    if key == "reasoning_delimiters" and isinstance(value, tuple) and "" in value:
        return [f"settings.{key}: found an empty text; expected what stands after the reasoning"]
    if key == "max_len" and isinstance(value, float) and value <= 0:
        return [f"settings.{key}: found {value:g}; expected a number of tokens, more than 0"]
    return []


def _as_rewards(value: Any) -> Any:
    """Return rewards as a list of sections: `exact_match` alone is `[{name: exact_match}]`."""
    if isinstance(value, (str, dict)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(map(section_of("name"), value))


Rewards = Annotated[
    tuple[RewardConfig, ...],
    AsTuple,
    BeforeValidator(
        _as_rewards, json_schema_input_type=str | RewardConfig | tuple[str | RewardConfig, ...]
    ),
]
