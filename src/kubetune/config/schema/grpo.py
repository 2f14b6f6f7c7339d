"""Learning by reward, from answers that the model draws itself: `grpo`."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from kubetune.config.schema.base import AsTuple, Section, renamed
from kubetune.config.vllm import problems_of_addresses

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
        description="Address of each server, such as `http://10.0.0.7:8000`. A load balancer will not do, since an adapter "
        "would reach only one server behind it. The servers see the run directory at the same path. With "
        "`kubernetes.samplers` its pods are the servers.",
    )
    lag: Literal[0, 1] = Field(
        0,
        description="0: the newest weights draw the answers, and the run waits for them. 1: the weights before them do, so "
        "the servers draw while the run learns.",
    )
    timeout_seconds: float = Field(
        600.0,
        ge=1,
        description="The run ends if a server does not answer a prompt, in spite of retries, or does not load an adapter "
        "within this time.",
    )

    @model_validator(mode="after")
    def _urls_are_addresses(self) -> ServersConfig:
        problems = problems_of_addresses("urls", self.urls)
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
        description="How the terms of tokens become one number, and how ratios are bounded: the table in docs/grpo.md. "
        "`gspo` is `grpo` with `importance_sampling_level: sequence`.",
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
        description="Weigh by the ratio of training's probability to the sampler's: of each token, of the whole answer, "
        "or its geometric mean. Beyond the limits it is cut (`truncate`) or dropped (`mask`). With `servers`: "
        "`token_truncate`.",
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
        description="End the start if the kernel refuses a protection from reward functions (docs/grpo.md has the "
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
            if self.loss_type not in types:
                why = (
                    f"to `loss_type: {self.loss_type}`; leave it out, or take {' or '.join(types)}"
                )
                problems += self.set_in_vain([key], why)
        if self.beta == 0.0:
            keys: tuple[str, ...] = ("kl_estimator", "use_bias_correction_kl")
            problems += self.set_in_vain(keys, "without beta; set beta, or leave it out")
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
            keys = ("importance_sampling_clip_max", "importance_sampling_clip_min")
            problems += self.set_in_vain(
                keys, "without importance_sampling_correction; leave it out"
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
