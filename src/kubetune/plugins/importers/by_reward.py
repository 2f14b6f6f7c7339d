"""Learning by reward in other tools' files: GRPO's settings, under TRL's names and ms-swift's, and its rewards.

Two things are counted otherwise here:

    batches    there answers: 8 a process × 4 accumulated × 2 processes = 64    here prompts: 64 / 8 answers = 8
    drawing    steps_per_generation counts micro-batches there                  here optimizer steps
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from kubetune.config.schema.grpo import ONLY_WITH, GrpoConfig
from kubetune.plugins.importers import servers
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Table,
    as_list,
    carried,
    dropped,
    near,
    unneeded,
)
from kubetune.plugins.importers.preferences import take_loss
from kubetune.plugins.importers.shared import NO_EFFECT, numbers

_LOSSES: Final = {
    name: name for name in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
}
_SECTION: Final = "trl"  # of axolotl
_NO_METRIC: Final = "evaluations measure loss, and answers by evaluation.generate; see training.metric_for_best_model"
_PUNISHMENT: Final = "get_soft_overlong_punishment"
_COSINE: Final = "get_cosine_scaled_reward"
_MODULE_OF_TRL: Final = "trl.rewards."
# Rewards that TRL's command and ms-swift know by a name. A text says from which keys its settings are, or what they are
# where these are left out.
_KNOWN: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "TRL": {
        "accuracy_reward": {"name": "accuracy_reward", "column": "solution"},
        "reasoning_accuracy_reward": {"name": "reasoning_accuracy_reward", "column": "solution"},
        "think_format_reward": {"name": "think_format_reward"},
        _PUNISHMENT: {"name": _PUNISHMENT, "settings": {"max_completion_len": 1280, "soft_punish_cache": 256}},
    },
    "ms-swift": {
        "accuracy": {"name": "accuracy_reward"},
        "cosine": {
            "name": _COSINE,
            "settings": {
                "max_len": None, "min_value_wrong": -0.5, "max_value_wrong": 0.0, "min_value_correct": 0.5,
                "max_value_correct": 1.0,
            },
        },
        "format": {"name": "format", "settings": {"pattern": r"<think>.*?</think>\s*<answer>.*?</answer>"}},
        "soft_overlong": {"name": _PUNISHMENT, "settings": {"max_completion_len": None, "soft_punish_cache": 0}},
        "repetition": {"name": "repetition", "settings": {"ngram_size": 3, "max_penalty": -1.0}},
    },
}  # fmt: skip
# Keys of ms-swift for settings of a reward.
_SETTINGS: Final = {
    "max_completion_len": "soft_max_length",
    "soft_punish_cache": "soft_cache_length",
    "ngram_size": "repetition_n_grams",
    "max_penalty": "repetition_max_penalty",
    # It names values by the length that has them, TRL by which is the lower.
    "max_len": "cosine_max_len",
    "min_value_wrong": "cosine_min_len_value_wrong",
    "max_value_wrong": "cosine_max_len_value_wrong",
    "min_value_correct": "cosine_max_len_value_correct",
    "max_value_correct": "cosine_min_len_value_correct",
}
_DIFFERS_IN_READING: Final = (
    "there <answer>…</answer> marks a formula too, here \\boxed{…} and The final answer is $…$ do"
)
# What a reward of ours does otherwise than that of ms-swift.
_DIFFERS: Final = {
    "accuracy": _DIFFERS_IN_READING,
    "cosine": f"{_DIFFERS_IN_READING}; longer answers than max_len stay at its value here",
    "repetition": "there words are counted, here tokens",
}
_DEFAULTS_OF_SWIFT: Final = {
    "grpo.loss_type": "grpo",
    "grpo.beta": 0.04,
    "grpo.temperature": 0.9,
    "training.gradient_accumulation_steps": 1,
}


def learn(draft: Draft, key: str) -> tuple[Table, ...]:
    """Take the loss and the rewards. Return the table that counts then. `key`: names the kind of learning."""
    section = draft.take(_SECTION) if draft.tool.name == "axolotl" else None
    if isinstance(section, dict):
        _section(draft, section)
    else:
        _together(draft)
    if not draft.has("rewards"):
        draft.refuse(
            key if key in draft.theirs else next(iter(draft.theirs)),
            f"the file, read as one of {draft.tool.name}, names no reward that is here; expected reward_funcs with a "
            "function as module.function, or a reward that is built in (docs/grpo.md); --from names another tool",
        )
    if draft.tool.name == "ms-swift":
        for path, value in _DEFAULTS_OF_SWIFT.items():
            if draft.get(path.partition(".")[2]) is None:
                draft.assume(path, value)
    return (TABLE,)


def finish(draft: Draft) -> None:
    """Count batches in prompts, and take out what the tools assume of supervised fine-tuning alone."""
    draft.withdraw("data.train_on", "the answer that is drawn is what is trained")
    draft.withdraw("data.packing", "answers lie end to end in a packed batch, in any case")
    if draft.ours("data.overlong") not in (None, "drop", "error"):
        draft.withdraw("data.overlong", "a prompt is asked whole; longer ones are left out")
    if draft.origin("data.max_length") is None:
        draft.withdraw("data.max_length", "")
    for name in ("metric_for_best_model", "greater_is_better"):
        draft.withdraw(f"training.{name}", _NO_METRIC)
    # On is TRL's default since 1.16, which these tools do not build on yet.
    if draft.ours("grpo.beta") and draft.tool.name in ("axolotl", "ms-swift"):
        draft.assume("grpo.use_bias_correction_kl", False)
    if not draft.has("training.global_batch_size"):
        _batches(draft)
    servers.withdraw_unusable(draft)


def _together(draft: Draft) -> None:
    """Take keys that act on each other: the loss, which others depend on, the rewards, and the servers."""
    take_loss(draft, "loss_type", "grpo.loss_type", _LOSSES)
    _rewards(draft)
    servers.take(draft)


def _section(draft: Draft, items: Mapping[str, Any]) -> None:
    """Take axolotl's section `trl`, which has TRL's keys."""
    # What is drawn together is counted by keys that stand outside.
    outside = {}
    for key in ("micro_batch_size", "gradient_accumulation_steps"):
        if draft.get(key):
            outside[key] = draft.get(key)
    section = draft.section(_SECTION, {**items, **outside})
    section.taken.update(outside)
    _together(section)
    section.apply(TABLE.by_key())
    draft.notes.extend(section.notes)
    draft.settings |= section.settings
    draft.origins |= {path: [_SECTION] for path in section.settings}
    draft.comments |= section.comments
    draft.note("unneeded", _SECTION, "its keys are listed by name")


def _rewards(draft: Draft) -> None:
    """Take the reward functions and their weights: built in here too, or `module.function` of the user's."""
    weights = as_list(draft.take("reward_weights"))
    rewards = []
    differences = []
    for number, name in enumerate(map(str, as_list(draft.take("reward_funcs")))):
        reward = _reward(draft, name)
        if isinstance(reward, str):
            draft.drop(f"reward_funcs: {name}", reward)
            continue
        differs = _DIFFERS.get(name)
        if differs and draft.tool.name == "ms-swift":
            differences.append(f"{name}: {differs}")
        if number < len(weights) and weights[number] != 1:
            reward["weight"] = float(weights[number])
        rewards.append(reward)
    if not rewards:
        return
    outcome = near(rewards, "; ".join(differences)) if differences else carried(rewards)
    draft.write("reward_funcs", outcome, "rewards")
    draft.ignore("each reward has its weight beside it", "reward_weights")


def _reward(draft: Draft, name: str) -> dict[str, Any] | str:
    """Return our reward for a name of theirs, or why there is none."""
    known = _KNOWN.get(draft.tool.name, {}).get(name)
    if known is None and name.startswith(_MODULE_OF_TRL):
        known = _KNOWN["TRL"].get(name.rpartition(".")[2])
    if known is None:
        module, _, function = name.rpartition(".")
        if "/" in name:
            # TRL calls it by the last part of its name too.
            title = re.sub(r"[^\w.-]", "-", name.rstrip("/").rpartition("/")[2])
            return {"reward_model": name, "name": title}
        if not module:
            return "not built in here; write a function of yours: rewards: [{file: rewards.py, function: …}]"
        return {"file": f"{module.replace('.', '/')}.py", "function": function}

    reward = dict(known)
    if draft.tool.name == "ms-swift" and "settings" in known:
        longest = draft.get("max_completion_length") or GrpoConfig().max_completion_length
        settings = {}
        for setting, default in known["settings"].items():
            key = _SETTINGS.get(setting, setting)
            value = draft.get(key)
            if value is None:
                value = longest if default is None else default
            settings[setting] = value
            draft.ignore("a setting of the reward, in rewards", key)
        reward["settings"] = settings
    return reward


def _batches(draft: Draft) -> None:
    """Write a step's prompts in place of its answers, which the tools count."""
    path = "training.gradient_accumulation_steps"
    size = draft.ours("training.per_device_train_batch_size", 8)
    accumulated = draft.ours(path, 1)
    world = _world(draft)
    generations = draft.ours("grpo.num_generations", GrpoConfig().num_generations)
    answers = size * accumulated * world
    prompts = max(1, answers // generations)
    why = (
        f"a step there has {size} answers × {accumulated} × {world} processes = {answers}, here {prompts} prompts with "
        f"{generations} answers; multiply by the processes if there are more"
    )
    key = draft.origin(path)
    draft.withdraw(path, "")
    if key is None:
        draft.assume("training.global_batch_size", prompts, why)
    else:
        draft.write(key, near(prompts, why), "training.global_batch_size")
    draft.comments["training.global_batch_size"] = f"prompts; {answers} answers there"


def _steps_per_generation(value: Any, draft: Draft) -> Outcome:
    """Carry how many optimizer steps learn from answers that are drawn together."""
    accumulated = draft.get("gradient_accumulation_steps") or 1
    if value <= accumulated:
        return unneeded("answers are drawn before each step, by the same weights")
    if value % accumulated == 0:
        return carried(value // accumulated)
    return near(math.ceil(value / accumulated), "micro-batches there, whole optimizer steps here")


def _generation_batch_size(value: Any, draft: Draft) -> Outcome:
    """Carry how many answers are drawn together, as the optimizer steps that learn from them.

    TRL takes one of this and `steps_per_generation`. It counts answers, of all processes.
    """
    if draft.get("steps_per_generation"):
        return unneeded("it follows from grpo.steps_per_generation and the prompts of a step")
    accumulated = draft.get("gradient_accumulation_steps") or 1
    answers = _size(draft) * accumulated * _world(draft)
    if value <= answers:
        return unneeded("answers are drawn before each step, by the same weights")
    why = f"{value} answers are drawn together there, and a step learns from {answers} of them"
    return near(math.ceil(value / answers), why)


def _size(draft: Draft) -> int:
    """Return the answers of a micro-batch."""
    default = 1 if draft.tool.name == "ms-swift" else 8
    keys = ("per_device_train_batch_size", "micro_batch_size")
    sizes = [int(draft.get(key)) for key in keys if draft.get(key)]
    return sizes[0] if sizes else default


def _world(draft: Draft) -> int:
    """Return the processes of the run, as far as the file or the command says."""
    return int(draft.ours("compute.processes", 1)) * int(draft.ours("compute.nodes", 1))


def _of_loss(keys: str, name: str) -> Row:
    """Return the row of a key that says nothing to some losses."""

    def says_nothing(draft: Draft) -> str:
        loss = draft.ours("grpo.loss_type", "dapo")
        return "" if loss in ONLY_WITH[name] else f"says nothing to {loss}"

    return Row(keys, f"grpo.{name}", unless=says_nothing)


def _without_beta(draft: Draft) -> str:
    """Say why a key of the divergence says nothing."""
    return "" if draft.get("beta") else "says nothing without beta"


ALL_TOKENS: Final = numbers(int, unneeded("all tokens, as here"))

# Keys of learning by reward; each counts before the tool's own row for it.
TABLE: Final = Table(
    same={
        "grpo.num_generations": "num_generations",
        "grpo.max_completion_length": "max_completion_length max_new_tokens response_length",
        "grpo.temperature": "temperature",
        "grpo.top_p": "top_p",
        "grpo.min_p": "min_p",
        "grpo.num_iterations": "num_iterations",
        "grpo.beta": "beta",
        "grpo.mask_truncated_completions": "mask_truncated_completions overlong_filter",
    },
    rows=[
        Row("top_k", "grpo.top_k", other=ALL_TOKENS),
        Row("steps_per_generation", "grpo.steps_per_generation", other=_steps_per_generation),
        Row("generation_batch_size", "grpo.steps_per_generation", other=_generation_batch_size),
        Row("truncation_strategy", "data.overlong", {"delete": "drop"},
            near("drop", "a prompt is asked whole or left out")),
        Row("use_bias_correction_kl", "grpo.use_bias_correction_kl", unless=_without_beta),
        *[_of_loss(name, name) for name in ONLY_WITH if not name.startswith("sapo")],
        _of_loss("sapo_temperature_pos tau_pos", "sapo_temperature_pos"),
        _of_loss("sapo_temperature_neg tau_neg", "sapo_temperature_neg"),
        Row("importance_sampling_level", "grpo.importance_sampling_level", {"token": "token", "sequence": "sequence"},
            dropped("token and sequence are there")),
        Row("scale_rewards", "grpo.scale_rewards",
            {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"},
            dropped("group, batch and none are there")),
    ],
    dropped={
        "advantage_estimator": ("GRPO's is the only one", "grpo"),
        "multi_objective_aggregation": ("rewards are added up first", "sum_then_normalize"),
        "repetition_penalty": ("tokens are drawn by the model's own probabilities, which the training knows", 1.0),
        "max_prompt_length": "data.max_length counts prompt and right answer",
        "num_generations_eval": "see evaluation.generate",
        "use_vllm": ("the model draws its answers itself; grpo.servers names stock vLLM servers that do", False),
        "vllm_server_timeout": "how long to wait for a server that starts; see grpo.servers.timeout_seconds",
        "kl_in_reward": ("the divergence is a part of the loss", False),
        "sync_ref_model": ("the reference stays as it is", False),
        "ref_model_mixup_alpha ref_model_sync_steps": "the reference stays as it is",
        "dynamic_sample": ("groups without variance are counted, and no others are drawn", False),
        "top_entropy_quantile": ("all tokens are learnt from", 1.0),
        "entropy_coef": ("entropy is measured, and has no part in the loss", 0),
        "use_adaptive_entropy": ("entropy is measured, and has no part in the loss", False),
        "reward_model reward_model_name_or_path reward_model_plugin": "name it in rewards: [{reward_model: …}]",
        "metric_for_best_model greater_is_better": _NO_METRIC,
    },
    unneeded={
        "vllm_group_port vllm_server_group_port": "servers load adapter files, and no weights are sent",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_cap rollout_importance_sampling_mode "
        "rollout_importance_sampling_threshold":
            "the model draws its answers itself, so there is nothing to correct",
        "loss_scale assistant_only_loss completion_only_loss": "the answer that is drawn is what is trained",
        "log_completions num_completions_to_print log_unique_prompts wandb_log_unique_prompts log_entropy":
            "answers are kept in rollouts/, see `kubetune rollouts`",
        "shuffle_dataset ds3_gather_for_generation cast_lm_head_to_fp32 disable_dropout cache_implementation "
        "use_liger_loss max_resample_times sleep_level task_type packing sample_packing": NO_EFFECT,
    },
)  # fmt: skip
