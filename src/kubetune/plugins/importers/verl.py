"""verl's configs of GRPO: nested YAML for hydra, or `key.of.section=value` on the command line.

Its batches are counted in prompts, as here: `data.train_batch_size` prompts are asked together, and each optimizer step
learns from `ppo_mini_batch_size` of them.
"""

from __future__ import annotations

from typing import Any

from kubetune.plugins.importers.by_reward import ALL_TOKENS
from kubetune.plugins.importers.common.result_keys import trackers
from kubetune.plugins.importers.common.schedule_keys import assume_warm_up
from kubetune.plugins.importers.common.source_keys import take_sources, tidy
from kubetune.plugins.importers.common.training_keys import SHUFFLED
from kubetune.plugins.importers.engine import (
    OFF,
    Draft,
    Outcome,
    Row,
    Table,
    Tool,
    ToolCommand,
    as_names,
    carried,
    dropped,
    near,
    switch,
    unneeded,
)

_OF_STEP = "actor_rollout_ref.actor.ppo_mini_batch_size"
_USE_KL = "actor_rollout_ref.actor.use_kl_loss"
_NOT_PADDED = "nothing is padded, and memory decides the micro-batches"
_BY_SOURCE = (
    "verl chooses a function by the column data_source (gsm8k …); kubetune compares the last numbers, and its "
    "accuracy_reward compares formulas"
)

_LOSSES = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
_ESTIMATORS = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip


def _estimator(value: Any, draft: Draft) -> Outcome:
    """Take the estimator of advantages, of which GRPO's is the only one."""
    if value != "grpo":
        draft.refuse(draft.at, f"kubetune has no {value}; expected algorithm.adv_estimator: grpo")
    return carried("grpo")


def _data(draft: Draft) -> None:
    """Take the files of both splits, and the column of the prompt."""
    column = draft.get("data.prompt_key")

    def source(_: Draft, place: str, file: Any) -> list[Any]:
        path = str(file).strip("[]'\" ")
        return [tidy({"path": path, "columns.prompt": None if column == "messages" else column})]

    take_sources(draft, {"data.train_files": "data.train", "data.val_files": "data.eval"}, source)


def _images(_: Any, draft: Draft) -> Outcome:
    """Refuse prompts with images."""
    draft.refuse(draft.at, "is of prompts with images, and GRPO asks about texts alone")


def _reward(value: Any, draft: Draft) -> Outcome:
    """Take the user's function."""
    name = draft.get(draft.at.replace(".path", ".name")) or "compute_score"
    return carried([{"file": str(value), "function": name}])


def _asked(value: Any, draft: Draft) -> Outcome:
    """Take how many steps learn from answers that are drawn together, from the prompts that are asked together.

    train_batch_size 1024, ppo_mini_batch_size 256    steps_per_generation: 4
    train_batch_size 64, ppo_mini_batch_size 256      one step, of the 64 prompts that there are
    """
    of_step = draft.get(_OF_STEP) or 256
    if value < of_step:
        return carried(1, f"a step learns from all {value} prompts that are asked together")
    steps = value // of_step
    if value % of_step:
        return near(steps, f"{value} prompts are no whole number of steps of {of_step}")
    return carried(steps)


def _prompts(value: Any, draft: Draft) -> Outcome:
    """Take the prompts of a step; there are no more than are asked together."""
    asked = draft.get("data.train_batch_size") or 1024
    if asked < value:
        why = f"the file has {value}, of which data.train_batch_size leaves {asked}"
        return near(asked, why)
    return carried(value)


def _divergence(_: Any, draft: Draft) -> Outcome:
    """Take the divergence from the model before training, which is switched on."""
    return carried(draft.get("actor_rollout_ref.actor.kl_loss_coef") or 0.001)


def _finish(draft: Draft) -> None:
    """Write down the defaults that other settings decide."""
    # What a step learns from follows from both numbers.
    if not draft.unknown.keys().isdisjoint(("data.train_batch_size", _OF_STEP)):
        for path in ("training.global_batch_size", "grpo.steps_per_generation"):
            draft.undecided.setdefault(path, _OF_STEP)
    if "algorithm.adv_estimator" in draft.unknown:
        draft.refuse("algorithm.adv_estimator", draft.unknown["algorithm.adv_estimator"])
    if not draft.has("task"):
        why = "kubetune has no gae, its default; expected algorithm.adv_estimator: grpo"
        draft.refuse(next(iter(draft.theirs)), why)
    if draft.has("lora.r"):
        draft.assume("lora", None)
    if draft.get(_USE_KL):
        draft.assume("grpo.use_bias_correction_kl", False)
    if not draft.has("rewards"):
        draft.assume("rewards", [{"name": "numeric"}], _BY_SOURCE)
        draft.comments["rewards"] = _BY_SOURCE
    draft.assume("training.global_batch_size", min(256, draft.get("data.train_batch_size") or 256))
    draft.assume("grpo.steps_per_generation", _asked(1024, draft).value)
    draft.assume("grpo.delta", 3.0, "verl bounds the ratio of bad answers too (clip_ratio_c)")
    assume_warm_up(draft)


def _unlimited(value: Any, _: Draft) -> Outcome:
    """Carry a number that is off at -1 or 0."""
    return carried(value) if value > 0 else OFF


def _steps(value: Any, draft: Draft) -> Outcome:
    """Carry steps of verl, each of which learns from all answers that are drawn together, as optimizer steps.

    train_batch_size 1024, ppo_mini_batch_size 256, ppo_epochs 2, save_freq 20    save_steps: 20 × 4 × 2 = 160
    """
    if value <= 0:
        return OFF
    steps = draft.ours("grpo.steps_per_generation") or _asked(1024, draft).value
    of_step = steps * (draft.get("actor_rollout_ref.actor.ppo_epochs") or 1)
    if of_step == 1:
        return carried(value)
    why = f"a step of verl has {of_step} optimizer steps, which kubetune counts"
    return near(value * of_step, why)


# Its settings by section; `critic`, `reward_model` and the rest are other methods'.
_DATA = Table(
    section="data.",
    same={
        "grpo.max_completion_length": "max_response_length",
        "training.seed": "seed",
    },
    rows=[
        Row("image_key video_key", other=_images),
        Row("train_batch_size", "grpo.steps_per_generation", other=_asked),
        Row("max_prompt_length", "data.max_length",
            other=lambda value, _: near(value, "kubetune counts prompt and right answer")),
        Row("filter_overlong_prompts", "data.overlong", {True: "drop"}, carried("error")),
    ],
    dropped={
        "shuffle": (SHUFFLED, True),
        "truncation": ("a prompt is asked whole or left out", "error"),
    },
    unneeded={"prompt_key": "named in the sources of data.train", "dataloader_num_workers": _NOT_PADDED},
)  # fmt: skip
_MODEL = Table(
    section="actor_rollout_ref.model.",
    same={"model.path": "path", "lora.alpha": "lora_alpha"},
    rows=[
        Row("lora_rank", "lora.r", {0: unneeded("0: every parameter is trained")}),
        Row("target_modules", "lora.target_modules", other=as_names),
        switch("enable_gradient_checkpointing", "training.gradient_checkpointing"),
    ],
    unneeded={"use_remove_padding use_shm use_fused_kernels": _NOT_PADDED},
)
_ACTOR = Table(
    section="actor_rollout_ref.actor.",
    same={
        "grpo.epsilon": "clip_ratio_low clip_ratio",
        "grpo.epsilon_high": "clip_ratio_high",
        "grpo.delta": "clip_ratio_c",
        "grpo.num_iterations": "ppo_epochs",
        "training.learning_rate": "optim.lr",
        "training.weight_decay": "optim.weight_decay",
        "training.max_grad_norm": "grad_clip optim.clip_grad",
        "training.per_device_train_batch_size": "ppo_micro_batch_size_per_gpu",
    },
    rows=[
        Row("ppo_mini_batch_size", "training.global_batch_size", other=_prompts),
        # The divergence from the model before training.
        Row("use_kl_loss", "grpo.beta", {False: OFF}, _divergence),
        Row("kl_loss_coef", "grpo.beta", beside=_USE_KL),
        Row("kl_loss_type", "grpo.kl_estimator", _ESTIMATORS, dropped("kubetune has k1, abs, k2 and k3"), beside=_USE_KL),
        # The loss.
        Row("loss_agg_mode", "grpo.loss_type", _LOSSES, dropped(f"expected one of {', '.join(_LOSSES)}")),
        Row("policy_loss.loss_mode", "grpo.importance_sampling_level",
            {"vanilla": unneeded("the ratio is clipped, as here"), "gspo": "sequence"},
            dropped("kubetune has vanilla and gspo; see grpo.loss_type")),
        # The learning rate.
        Row("optim.lr_warmup_steps", "training.warmup_steps", other=_steps),
        Row("optim.lr_warmup_steps_ratio", "training.warmup_ratio", other=_unlimited),
        Row("optim.warmup_style optim.lr_scheduler_type", "training.lr_scheduler_type",
            {"constant": "constant", "cosine": "cosine"}, dropped("kubetune has constant and cosine")),
    ],
    dropped={"entropy_coeff": ("entropy is measured, and has no part in the loss", 0)},
    unneeded={"use_dynamic_bsz ppo_max_token_len_per_gpu use_torch_compile strategy": _NOT_PADDED},
)  # fmt: skip
_ROLLOUT = Table(
    section="actor_rollout_ref.rollout.",
    same={
        "grpo.num_generations": "n",
        "grpo.temperature": "temperature",
        "grpo.top_p": "top_p",
        "grpo.max_completion_length": "response_length",
    },
    rows=[Row("top_k", "grpo.top_k", other=ALL_TOKENS)],
    dropped={
        "name": "the model draws its answers itself; grpo.servers names stock vLLM servers that do"
    },
    unneeded={"do_sample": "answers are drawn"},
)
_TRAINER = Table(
    section="trainer.",
    same={
        "training.num_train_epochs": "total_epochs",
        "compute.gpus_per_node": "n_gpus_per_node",
        "compute.nodes": "nnodes",
    },
    rows=[
        Row("total_training_steps", "training.max_steps", other=_steps),
        Row("save_freq", "training.save_steps", other=_steps),
        Row("test_freq", "training.eval_steps", other=_steps),
        Row("logger", other=trackers),
    ],
    dropped={"project_name experiment_name": "see name, and tracking.wandb.project"},
    unneeded={"critic_warmup": "GRPO has no critic"},
)
_OTHERS = Table(
    rows=[
        Row("algorithm.adv_estimator", "task", other=_estimator),
        Row("algorithm.norm_adv_by_std_in_grpo", "grpo.scale_rewards", {False: "none"}, carried("group")),
        Row("custom_reward_function.path reward.custom_reward_function.path", "rewards", other=_reward),
    ],
    dropped={
        "algorithm.use_kl_in_reward": ("the divergence is a part of the loss", False),
        "reward_model.enable reward.reward_model.enable": ("name the model in rewards: [{reward_model: …}]", False),
    },
    unneeded={"custom_reward_function.name reward.custom_reward_function.name": "named in rewards"},
)  # fmt: skip

TOOL = Tool(
    name="verl",
    marks="actor_rollout_ref algorithm custom_reward_function critic trainer",
    command=ToolCommand(
        r"\bverl\.trainer\.main_(ppo)\b",
        "python -m verl.trainer.main_ppo",
        assigns=True,
        names_no_kind=True,
    ),
    has_sections=True,
    first="data.train_batch_size",
    sources=_data,
    finish=_finish,
    defaults={
        "grpo.loss_type": "dapo",
        "training.learning_rate": 1e-6,
        "training.lr_scheduler_type": "constant",
        "training.weight_decay": 0.01,
    },
    tables=(_DATA, _MODEL, _ACTOR, _ROLLOUT, _TRAINER, _OTHERS),
)  # fmt: skip
