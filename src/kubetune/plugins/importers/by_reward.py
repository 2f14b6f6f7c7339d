"""Learning by reward in other tools' files: GRPO's settings, under TRL's names and ms-swift's, and its rewards.

Read before a tool's own table, which knows supervised fine-tuning. Two things are counted otherwise here:

    batches    there answers: 8 a process × 4 accumulated × 2 processes = 64    here prompts: 64 / 8 answers = 8
    drawing    steps_per_generation counts micro-batches there                  here optimizer steps
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kubetune.config.schema.grpo import ONLY_WITH, GrpoConfig
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    as_list,
    carried,
    drop,
    dropped,
    ignore,
    near,
    unneeded,
)

# Keys that only files of learning by reward have; a YAML file of TRL does not name its trainer.
MARKS: Final = ("num_generations", "reward_funcs")

_LOSSES: Final = {
    name: name for name in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
}
_BY_PARSING: Final = "there mathematics is parsed (math-verify), here the last numbers are compared"
_THINK_AND_ANSWER: Final = r"<think>.*?</think>\s*<answer>.*?</answer>"
_SECTION: Final = "trl"  # of axolotl


@dataclass(frozen=True)
class Reward:
    """Our reward for one of theirs."""

    name: str
    settings: Mapping[str, Any] | None = None
    differs: str = ""  # what is only near, in words


# Rewards that TRL's command and ms-swift know by a name.
_NUMERIC: Final = Reward("numeric", differs=_BY_PARSING)
_KNOWN: Final[Mapping[str, Mapping[str, Reward]]] = {
    "TRL": {
        "accuracy_reward": _NUMERIC,
        "reasoning_accuracy_reward": _NUMERIC,
        "think_format_reward": Reward("think_format_reward"),
        "get_soft_overlong_punishment": Reward(
            "get_soft_overlong_punishment", {"max_completion_len": 1280, "soft_punish_cache": 256}
        ),
    },
    "ms-swift": {
        "accuracy": _NUMERIC,
        "format": Reward("format", {"pattern": _THINK_AND_ANSWER}),
    },
}


def is_by_reward(draft: Draft) -> bool:
    """Return True for a run that learns by reward."""
    return bool(draft.ours("task") == "grpo")


def learn(draft: Draft) -> list[Row]:
    """Take what says that answers are rewarded, and how. Return the rows that count then, or none."""
    key = _key_of_method(draft)
    if not key:
        return []
    if key in MARKS:
        draft.assume("task", "grpo", f"seen from `{key}`")
    else:
        draft.carry(key, "task", "grpo")
    section = draft.take(_SECTION) if draft.tool.name == "axolotl" else None
    if isinstance(section, dict):
        _section(draft, section)
    else:
        _loss(draft)
        _rewards(draft)
    if not draft.has("rewards"):
        draft.refuse(
            key if key in draft.theirs else next(iter(draft.theirs)),
            "the file names no reward that is here; expected reward_funcs with a function as module.function, or a "
            "reward that is built in (docs/grpo.md)",
        )
    if draft.tool.name == "TRL" and draft.get("learning_rate") is None:
        draft.assume("training.learning_rate", 1e-6)
    if draft.tool.name == "ms-swift":
        _defaults_of_swift(draft)
    return ROWS


def finish(draft: Draft) -> None:
    """Count batches in prompts, and take out what the tools assume of supervised fine-tuning alone."""
    if not is_by_reward(draft):
        return
    draft.withdraw("data.train_on", "the answer that is drawn is what is trained")
    draft.withdraw("data.packing", "answers lie end to end in a packed batch, in any case")
    if draft.ours("data.overlong") not in (None, "drop", "error"):
        draft.withdraw("data.overlong", "a prompt is asked whole; longer ones are left out")
    if draft.origins.get("data.max_length") is None:
        draft.withdraw("data.max_length", "")
    for name in ("metric_for_best_model", "greater_is_better"):
        draft.withdraw(f"training.{name}", _NO_METRIC)
    # On is TRL's default since 1.16, which these tools do not build on yet.
    if draft.ours("grpo.beta") and draft.tool.name in ("axolotl", "ms-swift"):
        draft.assume("grpo.use_bias_correction_kl", False)
    if not draft.has("training.global_batch_size"):
        _batches(draft)


def _key_of_method(draft: Draft) -> str:
    """Return the key that says that answers are rewarded, or the command; empty where none does."""
    for key in ("rl", "rlhf_type"):
        if draft.get(key) is not None:
            return key if draft.get(key) == "grpo" else ""
    if draft.command == "grpo":
        return "trl grpo"
    if draft.tool.name == "TRL" and not draft.command:
        for key in MARKS:
            if draft.get(key) is not None:
                return key
    return ""


def _section(draft: Draft, items: Mapping[str, Any]) -> None:
    """Take axolotl's section `trl`, which has TRL's keys."""
    section = draft.section(_SECTION, items)
    _loss(section)
    _rewards(section)
    section.apply(ROWS)
    draft.notes.extend(section.notes)
    for path, value in section.settings.items():
        draft.settings[path] = value
        draft.origins[path] = _SECTION
    draft.comments |= section.comments
    draft.write(_SECTION, unneeded("its keys are listed by name"))


def _loss(draft: Draft) -> None:
    """Take the loss first: what other keys say depends on it. Raise ConfigError where we do not have it."""
    key = "loss_type"
    value = draft.take(key)
    if value is None:
        return
    name = value[0] if isinstance(value, list) and len(value) == 1 else value
    if name not in _LOSSES:
        expected = ", ".join(_LOSSES)
        draft.refuse(key, f"{value} is a loss that kubetune does not have; expected {expected}")
    draft.carry(key, "grpo.loss_type", _LOSSES[name])


def _rewards(draft: Draft) -> None:
    """Take the reward functions and their weights: built in here too, or `module.function` of the user's."""
    listed = draft.take("reward_funcs")
    weights = as_list(draft.take("reward_weights") or [])
    rewards = []
    differences = []
    for number, name in enumerate(map(str, as_list(listed) if listed is not None else [])):
        reward, differs = _reward(draft, name)
        if reward is None:
            draft.drop(f"reward_funcs: {name}", differs)
            continue
        if differs:
            differences.append(f"{name}: {differs}")
        if number < len(weights) and weights[number] != 1:
            reward["weight"] = float(weights[number])
        rewards.append(reward)
    if not rewards:
        return
    outcome = carried(rewards)
    if differences:
        outcome = near(rewards, "; ".join(differences))
    draft.write("reward_funcs", outcome, "rewards")
    draft.ignore("reward_weights", "each reward has its weight beside it")


def _reward(draft: Draft, name: str) -> tuple[dict[str, Any] | None, str]:
    """Return our reward for a name of theirs, and what differs; None and the reason where there is none."""
    known = _KNOWN.get(draft.tool.name, {}).get(name)
    if draft.tool.name == "ms-swift":
        known = known or _of_swift(draft, name)
    if known is not None:
        reward: dict[str, Any] = {"name": known.name}
        if known.settings:
            reward["settings"] = dict(known.settings)
        return reward, known.differs
    module, _, function = name.rpartition(".")
    if "/" in name:
        # TRL calls it by the last part of its name too.
        title = re.sub(r"[^\w.-]", "-", name.rstrip("/").rpartition("/")[2])
        return {"reward_model": name, "name": title}, ""
    if not module:
        why = "not built in here; write a function of yours: rewards: [{file: rewards.py, function: …}]"
        return None, why
    return {"file": f"{module.replace('.', '/')}.py", "function": function}, ""


def _of_swift(draft: Draft, name: str) -> Reward | None:
    """Return our reward for one of ms-swift's whose settings are keys of the file."""
    longest = draft.get("max_completion_length") or GrpoConfig().max_completion_length
    if name == "soft_overlong":
        settings = {
            "max_completion_len": draft.take("soft_max_length") or longest,
            "soft_punish_cache": draft.take("soft_cache_length") or 0,
        }
        for key in ("soft_max_length", "soft_cache_length"):
            draft.ignore(key, "a setting of the reward, in rewards")
        return Reward("get_soft_overlong_punishment", settings)
    if name == "repetition":
        settings = {
            "ngram_size": draft.take("repetition_n_grams") or 3,
            "max_penalty": draft.take("repetition_max_penalty") or -1.0,
        }
        for key in ("repetition_n_grams", "repetition_max_penalty"):
            draft.ignore(key, "a setting of the reward, in rewards")
        return Reward("repetition", settings, "there words are counted, here tokens")
    return None


def _defaults_of_swift(draft: Draft) -> None:
    """Write down what ms-swift takes for GRPO where the file leaves it out."""
    defaults = {"loss_type": "grpo", "beta": 0.04, "temperature": 0.9}
    for name, value in defaults.items():
        if draft.get(name) is None:
            draft.assume(f"grpo.{name}", value)
    if draft.get("gradient_accumulation_steps") is None:
        draft.assume("training.gradient_accumulation_steps", 1)


def _batches(draft: Draft) -> None:
    """Write a step's prompts in place of its answers, which the tools count."""
    path = "training.gradient_accumulation_steps"
    size = draft.ours("training.per_device_train_batch_size", 8)
    accumulated = draft.ours(path, 1)
    world = draft.ours("compute.processes", 1) * draft.ours("compute.nodes", 1)
    generations = draft.ours("grpo.num_generations", GrpoConfig().num_generations)
    answers = size * accumulated * world
    prompts = max(1, answers // generations)
    why = (
        f"a step there has {size} answers × {accumulated} × {world} processes = {answers}, here {prompts} prompts with "
        f"{generations} answers; multiply by the processes if there are more"
    )
    key = draft.origins.get(path)
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


def _of_loss(keys: str, name: str) -> Row:
    """Return the row of a key that says nothing to some losses."""

    def says_nothing(draft: Draft) -> str:
        loss = draft.ours("grpo.loss_type", "dapo")
        return "" if loss in ONLY_WITH[name] else f"says nothing to {loss}"

    return Row(keys, f"grpo.{name}", unless=says_nothing)


def _without_beta(draft: Draft) -> str:
    """Say why a key of the divergence says nothing."""
    return "" if draft.get("beta") else "says nothing without beta"


def _scale_rewards(value: Any, _: Draft) -> Outcome:
    """Carry by what advantages are divided."""
    if isinstance(value, bool):
        return carried("group" if value else "none")
    if value in ("group", "batch", "none"):
        return carried(value)
    return dropped(f"{value} is not there; group, batch and none are")


def _top_k(value: Any, _: Draft) -> Outcome:
    """Carry how many tokens are drawn from; -1 means all."""
    return unneeded("all tokens, as here") if value <= 0 else carried(value)


_NO_METRIC: Final = "evaluations measure loss, and answers by evaluation.generate; see training.metric_for_best_model"
_SAME_MODEL: Final = "the model draws its answers itself, so there is nothing to correct"

# Keys of learning by reward; each counts before the tool's own row for it.
ROWS: Final = [
    # Drawing.
    Row("num_generations", "grpo.num_generations"),
    Row("max_completion_length max_new_tokens response_length", "grpo.max_completion_length"),
    Row("temperature", "grpo.temperature"),
    Row("top_p", "grpo.top_p"),
    Row("top_k", "grpo.top_k", _top_k),
    Row("min_p", "grpo.min_p"),
    Row("num_iterations", "grpo.num_iterations"),
    Row("steps_per_generation", "grpo.steps_per_generation", _steps_per_generation),
    Row("max_prompt_length", rule=lambda *_: dropped("data.max_length counts prompt and right answer")),
    Row("truncation_strategy", "data.overlong", values={"delete": "drop"}, near="drop",
        reason="a prompt is asked whole or left out"),
    # The loss.
    Row("beta", "grpo.beta"),
    Row("use_bias_correction_kl", "grpo.use_bias_correction_kl", unless=_without_beta),
    _of_loss("epsilon", "epsilon"),
    _of_loss("epsilon_high", "epsilon_high"),
    _of_loss("delta", "delta"),
    _of_loss("sapo_temperature_pos tau_pos", "sapo_temperature_pos"),
    _of_loss("sapo_temperature_neg tau_neg", "sapo_temperature_neg"),
    _of_loss("vespo_k_pos", "vespo_k_pos"),
    _of_loss("vespo_lambda_pos", "vespo_lambda_pos"),
    _of_loss("vespo_k_neg", "vespo_k_neg"),
    _of_loss("vespo_lambda_neg", "vespo_lambda_neg"),
    Row("importance_sampling_level", "grpo.importance_sampling_level",
        values={"token": "token", "sequence": "sequence"}),
    Row("scale_rewards", "grpo.scale_rewards", _scale_rewards),
    Row("mask_truncated_completions overlong_filter", "grpo.mask_truncated_completions"),
    # Values that are ours anyway; any other is dropped.
    Row("advantage_estimator", same={"grpo": "the mean of the group, as here"}, reason="GRPO's is the only one"),
    Row("multi_objective_aggregation", same={"sum_then_normalize": "as here"}, reason="rewards are added up first"),
    Row("repetition_penalty", same={1.0: "off, as here"},
        reason="tokens are drawn by the model's own probabilities, which the training knows"),
    Row("num_generations_eval", rule=lambda *_: dropped("see evaluation.generate")),
    # Not done here; a value behind the reason is that which switches it off there.
    drop("use_vllm", "the model draws its answers itself; grpo.servers names stock vLLM servers that do", False),
    drop("kl_in_reward", "the divergence is a part of the loss", False),
    drop("sync_ref_model", "the reference stays as it is", False),
    drop("ref_model_mixup_alpha ref_model_sync_steps", "the reference stays as it is"),
    drop("dynamic_sample", "groups without variance are counted, and no others are drawn", False),
    drop("top_entropy_quantile", "all tokens are learnt from", 1.0, 1),
    drop("entropy_coef", "entropy is measured, and has no part in the loss", 0.0, 0),
    drop("use_adaptive_entropy", "entropy is measured, and has no part in the loss", False),
    drop("reward_model reward_model_name_or_path reward_model_plugin", "name it in rewards: [{reward_model: …}]"),
    drop("metric_for_best_model greater_is_better", _NO_METRIC),
    # Not needed.
    ignore("generation_batch_size", "it follows from grpo.steps_per_generation and the prompts of a step"),
    ignore("vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
           "vllm_importance_sampling_clip_min vllm_importance_sampling_cap rollout_importance_sampling_mode "
           "rollout_importance_sampling_threshold", _SAME_MODEL),
    ignore("loss_scale assistant_only_loss completion_only_loss", "the answer that is drawn is what is trained"),
    ignore("log_completions num_completions_to_print log_unique_prompts wandb_log_unique_prompts log_entropy",
           "answers are kept in rollouts/, see `kubetune rollouts`"),
    ignore("shuffle_dataset ds3_gather_for_generation cast_lm_head_to_fp32 disable_dropout cache_implementation "
           "use_liger_loss max_resample_times sleep_level task_type packing sample_packing",
           "has no counterpart, and no effect on the result"),
]  # fmt: skip
