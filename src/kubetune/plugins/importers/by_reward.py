"""Learning by reward in other tools' files: GRPO's settings, under TRL's names and ms-swift's, and its rewards.

Two things are counted otherwise here:

    batches    there answers: 8 a process × 4 accumulated × 2 processes = 64    here prompts: 64 / 8 answers = 8
    drawing    steps_per_generation counts micro-batches there                  here optimizer steps
"""

from __future__ import annotations

import math
from typing import Any

from kubetune.config.schema.grpo import ONLY_WITH, GrpoConfig
from kubetune.plugins.importers import servers
from kubetune.plugins.importers.common.training_keys import (
    NO_EFFECT,
    REFERENCE_STAYS,
    STEP,
    loss,
    numbers,
)
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Table,
    carried,
    dropped,
    near,
    unneeded,
)
from kubetune.plugins.importers.reward_names import KEYS_OF_SWIFT, rewards

_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
_NO_METRIC = "evaluations measure loss, and answers by evaluation.generate; see training.metric_for_best_model"


def finish(draft: Draft) -> None:
    """Count batches in prompts. Raise ConfigError without a reward."""
    if "reward_funcs" in draft.unknown:
        draft.refuse("reward_funcs", draft.unknown["reward_funcs"])
    if not draft.has("rewards"):
        draft.refuse(
            draft.kind_key if draft.kind_key in draft.theirs else next(iter(draft.theirs)),
            f"read as a file of {draft.tool.name}, it names no reward that kubetune has; set reward_funcs to "
            "module.function or to a built-in reward (docs/grpo.md), or name the tool by --from",
        )
    count_prompts(draft, "grpo.num_generations", GrpoConfig().num_generations)


def count_prompts(draft: Draft, of_prompt: str, default: int) -> None:
    """Write a step's prompts in place of its answers, which the tools count.

    `of_prompt`: the setting of the answers to a prompt, which has this default.
    """
    if draft.has("training.global_batch_size"):
        return
    path = "training.gradient_accumulation_steps"
    if not draft.undecided.keys().isdisjoint((*STEP, of_prompt)):
        why = "prompts of a step are counted, and a part of their number is not known; set training.global_batch_size"
        draft.withdraw(path, why)
        return
    size, accumulated, world = _step(draft)
    generations = draft.ours(of_prompt, default)
    answers = size * accumulated * world
    prompts = max(1, answers // generations)
    why = (
        f"a step of the tool has {size} answers × {accumulated} × {world} processes = {answers}, one of kubetune "
        f"{prompts} prompts with {generations} answers; multiply by the processes if there are more"
    )
    key = draft.origin(path)
    draft.withdraw(path, "")
    if key is None:
        draft.assume("training.global_batch_size", prompts, why)
    else:
        draft.write(key, near(prompts, why), "training.global_batch_size")
    draft.comments["training.global_batch_size"] = f"prompts; {answers} answers in the file"


def _step(draft: Draft) -> tuple[int, int, int]:
    """Return the answers of a micro-batch, the micro-batches of a process, and the processes of a step."""
    size = 8
    for key in ("per_device_train_batch_size", "micro_batch_size"):
        size = int(draft.get(key) or size)
    # A shell expression, as in ms-swift's scripts, counts samples by itself.
    accumulated = draft.get("gradient_accumulation_steps")
    world = draft.ours("compute.processes", 1) * draft.ours("compute.nodes", 1)
    return size, accumulated if isinstance(accumulated, int) else 1, int(world)


def _drawn_together(value: Any, draft: Draft) -> Outcome:
    """Carry how many optimizer steps learn from answers that are drawn together.

    TRL names it in micro-batches (`steps_per_generation`), or in answers of all processes (`generation_batch_size`).
    """
    size, accumulated, world = _step(draft)
    of_step = accumulated
    if draft.at == "generation_batch_size":
        of_step = size * accumulated * world
    if value <= of_step:
        return unneeded("answers are drawn before each step, by the same weights")
    if value % of_step == 0:
        return carried(value // of_step)
    return near(math.ceil(value / of_step), "kubetune counts whole optimizer steps")


ALL_TOKENS = numbers(int, unneeded("all tokens, as here"))

# Keys of learning by reward; each counts before the tool's own row for it.
TABLE = Table(
    same={
        "grpo.num_generations": "num_generations",
        "grpo.max_completion_length": "max_completion_length max_new_tokens response_length",
        "grpo.temperature": "temperature",
        "grpo.top_p": "top_p",
        "grpo.min_p": "min_p",
        "grpo.num_iterations": "num_iterations",
        "grpo.beta": "beta",
        "grpo.mask_truncated_completions": "mask_truncated_completions overlong_filter",
        "grpo.use_bias_correction_kl": "use_bias_correction_kl",
        **{f"grpo.{name}": name for name in ONLY_WITH},
        "grpo.sapo_temperature_pos": "sapo_temperature_pos tau_pos",
        "grpo.sapo_temperature_neg": "sapo_temperature_neg tau_neg",
    },
    rows=[
        Row("top_k", "grpo.top_k", other=ALL_TOKENS),
        Row("reward_funcs", "rewards", other=rewards),
        loss("loss_type", "grpo.loss_type", {name: name for name in _LOSSES}),
        Row("steps_per_generation generation_batch_size", "grpo.steps_per_generation", other=_drawn_together),
        Row("max_prompt_length", "data.max_length",
            other=lambda value, _: near(value, "prompt and right answer are counted, and longer records left out")),
        Row("truncation_strategy", "data.overlong", {"delete": "drop"},
            near("drop", "a prompt is asked whole or left out")),
        Row("importance_sampling_level", "grpo.importance_sampling_level", {"token": "token", "sequence": "sequence"},
            dropped("kubetune has token and sequence")),
        Row("scale_rewards", "grpo.scale_rewards",
            {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"},
            dropped("kubetune has group, batch and none")),
    ],
    dropped={
        "advantage_estimator": ("GRPO's is the only one", "grpo"),
        "multi_objective_aggregation": ("rewards are added up first", "sum_then_normalize"),
        "repetition_penalty": ("tokens are drawn by the model's own probabilities, which the training knows", 1.0),
        "num_generations_eval": "see evaluation.generate",
        "vllm_server_timeout": "how long to wait for a server that starts; see grpo.servers.timeout_seconds",
        "kl_in_reward": ("the divergence is a part of the loss", False),
        **REFERENCE_STAYS,
        "dynamic_sample": ("groups without variance are counted, and no others are drawn", False),
        "top_entropy_quantile": ("all tokens are learnt from", 1.0),
        "entropy_coef use_adaptive_entropy": ("entropy is measured, and has no part in the loss", 0, False),
        "reward_model reward_model_name_or_path reward_model_plugin": "name it in rewards: [{reward_model: …}]",
        "metric_for_best_model greater_is_better": _NO_METRIC,
    },
    unneeded={
        "vllm_group_port vllm_server_group_port": "servers load adapter files, and no weights are sent",
        "reward_weights": "each reward has its weight beside it",
        KEYS_OF_SWIFT: "a setting of the reward, in rewards",
        "loss_scale assistant_only_loss completion_only_loss": "the answer that is drawn is what is trained",
        "log_completions num_completions_to_print log_unique_prompts wandb_log_unique_prompts log_entropy":
            "answers are kept in rollouts/, see `kubetune rollouts`",
        "shuffle_dataset ds3_gather_for_generation cast_lm_head_to_fp32 disable_dropout cache_implementation "
        "use_liger_loss max_resample_times sleep_level task_type packing sample_packing": NO_EFFECT,
    },
)  # fmt: skip
TABLES = (TABLE, servers.TABLE)
