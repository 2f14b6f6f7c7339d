"""Learning by reward, from answers that the model draws itself: `grpo`, and what rewards them: `rewards`."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

from pydantic import BeforeValidator, Field, model_validator

from kubetune.config.schema.base import AsTuple, Section, renamed, section_of
from kubetune.config.vllm import LORA_RANKS

if TYPE_CHECKING:
    from kubetune.config.schema.cluster import KubernetesConfig
    from kubetune.config.schema.data import DataConfig
    from kubetune.config.schema.model import LoraConfig
    from kubetune.config.schema.training import TrainingConfig

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]

KlEstimator = Literal["k1", "abs", "k2", "k3"]

Correction = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
]

# Loss types whose ratio is clipped on both sides.
CLIPPED: Final = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")

# The loss types that a key means something to.
ONLY_WITH: Final[dict[str, tuple[str, ...]]] = {
    "epsilon": CLIPPED,
    "epsilon_high": (*CLIPPED, "cispo"),
    "delta": CLIPPED,
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
}


class ServersConfig(Section):
    """Stock vLLM servers that draw the answers in place of the model itself, by an adapter file for each version."""

    urls: Annotated[tuple[str, ...], AsTuple] = Field(
        (),
        description="Address of each server, such as `http://10.0.0.7:8000`; no address of several, as an adapter "
        "would reach one of them alone. They see the run directory at the same path. Left out "
        "with `kubernetes.samplers`, whose pods they are.",
    )
    lag: Literal[0, 1] = Field(
        0,
        description="0: answers by the newest weights, for which the run waits. 1: by those of one set of answers before, "
        "which servers draw while the run learns.",
    )
    timeout_seconds: float = Field(
        600.0,
        ge=1,
        description="A server that in this time has not answered a prompt, asked again and again, or not loaded an "
        "adapter ends the run.",
    )

    @model_validator(mode="after")
    def _urls_are_addresses(self) -> ServersConfig:
        problems = []
        for url in self.urls:
            if not re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", url):
                problems.append(f"urls: found {url}; expected such as http://10.0.0.7:8000")
            elif re.search(r"/v1/?$", url):
                problems.append(
                    f"urls: found {url}; expected it without /v1, as adapters are loaded beside it"
                )
        if len(set(self.urls)) < len(self.urls):
            problems.append("urls: a server is named twice; expected each once")
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _as_servers(value: Any) -> Any:
    """Return servers as a section: an address, or a list of them, is `{urls: […]}`."""
    if isinstance(value, str):
        value = [value]
    return {"urls": value} if isinstance(value, (list, tuple)) else value


Servers = Annotated[
    ServersConfig,
    BeforeValidator(_as_servers, json_schema_input_type=str | tuple[str, ...] | ServersConfig),
]


class GrpoConfig(Section):
    """Sampling of answers, the advantage of each over its group, and the loss. Names and defaults are those of TRL."""

    num_generations: int = Field(
        8, ge=2, le=1024, description="Answers to each prompt, which are compared with each other."
    )
    max_completion_length: int = Field(
        512, ge=1, le=1_000_000, description="Longest answer in tokens; a longer one is cut off."
    )
    temperature: float = Field(
        1.0,
        gt=0,
        le=100,
        description="Temperature of sampling, and of the training's probabilities.",
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Draw from the likeliest tokens that have this share together."
    )
    top_k: int = Field(0, ge=0, description="Draw from so many likeliest tokens; 0: from all.")
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Draw from tokens that have this share of the likeliest one's.",
    )
    num_iterations: int = Field(
        1, ge=1, le=100, description="Times that each set of answers is learnt from."
    )
    steps_per_generation: int = Field(
        1,
        ge=1,
        le=1000,
        description="Optimizer steps whose answers are drawn together, by the weights before the first of them.",
    )
    # `gspo` is spelled out below.
    loss_type: Annotated[
        LossType,
        BeforeValidator(lambda value: value, json_schema_input_type=Literal[LossType, "gspo"]),
    ] = Field(
        "dapo",
        description="`dapo` (arXiv 2503.14476) divides by all tokens of the step, `bnpo` does the same here, `grpo` "
        "(2402.03300) takes the mean of rows, `dr_grpo` (2503.20783) divides by rows × `max_completion_length`, "
        "`luspo` (2602.05261) adds up the tokens of a row; `cispo` (2506.13585) and `sapo` (2511.20347) bound the "
        "ratio otherwise, `vespo` (2602.10693) weights all tokens of an answer by the product of their ratios. `gspo` "
        "(2507.18071): `grpo` with `importance_sampling_level: sequence`.",
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="One ratio for each token, or for each answer the mean of its tokens'."
    )
    epsilon: float = Field(0.2, ge=0, lt=1, description="The ratio is clipped at 1 - this.")
    epsilon_high: float | None = Field(
        None,
        gt=0,
        description="The ratio is clipped at 1 + this; left out: as `epsilon`. `cispo`: the ratio is bounded by this "
        "itself; left out: 5.0.",
    )
    delta: float | None = Field(
        None, gt=1, description="Bound of the ratio on the side that `epsilon` does not clip."
    )
    sapo_temperature_pos: float = Field(
        1.0, gt=0, description="Temperature of `sapo` for answers better than their group."
    )
    sapo_temperature_neg: float = Field(1.05, gt=0, description="The same for the other answers.")
    vespo_k_pos: float = Field(
        2.0,
        ge=0,
        description="How strongly `vespo` weights down a good answer that has become less likely.",
    )
    vespo_lambda_pos: float = Field(
        3.0,
        ge=0,
        description="How strongly `vespo` weights down a good answer that has become likelier.",
    )
    vespo_k_neg: float = Field(3.0, ge=0, description="`vespo_k_pos` of bad answers.")
    vespo_lambda_neg: float = Field(2.0, ge=0, description="`vespo_lambda_pos` of bad answers.")
    beta: float = Field(
        0.0, ge=0, description="Weight of the divergence from the model before training."
    )
    kl_estimator: KlEstimator = Field(
        "k3",
        description="Estimate of that divergence for each token (joschu.net/blog/kl-approx.html).",
    )
    use_bias_correction_kl: bool = Field(
        True, description="Multiply the divergence by the ratio, so that its gradient is unbiased."
    )
    scale_rewards: Annotated[
        Literal["group", "batch", "none"], renamed({"false": "none", "true": "group"})
    ] = Field(
        "group",
        description="Divide what an answer is better than its group by the standard deviation of the group's rewards, "
        "of all rewards of the step, or by nothing.",
    )
    mask_truncated_completions: bool = Field(
        False, description="Do not learn from answers that were cut off."
    )
    importance_sampling_correction: Correction = Field(
        "none",
        description="Weight of an answer by how much likelier the training has it than the sampling: the ratio of each "
        "token, of the whole answer (the product), or its geometric mean; cut at the limits, or dropped beyond them. "
        "Left out with `servers`: `token_truncate`.",
    )
    importance_sampling_clip_max: float | None = Field(
        3.0, gt=0, description="Upper limit of that weight."
    )
    importance_sampling_clip_min: float | None = Field(
        None, ge=0, description="Lower limit of that weight."
    )
    generation_batch_size: int = Field(
        64, ge=1, description="Answers that a rank draws at a time, in whole groups; at least one."
    )
    servers: Servers | None = Field(
        None, description="vLLM servers that draw the answers; left out: the model itself does."
    )
    reward_timeout_seconds: float = Field(
        60.0, gt=0, description="A reward function that takes longer for one group is stopped."
    )
    reward_memory_gib: float = Field(
        4.0, gt=0, description="Memory that the process of the reward functions may take."
    )
    require_reward_isolation: bool = Field(
        False,
        description="End the start where the kernel refuses a protection from reward functions (docs/grpo.md has the "
        "table). Left out: the start names it, and goes on.",
    )
    on_reward_error: Literal["none", "stop"] = Field(
        "none",
        description="A reward function that raises or hangs gives no reward, which is counted; or it ends the run.",
    )

    @property
    def high(self) -> float:
        """Upper clip of the ratio with its default filled in."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        # TRL takes epsilon here too, by which every ratio above 0.2 would be bounded to 0.2.
        return 5.0 if self.loss_type == "cispo" else self.epsilon

    @property
    def window(self) -> int:
        """Optimizer steps that learn from one set of answers."""
        return self.num_iterations * self.steps_per_generation

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("scale_rewards"), bool):
            value = {**value, "scale_rewards": "group" if value["scale_rewards"] else "none"}
        if value.get("loss_type") == "gspo":
            level = value.get("importance_sampling_level", "sequence")
            value = {**value, "loss_type": "grpo", "importance_sampling_level": level}
        if value.get("servers") is not None:
            # TRL's `sequence_mask` multiplies the ratios of all tokens, by which it drops long answers as a rule.
            value = {"importance_sampling_correction": "token_truncate", **value}
        return value

    @model_validator(mode="after")
    def _keys_fit_the_loss(self) -> GrpoConfig:
        problems = []
        for key, types in ONLY_WITH.items():
            if key in self.changed_keys and self.loss_type not in types:
                problems.append(
                    f"{key} means nothing to `loss_type: {self.loss_type}`; leave it out, or take {' or '.join(types)}"
                )
        if self.beta == 0.0:
            for key in ("kl_estimator", "use_bias_correction_kl"):
                if key in self.changed_keys:
                    problems.append(f"{key} means nothing without beta; set beta, or leave it out")
        if self.loss_type == "vespo":
            # It takes the product of the ratios of an answer, and that of the corrections of its tokens.
            if self.importance_sampling_level != "token":
                problems.append(
                    "importance_sampling_level: `loss_type: vespo` takes whole answers by itself; leave it out"
                )
            if self.importance_sampling_correction not in ("none", "token_truncate", "token_mask"):
                problems.append(
                    f"importance_sampling_correction: found {self.importance_sampling_correction} with `loss_type: vespo`; "
                    "expected token_truncate or token_mask"
                )
        lower = self.importance_sampling_clip_min
        upper = self.importance_sampling_clip_max
        if self.importance_sampling_correction == "none":
            for key in ("importance_sampling_clip_max", "importance_sampling_clip_min"):
                if key in self.changed_keys:
                    problems.append(
                        f"{key} means nothing without importance_sampling_correction; leave it out"
                    )
        elif lower is None and upper is None:
            problems.append(
                "importance_sampling_correction: has no limit; set one of clip_max and clip_min"
            )
        elif lower is not None and upper is not None and lower > upper:
            problems.append(
                f"importance_sampling_clip_min is {lower:g}, importance_sampling_clip_max {upper:g}; expected no more "
                "than that"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


# Rewards that are built in, and the settings of each. The first are metrics of evaluations, the last six TRL's.
BUILT_IN: Final[dict[str, tuple[str, ...]]] = {
    "exact_match": (),
    "contains": (),
    "regex": ("pattern",),
    "numeric": (),
    "label": ("labels",),
    "json_valid": (),
    "json_equal": (),
    "rouge_l": (),
    "bleu": (),
    "chrf": (),
    "json_schema": ("schema",),
    "format": ("pattern",),
    "length": ("target", "max_tokens", "min_tokens"),
    "repetition": ("ngram_size", "max_penalty"),
    "accuracy_reward": (),
    "reasoning_accuracy_reward": ("reasoning_delimiters",),
    "get_cosine_scaled_reward": (
        "max_len", "min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct"
    ),
    "think_format_reward": (),
    "get_repetition_penalty_reward": ("ngram_size", "max_penalty"),
    "get_soft_overlong_punishment": ("max_completion_len", "soft_punish_cache"),
}  # fmt: skip

# Settings that a reward cannot do without.
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "regex": ("pattern",),
    "label": ("labels",),
    "format": ("pattern",),
    "get_cosine_scaled_reward": ("max_len",),
    "get_soft_overlong_punishment": ("max_completion_len", "soft_punish_cache"),
}

# Rewards that read answers as mathematics, by math_verify.
MATHEMATICS: Final = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "get_cosine_scaled_reward",
)

# Rewards that compare an answer with the right one.
COMPARING: Final = (
    "exact_match", "contains", "regex", "numeric", "label", "json_equal", "rouge_l", "bleu", "chrf", *MATHEMATICS
)  # fmt: skip

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
        description="Column of the records that holds the right answer; left out: the answer of the record, or its "
        "`solution`, `ground_truth`, `answer` or `target`.",
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
        known = BUILT_IN[self.name]
        for key, value in self.settings.items():
            if key not in known:
                problems.append(
                    f"settings.{key}: unknown key; `{self.name}` has {', '.join(known) or 'none'}"
                )
            else:
                problems += _problems_of_setting(key, value)
        for key in NEEDS.get(self.name, ()):
            if key not in self.settings:
                problems.append(f"settings.{key}: missing; `{self.name}` needs it")
        if self.name == "json_schema" and ("schema" in self.settings) == (self.file is not None):
            problems.append("json_schema: expected one of `settings: {schema: {…}}` and `file`")
        problems += self._problems_of_length()
        if self.column is not None and self.name not in COMPARING:
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
            return [f"settings.{limits[0]}: means nothing beside target; leave one of them out"]
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
        return [f"settings.{key}: found an empty text; expected what stands behind the reasoning"]
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


class _Run(Protocol):
    """As much of a config as rewards and drawn answers depend on."""

    @property
    def task(self) -> str: ...
    @property
    def grpo(self) -> GrpoConfig: ...
    @property
    def rewards(self) -> tuple[RewardConfig, ...]: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def lora(self) -> LoraConfig | None: ...
    @property
    def training(self) -> TrainingConfig: ...
    @property
    def kubernetes(self) -> KubernetesConfig | None: ...


def problems_of_run(run: _Run) -> list[str]:
    """Return the settings of a run that do not fit its rewards, each as a problem."""
    problems = _problems_of_samplers(run)
    if run.task != "grpo":
        if run.rewards:
            problems.append(
                f"rewards: mean nothing to `task: {run.task}`, but to `task: grpo`; leave them out, or change the task"
            )
        return problems
    if not run.rewards:
        problems.append(
            "rewards: missing; expected what rewards an answer, such as `rewards: [exact_match]` or a function of "
            "yours, `{file: rewards.py, function: solved}`"
        )
    titles = [reward.title for reward in run.rewards]
    for title in sorted({title for title in titles if titles.count(title) > 1}):
        problems.append(f"rewards: two are called {title}; give one of them another name")
    if run.rewards and not any(reward.weight for reward in run.rewards):
        problems.append("rewards: all weights are 0, so no answer is better than another")
    if run.data.overlong in ("truncate", "split"):
        problems.append(
            f"data.overlong: found {run.data.overlong} with `task: grpo`, whose prompts are asked whole; expected drop "
            "or error"
        )
    return problems + _problems_of_servers(run) + _not_built_yet(run)


def _problems_of_samplers(run: _Run) -> list[str]:
    """Return what is wrong with pods that draw answers, each as a problem."""
    kubernetes = run.kubernetes
    servers = run.grpo.servers
    has_samplers = kubernetes is not None and kubernetes.samplers is not None
    if not has_samplers:
        if servers is not None and not servers.urls:
            return ["grpo.servers.urls: missing; expected addresses, or kubernetes.samplers"]
        return []
    assert kubernetes is not None
    problems = []
    if run.task != "grpo" or servers is None:
        problems.append(
            "kubernetes.samplers: draw for `task: grpo` with `grpo.servers: {}`; add both, or leave the pods out"
        )
    elif servers.urls:
        problems.append(
            "grpo.servers.urls: kubernetes.samplers have addresses of their own; leave one of both out"
        )
    if kubernetes.kind not in ("jobset", "job"):
        problems.append(
            f"kubernetes.samplers: found kind {kubernetes.kind}; expected jobset or job, by which both groups of pods start "
            "and end together"
        )
    elif kubernetes.kind == "job" and kubernetes.queue is not None:
        problems.append(
            "kubernetes.queue: found kind job with kubernetes.samplers, which are two Jobs; Kueue lets each of them go by "
            "itself, so one may hold its GPUs and wait for the other. Expected kind jobset, of which Kueue lets all pods go "
            "together, or no queue"
        )
    return problems


def _problems_of_servers(run: _Run) -> list[str]:
    """Return the settings of a run that stock servers cannot draw answers for, each as a problem."""
    servers = run.grpo.servers
    if servers is None:
        return []
    problems = []
    if run.lora is None:
        problems.append(
            "grpo.servers: stock vLLM servers take new adapters, and no new weights of a whole model; set lora, or leave "
            "the servers out"
        )
    else:
        for key in ("use_dora", "modules_to_save", "target_parameters"):
            if getattr(run.lora, key):
                problems.append(
                    f"lora.{key}: vLLM takes no such adapter; leave it out, or leave grpo.servers out"
                )
        if run.lora.r > LORA_RANKS[-1]:
            problems.append(
                f"lora.r is {run.lora.r}; vLLM takes adapters of a rank of at most {LORA_RANKS[-1]}"
            )
    if servers.timeout_seconds >= run.training.timeout_seconds:
        problems.append(
            f"grpo.servers.timeout_seconds is {servers.timeout_seconds:g}; expected less than training.timeout_seconds, "
            f"{run.training.timeout_seconds:g}, after which ranks that wait are ended"
        )
    return problems


def _not_built_yet(run: _Run) -> list[str]:
    """Return the settings of a run that `task: grpo` cannot be combined with yet, each as a problem."""
    refused = {
        "training.global_batch_tokens": run.training.global_batch_tokens is not None,
    }
    problems = []
    for setting, is_set in refused.items():
        if is_set:
            key = setting.partition(":")[0]
            problems.append(f"{key}: `task: grpo` does not work with {setting} yet; leave it out")
    return problems
