"""verl's configs of GRPO: nested YAML for hydra, or `key.of.section=value` on the command line.

Its batches are counted in prompts, as here: `data.train_batch_size` prompts are asked together, and each optimizer step
learns from `ppo_mini_batch_size` of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Tool,
    as_list,
    carried,
    drop,
    dropped,
    ignore,
    names,
    near,
    switch,
    unneeded,
)
from kubetune.plugins.importers.foreign import Foreign

_ACTOR: Final = "actor_rollout_ref.actor."
_ROLLOUT: Final = "actor_rollout_ref.rollout."
_MODEL: Final = "actor_rollout_ref.model."

_LOSSES: Final = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
_ESTIMATORS: Final = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip


def flattened(foreign: Foreign) -> Foreign:
    """Return settings by their whole keys: `{actor_rollout_ref: {rollout: {n: 8}}}` is `actor_rollout_ref.rollout.n`."""
    settings: dict[str, Any] = {}
    lines: dict[str, int] = {}

    def add(prefix: str, value: Any, line: int) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), item, line)
        else:
            settings[prefix] = value
            lines[prefix] = line

    for key, value in foreign.settings.items():
        # `+key=value` and `++key=value` are hydra's words for a key that the defaults do not have.
        add(key.lstrip("+"), value, foreign.lines.get(key, 1))
    return replace(foreign, settings=settings, lines=lines)


def _method(draft: Draft) -> None:
    """Take the estimator of advantages, of which GRPO's is the only one, and LoRA."""
    key = "algorithm.adv_estimator"
    value = draft.take(key)
    if value != "grpo":
        draft.refuse(
            key if value else next(iter(draft.theirs)),
            f"{value or 'gae, its default,'} is not there; expected algorithm.adv_estimator: grpo",
        )
    draft.carry(key, "task", "grpo")
    key = f"{_MODEL}lora_rank"
    rank = draft.take(key)
    if rank:
        draft.carry(key, "lora.r", rank)
        draft.assume("lora", None)
    else:
        draft.ignore(key, "0: every parameter is trained")


def _data(draft: Draft) -> None:
    """Take the files of both splits, and the column of the prompt."""
    column = draft.take("data.prompt_key") or "prompt"
    for key, path in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
        files = draft.take(key)
        if files is None:
            continue
        sources = []
        for file in as_list(str(files).strip("[]") if isinstance(files, str) else files):
            # $HOME is the one variable that is the same in any shell.
            source: dict[str, Any] = {"path": str(file).strip("'\"").replace("$HOME/", "~/")}
            if column not in ("prompt", "messages"):
                source["columns"] = {"prompt": column}
            sources.append(source)
        draft.carry(key, path, sources)
    draft.ignore("data.prompt_key", "named in the sources of data.train")


def _rewards(draft: Draft) -> None:
    """Take the user's function, or what comes near verl's own, which it chooses by `data_source`."""
    key = "custom_reward_function.path"
    other = "reward.custom_reward_function.path"
    if draft.get(key) is None and draft.get(other) is not None:
        key = other
    path = draft.take(key)
    if path is None:
        why = "verl chooses a function by the column data_source (gsm8k …); the last numbers are compared here"
        draft.assume("rewards", [{"name": "numeric"}], why)
        draft.comments["rewards"] = why
        return
    name_key = key.removesuffix("path") + "name"
    name = draft.take(name_key) or "compute_score"
    draft.carry(key, "rewards", [{"file": str(path), "function": name}])
    draft.ignore(name_key, "named in rewards")


def _batches(draft: Draft) -> None:
    """Take the prompts of an optimizer step, and how many steps learn from answers that are drawn together."""
    asked_key = "data.train_batch_size"
    step_key = f"{_ACTOR}ppo_mini_batch_size"
    asked = draft.take(asked_key) or 1024
    of_step = draft.take(step_key) or 256
    if draft.get(step_key) is not None:
        draft.carry(step_key, "training.global_batch_size", of_step)
    else:
        draft.assume("training.global_batch_size", of_step)
    steps = max(1, asked // of_step)
    outcome = carried(steps)
    if asked % of_step:
        outcome = near(steps, f"{asked} prompts are no whole number of steps of {of_step}")
    if draft.get(asked_key) is not None:
        draft.write(asked_key, outcome, "grpo.steps_per_generation")
    elif steps > 1:
        draft.assume("grpo.steps_per_generation", steps)


def _divergence(draft: Draft) -> None:
    """Take the divergence from the model before training, which a switch turns on."""
    is_on = draft.take(f"{_ACTOR}use_kl_loss")
    weight = draft.take(f"{_ACTOR}kl_loss_coef")
    kind = draft.take(f"{_ACTOR}kl_loss_type")
    if not is_on:
        for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"):
            draft.ignore(_ACTOR + name, "off: use_kl_loss is not set")
        return
    draft.carry(f"{_ACTOR}use_kl_loss", "grpo.beta", weight or 0.001)
    if weight is not None:
        draft.carry(f"{_ACTOR}kl_loss_coef", "grpo.beta", weight)
    if kind in _ESTIMATORS:
        draft.carry(f"{_ACTOR}kl_loss_type", "grpo.kl_estimator", _ESTIMATORS[kind])
    elif kind is not None:
        draft.drop(f"{_ACTOR}kl_loss_type", "k1, abs, k2 and k3 are there")
    draft.assume("grpo.use_bias_correction_kl", False)


def _finish(draft: Draft) -> None:
    """Write down the defaults that other settings decide."""
    draft.assume("grpo.delta", 3.0, "verl bounds the ratio of bad answers too (clip_ratio_c)")
    if not draft.has("training.warmup_steps"):
        draft.assume("training.warmup_ratio", 0.0)


def _unlimited(value: Any, _: Draft) -> Outcome:
    """Carry a number that is off at -1 or 0."""
    return carried(value) if value > 0 else unneeded("off, as here")


def _loss_mode(value: Any, _: Draft) -> Outcome:
    """Take the loss of the policy, where it is that of PPO or GSPO."""
    if value == "vanilla":
        return unneeded("the ratio is clipped, as here")
    if value == "gspo":
        return carried("sequence", path="grpo.importance_sampling_level")
    return dropped(f"{value} is not there; see grpo.loss_type")


def _normalised(value: Any, _: Draft) -> Outcome:
    """Carry by what advantages are divided."""
    return carried("group" if value else "none")


def _trackers(value: Any, draft: Draft) -> Outcome:
    """Switch on the trackers among the loggers."""
    wanted = [name.strip("'\" ") for name in as_list(str(value).strip("[]")) if name]
    outcome = unneeded("steps are logged in any case")
    for name in ("mlflow", "wandb", "trackio"):
        if name in wanted:
            outcome = carried(None, path=f"tracking.{name}")
            draft.write(draft.at, outcome)
    return outcome


TOOL = Tool(
    name="verl",
    marks="actor_rollout_ref algorithm custom_reward_function critic trainer",
    command=r"\bverl\.trainer\.main_(ppo)\b",
    has_sections=True,
    together=(_method, _data, _rewards, _batches, _divergence),
    finish=_finish,
    defaults={
        "grpo.loss_type": "dapo",
        "training.learning_rate": 1e-6,
        "training.lr_scheduler_type": "constant",
        "training.weight_decay": 0.01,
    },
    rows=[
        Row(f"{_MODEL}path", "model.path"),
        switch(f"{_MODEL}enable_gradient_checkpointing", "training.gradient_checkpointing"),
        Row(f"{_MODEL}lora_alpha", "lora.alpha"),
        names(f"{_MODEL}target_modules", "lora.target_modules"),
        # Drawing.
        Row(f"{_ROLLOUT}n", "grpo.num_generations"),
        Row(f"{_ROLLOUT}temperature", "grpo.temperature"),
        Row(f"{_ROLLOUT}top_p", "grpo.top_p"),
        Row(f"{_ROLLOUT}top_k", "grpo.top_k", _unlimited),
        Row(f"{_ROLLOUT}response_length data.max_response_length", "grpo.max_completion_length"),
        Row("data.max_prompt_length", "data.max_length",
            lambda value, _: near(value, "prompt and right answer are counted here")),
        Row("data.filter_overlong_prompts", "data.overlong", values={True: "drop", False: "error"}),
        # The loss.
        Row(f"{_ACTOR}loss_agg_mode", "grpo.loss_type", values=_LOSSES),
        Row(f"{_ACTOR}policy_loss.loss_mode", rule=_loss_mode),
        Row(f"{_ACTOR}clip_ratio_low {_ACTOR}clip_ratio", "grpo.epsilon"),
        Row(f"{_ACTOR}clip_ratio_high", "grpo.epsilon_high"),
        Row(f"{_ACTOR}clip_ratio_c", "grpo.delta"),
        Row(f"{_ACTOR}ppo_epochs", "grpo.num_iterations"),
        Row("algorithm.norm_adv_by_std_in_grpo", "grpo.scale_rewards", _normalised),
        # Training, and where it runs.
        Row(f"{_ACTOR}optim.lr", "training.learning_rate"),
        Row(f"{_ACTOR}optim.weight_decay", "training.weight_decay"),
        Row(f"{_ACTOR}optim.lr_warmup_steps", "training.warmup_steps", _unlimited),
        Row(f"{_ACTOR}optim.lr_warmup_steps_ratio", "training.warmup_ratio", _unlimited),
        Row(f"{_ACTOR}optim.warmup_style {_ACTOR}optim.lr_scheduler_type", "training.lr_scheduler_type",
            values={"constant": "constant", "cosine": "cosine"}),
        Row(f"{_ACTOR}grad_clip {_ACTOR}optim.clip_grad", "training.max_grad_norm"),
        Row(f"{_ACTOR}ppo_micro_batch_size_per_gpu", "training.per_device_train_batch_size"),
        Row("trainer.total_epochs", "training.num_train_epochs"),
        Row("trainer.total_training_steps", "training.max_steps", _unlimited),
        Row("trainer.save_freq", "training.save_steps", _unlimited),
        Row("trainer.test_freq", "training.eval_steps", _unlimited),
        Row("trainer.n_gpus_per_node", "compute.gpus_per_node"),
        Row("trainer.nnodes", "compute.nodes"),
        Row("trainer.logger", rule=_trackers),
        Row("data.seed", "training.seed"),
        # Values that are ours anyway; any other is dropped.
        Row("data.shuffle", same={True: "rows are shuffled, each epoch anew"},
            reason="rows are shuffled, each epoch anew"),
        Row("data.truncation", same={"error": "a prompt is asked whole or left out"},
            reason="a prompt is asked whole or left out"),
        # Not done here; a value behind the reason is that which switches it off there.
        drop("algorithm.use_kl_in_reward", "the divergence is a part of the loss", False),
        drop(f"{_ACTOR}entropy_coeff", "entropy is measured, and has no part in the loss", 0, 0.0),
        drop("reward_model.enable reward.reward_model.enable", "rewards by a model are not there", False),
        drop("trainer.val_before_train", "nothing is evaluated before the first step", False),
        drop(f"{_ROLLOUT}name", "the model draws its answers itself; grpo.servers names stock vLLM servers that do"),
        drop("trainer.project_name trainer.experiment_name", "see name, and tracking.wandb.project"),
        # Not needed.
        ignore(f"{_ROLLOUT}do_sample", "answers are drawn"),
        ignore("trainer.critic_warmup", "GRPO has no critic"),
        ignore(f"{_MODEL}use_remove_padding {_MODEL}use_shm {_MODEL}use_fused_kernels {_ACTOR}use_dynamic_bsz "
               f"{_ACTOR}ppo_max_token_len_per_gpu {_ACTOR}use_torch_compile {_ACTOR}strategy data.dataloader_num_workers",
               "nothing is padded, and memory decides the micro-batches"),
    ],
)  # fmt: skip
