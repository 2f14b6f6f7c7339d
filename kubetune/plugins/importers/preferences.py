"""Preference tuning and reward models in other tools' configs: the task, the loss, and the settings of both.

Taken before a tool's own rules, which know supervised fine-tuning. All four tools build on TRL's trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kubetune.config.metric_names import full_name, metrics_of
from kubetune.config.schema.preference import ONLY_WITH
from kubetune.plugins.importers.draft import (
    Draft,
    Rule,
    as_flag,
    choice,
    dropped,
    each,
    is_empty,
    only,
    unneeded,
)

METHODS: Final = ("dpo", "ipo", "orpo", "simpo", "cpo", "kto", "rm", "reward")
"""Words of the tools for kinds of learning that compare or judge answers."""

_LOSSES: Final[dict[str, dict[str, str]]] = {
    "dpo": {name: name for name in ("hinge", "ipo", "robust", "orpo", "simpo")}
    | {"sigmoid": "dpo"},
    "cpo": {"sigmoid": "cpo", "simpo": "simpo"},
    "kto": {"kto": "kto"},
}
"""Our loss for each `loss_type` that a method may have; orpo and simpo are LLaMA-Factory's."""

_WEIGHTS: Final = {
    "beta": "beta pref_beta rl_beta dpo_beta orpo_alpha",
    "label_smoothing": "label_smoothing dpo_label_smoothing",
    "gamma": "simpo_gamma",
    "sft_weight": "rpo_alpha cpo_alpha pref_ftx",
    "desirable_weight": "desirable_weight kto_chosen_weight kto_desirable_weight",
    "undesirable_weight": "undesirable_weight kto_rejected_weight kto_undesirable_weight",
    "reference_free": "reference_free",
    "center_coefficient": "center_rewards_coefficient",
}
_SIMPO: Final = {"LLaMA-Factory": (0.1, 0.5, 0.0), "ms-swift": (2.0, 1.0, 1.0)}
_SIMPO_OF_TRL: Final = (0.1, 0.5, 1.0)
"""Defaults of beta, gamma and sft_weight: those of TRL's CPO trainer are axolotl's too."""
_METRICS: Final = {
    "loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin", "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected", "logps/chosen": "logp_chosen", "logps/rejected": "logp_rejected",
    "accuracy": "accuracy", "margin": "margin", "kl": "kl",
}  # fmt: skip


def method_of(
    peer: str, settings: Mapping[str, Any], command: str | None
) -> tuple[str, str] | None:
    """The key that says so, or the command, and the method; none where answers are not compared or judged."""
    if settings.get("stage") in ("dpo", "kto", "rm"):
        return "stage", settings["stage"]
    for key in ("rlhf_type", "rl"):
        if settings.get(key) in METHODS:
            return key, settings[key]
    if peer == "axolotl" and settings.get("reward_model") is True:
        return "reward_model", "rm"
    if command == "rlhf":
        return "swift rlhf", "dpo"
    if command in METHODS:
        return f"trl {command}", str(command)
    marks = {"desirable_weight": "kto", "center_rewards_coefficient": "reward"}
    marks |= dict.fromkeys(("simpo_gamma", "cpo_alpha"), "cpo")
    marks |= dict.fromkeys(
        ("rpo_alpha", "precompute_ref_log_probs", "max_prompt_length", "beta"), "dpo"
    )
    if peer != "TRL" or command:
        return None
    return next(
        ((key, method) for key, method in marks.items() if not is_empty(settings.get(key))), None
    )


def learn(draft: Draft, command: str | None) -> None:
    """Take what says that answers are compared or judged, and how, if anything does."""
    found = method_of(draft.peer, draft.given, command)
    if found is None:
        return
    key, method = found
    is_reward = method in ("rm", "reward")
    task = "reward_model" if is_reward else "preference"
    if key not in draft.given or key in ("beta", "max_prompt_length", "precompute_ref_log_probs"):
        why = (
            f"`{key}`"
            if key not in draft.given
            else f"seen from {key}; DPO, CPO or ORPO: the file leaves it open"
        )
        draft.assume("task", task, why)
        draft.comments[("task",)] = why
    else:
        draft.carry(key, "task", task)
    loss = None if is_reward else _loss(draft, method)
    if loss:
        draft.settings[("preference", "loss")] = loss
    _weights(draft, loss)
    if loss == "simpo":
        for name, value in zip(
            ("beta", "gamma", "sft_weight"), _SIMPO.get(draft.peer, _SIMPO_OF_TRL), strict=True
        ):
            draft.assume(f"preference.{name}", value)
    if draft.peer == "TRL" and is_empty(draft.given.get("learning_rate")):
        draft.assume("training.learning_rate", 1e-4 if method == "reward" else 1e-6)
    for name, rule in _RULES.items():
        if not is_empty(draft.given.get(name)) and name not in draft.seen:
            rule(draft, name, draft.given[name])
    if has_no_dropout(draft) and draft.take("lora_dropout") is not None:
        draft.unneeded("lora_dropout", _NO_DROPOUT)


def finish(draft: Draft) -> None:
    """Take out what the tools assume of supervised fine-tuning alone."""
    if is_preferred(draft) and has_no_dropout(draft):
        draft.withdraw("lora.dropout", _NO_DROPOUT)


def is_preferred(draft: Draft) -> bool:
    """The draft of a run that compares or judges answers."""
    return draft.settings.get(("task",)) in ("preference", "reward_model")


_MEAN_OF_MEANS: Final = (
    "there the mean over a batch's answers of each answer's mean loss, here the mean over all their tokens, so that "
    "long answers weigh more"
)
_NO_DROPOUT: Final = "its trainer switches dropout off (disable_dropout)"


def has_no_dropout(draft: Draft) -> bool:
    """Dropout off, as in all of TRL's trainers of preferences; LLaMA-Factory's reward model has its own."""
    return (
        as_flag(draft.given.get("disable_dropout")) is not False
        and draft.given.get("stage") != "rm"
    )


def _loss(draft: Draft, method: str) -> str:
    """Our loss. Raises ConfigError for one that is not there."""
    for key in ("pref_loss", "loss_type", "dpo_loss_type"):
        value = draft.take(key)
        if value is None or (method not in _LOSSES and key == "loss_type"):
            continue
        if method == "kto" and key == "pref_loss":
            draft.unneeded(key, "says nothing in KTO")
            continue
        name = value[0] if isinstance(value, list) and len(value) == 1 else value
        known = _LOSSES.get(method, {})
        if not isinstance(name, str) or name not in known:
            draft.refuse(
                key, f"{value} is a loss that kubetune does not have; expected {', '.join(known)}"
            )
        draft.carry(key, "preference.loss", known[name])
        return known[name]
    return method


def _weights(draft: Draft, loss: str | None) -> None:
    for ours, theirs in _WEIGHTS.items():
        for key in theirs.split():
            value = draft.take(key)
            if value is None:
                continue
            fits = (
                loss is None
                if ours == "center_coefficient"
                else loss in ONLY_WITH.get(ours, (loss or "",))
            )
            factory = draft.peer == "LLaMA-Factory" and key == "dpo_label_smoothing"
            if factory and value and loss not in (None, "dpo"):
                draft.refuse(key, f"LLaMA-Factory refuses it beside pref_loss: {loss}")
            if fits and key == "pref_ftx" and value:
                draft.approximate(key, f"preference.{ours}", value, _MEAN_OF_MEANS)
            elif fits and not (key == "rpo_alpha" and loss in ("cpo", "simpo")):
                draft.carry(key, f"preference.{ours}", value)
            elif key == "pref_ftx" and value:
                draft.drop(key, f"an SFT term beside {loss or 'a reward model'} is not there")
            else:
                draft.unneeded(key, f"says nothing to {loss or 'a reward model'}")


def _reference(draft: Draft, key: str, value: Any) -> None:
    if value in (draft.given.get(name) for name in ("model", "model_name_or_path", "base_model")):
        draft.unneeded(key, "the reference is the model before training, here too")
    else:
        draft.drop(key, "the reference is the model before training; another one is not taken")


def _metric(draft: Draft, key: str, value: Any) -> None:
    ours, is_kto = (
        _METRICS.get(str(value).removeprefix("eval_")),
        draft.settings.get(("preference", "loss")) == "kto",
    )
    if (ours := full_name(ours)) in metrics_of(
        str(draft.settings[("task",)]), "auto", judged=is_kto
    ):
        draft.carry(key, "training.metric_for_best_model", ours)
    else:
        draft.drop(key, f"evaluations have no {value}; see training.metric_for_best_model")


def _trl(draft: Draft, key: str, value: Any) -> None:
    """Axolotl's section of settings for TRL's trainers."""
    if (
        isinstance(value, dict)
        and list(value) == ["beta"]
        and draft.settings[("task",)] == "preference"
    ):
        draft.carry(key, "preference.beta", value["beta"])
    else:
        draft.drop(key, "settings of online trainers")


_RULES: Final[dict[str, Rule]] = {
    "metric_for_best_model": _metric,
    "trl": _trl,
    **each("ref_model ref_model_id", _reference),
    **each(
        "ref_adapters ref_model_adapters ref_model_type ref_model_revision ref_model_quantization_bit "
        "ref_model_init_kwargs model_adapter_name ref_adapter_name",
        dropped("the reference is the model before training; another one is not taken"),
    ),
    "force_use_ref_model": dropped(
        "the reference is the model before training; another one is not taken", False
    ),
    "sync_ref_model": dropped("the reference stays as it is", False),
    **each("ref_model_mixup_alpha ref_model_sync_steps", dropped("the reference stays as it is")),
    **each(
        "precompute_ref_log_probs precompute_ref_batch_size precompute_ref_eval_batch_size",
        unneeded("the reference is computed once, before training, and kept"),
    ),
    "disable_dropout": unneeded("dropout of the adapter is lora.dropout, and off in the reference"),
    **each(
        "max_prompt_length max_completion_length max_target_length",
        dropped(
            "prompt and answer together have data.max_length; data.overlong says what becomes of longer ones"
        ),
    ),
    "loss_scale": choice(
        "data.train_on", {"default": "assistant", "last_round": "assistant"}, None, "tokens weigh 1"
    ),
    "task_type": unneeded("follows from the task"),
    "f_divergence_type": only(
        ["reverse_kl"], "the reverse KL, as here", "the reverse KL is the only divergence"
    ),
    **each("ld_alpha loss_weights", dropped("has no counterpart")),
    **each("use_weighting pref_bco_weight dpo_use_weighting", dropped("has no counterpart", False)),
    **each(
        "packing sample_packing neat_packing eval_packing packing_length eval_sample_packing",
        unneeded(
            "answers lie end to end in a packed batch (data.packing), and a pair stays together"
        ),
    ),
    **each(
        "discopop_tau f_alpha_divergence_coef use_logits_to_keep dpo_use_logits_to_keep generate_during_eval "
        "is_encoder_decoder padding_value label_pad_token_id rlhf_type num_labels dpo_use_liger_kernel",
        unneeded("has no counterpart, and no effect on the result"),
    ),
}
