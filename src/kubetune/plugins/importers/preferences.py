"""Preference tuning and reward models in other tools' files: the task, the loss, and the settings of both.

Read before a tool's own tables, which know supervised fine-tuning. All four tools build on TRL's trainers.
"""

from __future__ import annotations

from typing import Any, Final

from kubetune.config.metric_names import full_name, metrics_of
from kubetune.config.schema.preference import ONLY_WITH
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    carried,
    drop,
    dropped,
    ignore,
    near,
    unneeded,
)

# Words of the tools for kinds of learning that compare or judge answers.
METHODS: Final = ("dpo", "ipo", "orpo", "simpo", "cpo", "kto", "rm", "reward")
# Our loss for each `loss_type` that a method may have; orpo and simpo are LLaMA-Factory's.
_LOSSES: Final[dict[str, dict[str, str]]] = {
    "dpo": {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust", "orpo": "orpo", "simpo": "simpo"},
    "cpo": {"sigmoid": "cpo", "simpo": "simpo"},
    "kto": {"kto": "kto"},
}  # fmt: skip
# A YAML file of TRL does not say which trainer it is for, but a key may.
_METHOD_OF_A_KEY: Final = {
    "desirable_weight": "kto",
    "center_rewards_coefficient": "reward",
    "simpo_gamma": "cpo",
    "cpo_alpha": "cpo",
    "rpo_alpha": "dpo",
    "precompute_ref_log_probs": "dpo",
    "max_prompt_length": "dpo",
    "beta": "dpo",
}
_OF_SEVERAL_TRAINERS: Final = ("beta", "max_prompt_length", "precompute_ref_log_probs")
# Defaults of beta, gamma and sft_weight: those of TRL's CPO trainer are axolotl's too.
_SIMPO: Final = {"LLaMA-Factory": (0.1, 0.5, 0.0), "ms-swift": (2.0, 1.0, 1.0)}
_SIMPO_OF_TRL: Final = (0.1, 0.5, 1.0)
_METRICS: Final = {
    "loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin", "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected", "logps/chosen": "logp_chosen", "logps/rejected": "logp_rejected",
    "accuracy": "accuracy", "margin": "margin", "kl": "kl",
}  # fmt: skip
_NO_DROPOUT: Final = "its trainer switches dropout off (disable_dropout)"
_OTHER_REFERENCE: Final = "the reference is the model before training; another one is not taken"


def is_preferred(draft: Draft) -> bool:
    """Return True for a run that compares or judges answers."""
    return draft.ours("task") in ("preference", "reward_model")


def learn(draft: Draft) -> list[Row]:
    """Take what says that answers are compared or judged, and how. Return the rows that count then, or none."""
    key, method = _method(draft)
    if not method:
        return []
    task = "preference"
    if method in ("rm", "reward"):
        task = "reward_model"
    if key in draft.theirs and key not in _METHOD_OF_A_KEY:
        draft.carry(key, "task", task)
    else:
        why = f"seen from `{key}`"
        if key in _OF_SEVERAL_TRAINERS:
            why += "; DPO, CPO or ORPO: the file leaves it open"
        draft.assume("task", task, why)
        draft.comments["task"] = why
    if task == "preference":
        draft.settings["preference.loss"] = _loss(draft, method)
    if draft.tool.name == "TRL" and draft.get("learning_rate") is None:
        draft.assume("training.learning_rate", 1e-4 if method == "reward" else 1e-6)
    if _has_no_dropout(draft):
        draft.take("lora_dropout")
        draft.ignore("lora_dropout", _NO_DROPOUT)
    return ROWS


def finish(draft: Draft) -> None:
    """Fill in the defaults of SimPO, and take out what the tools assume of supervised fine-tuning alone."""
    if not is_preferred(draft):
        return
    if _has_no_dropout(draft):
        draft.withdraw("lora.dropout", _NO_DROPOUT)
    if draft.ours("preference.loss") == "simpo":
        beta, gamma, sft_weight = _SIMPO.get(draft.tool.name, _SIMPO_OF_TRL)
        draft.assume("preference.beta", beta)
        draft.assume("preference.gamma", gamma)
        draft.assume("preference.sft_weight", sft_weight)


def _method(draft: Draft) -> tuple[str, str]:
    """Return the key that names the method, or the command, and the method; empty where there is none."""
    command = draft.command
    for key in ("stage", "rlhf_type", "rl"):
        if draft.get(key) in METHODS:
            return key, draft.get(key)
    if draft.get("reward_model") is True:
        return "reward_model", "rm"
    if command == "rlhf":
        return "swift rlhf", "dpo"
    if command in METHODS:
        return f"trl {command}", str(command)
    if draft.tool.name == "TRL" and not command:
        for key, method in _METHOD_OF_A_KEY.items():
            if draft.get(key) is not None:
                return key, method
    return "", ""


def _has_no_dropout(draft: Draft) -> bool:
    """Return True where dropout is off, as in all of TRL's trainers; LLaMA-Factory's reward model has its own."""
    return draft.get("disable_dropout") is not False and draft.get("stage") != "rm"


def _loss(draft: Draft, method: str) -> str:
    """Return our loss. Raise ConfigError where we do not have it."""
    for key in ("pref_loss", "loss_type", "dpo_loss_type"):
        value = draft.take(key)
        if value is None or (method not in _LOSSES and key == "loss_type"):
            continue
        if method == "kto" and key == "pref_loss":
            draft.ignore(key, "says nothing in KTO")
            continue
        name = value[0] if isinstance(value, list) and len(value) == 1 else value
        known = _LOSSES.get(method, {})
        if not isinstance(name, str) or name not in known:
            expected = ", ".join(known)
            draft.refuse(key, f"{value} is a loss that kubetune does not have; expected {expected}")
        draft.carry(key, "preference.loss", known[name])
        return known[name]
    return method


def _weight(keys: str, name: str) -> Row:
    """Return the row of a weight of the loss, which says nothing to other losses."""

    def says_nothing(draft: Draft) -> str:
        # A reward model has no loss to choose, and the coefficient is its alone.
        loss = draft.ours("preference.loss")
        is_of_rewards = name == "center_coefficient"
        if not loss and is_of_rewards:
            return ""
        if not loss:
            return "says nothing to a reward model"
        if is_of_rewards or loss not in ONLY_WITH.get(name, (loss,)):
            return f"says nothing to {loss}"
        return ""

    return Row(keys, f"preference.{name}", unless=says_nothing)


def _label_smoothing(value: Any, draft: Draft) -> Outcome:
    """Carry label smoothing. Raise ConfigError where LLaMA-Factory refuses it."""
    loss = draft.ours("preference.loss")
    if draft.tool.name == "LLaMA-Factory" and value and loss not in (None, "dpo"):
        draft.refuse(draft.at, f"LLaMA-Factory refuses it beside pref_loss: {loss}")
    return _SMOOTHING.outcome(value, draft)


def _sft_term(value: Any, draft: Draft) -> Outcome:
    """Carry LLaMA-Factory's SFT term. TRL's name for it says something to losses with a reference alone."""
    loss = draft.ours("preference.loss")
    outcome = _SFT_WEIGHT.outcome(value, draft)
    if draft.at == "rpo_alpha" and loss in ("cpo", "simpo"):
        return unneeded(f"says nothing to {loss}")
    if draft.at != "pref_ftx" or not value:
        return outcome
    if outcome.kind == "unneeded":
        return dropped(f"an SFT term beside {loss or 'a reward model'} is not there")
    return near(
        value,
        "there the mean over a batch's answers of each answer's mean loss, here the mean over all their tokens, so that "
        "long answers weigh more",
    )


def _reference(value: Any, draft: Draft) -> Outcome:
    """Take a reference that is the model itself; drop any other."""
    if value in [draft.get(key) for key in ("model", "model_name_or_path", "base_model")]:
        return unneeded("the reference is the model before training, here too")
    return dropped(_OTHER_REFERENCE)


def _metric(value: Any, draft: Draft) -> Outcome:
    """Carry the metric by which the best checkpoint is chosen."""
    name = full_name(_METRICS.get(str(value).removeprefix("eval_")))
    is_judged = draft.ours("preference.loss") == "kto"
    if name in metrics_of(draft.ours("task"), "auto", judged=is_judged):
        return carried(name)
    return dropped(f"evaluations have no {value}; see training.metric_for_best_model")


def _trl(value: Any, draft: Draft) -> Outcome:
    """Carry axolotl's section of settings for TRL's trainers, where it holds beta alone."""
    if isinstance(value, dict) and list(value) == ["beta"] and draft.ours("task") == "preference":
        return carried(value["beta"])
    return dropped("settings of online trainers")


_SMOOTHING: Final = _weight("label_smoothing", "label_smoothing")
_SFT_WEIGHT: Final = _weight("cpo_alpha", "sft_weight")

# Keys of preference tuning and reward models; each counts before the tool's own row for it.
ROWS: Final = [
    # Weights of the loss; the first name of each is TRL's, or the tool's that has it first.
    _weight("beta pref_beta rl_beta dpo_beta orpo_alpha", "beta"),
    _weight("simpo_gamma", "gamma"),
    _weight("desirable_weight kto_chosen_weight kto_desirable_weight", "desirable_weight"),
    _weight("undesirable_weight kto_rejected_weight kto_undesirable_weight", "undesirable_weight"),
    _weight("reference_free", "reference_free"),
    _weight("center_rewards_coefficient", "center_coefficient"),
    _SMOOTHING,
    Row("dpo_label_smoothing", _SMOOTHING.path, _label_smoothing),
    _SFT_WEIGHT,
    Row("rpo_alpha pref_ftx", _SFT_WEIGHT.path, _sft_term),
    # What means something else than in supervised fine-tuning.
    Row("metric_for_best_model", "training.metric_for_best_model", _metric),
    Row("trl", "preference.beta", _trl),
    Row("ref_model ref_model_id", rule=_reference),
    Row("loss_scale", "data.train_on", values={"default": "assistant", "last_round": "assistant"},
        reason="tokens weigh 1"),
    Row("f_divergence_type", same={"reverse_kl": "the reverse KL, as here"},
        reason="the reverse KL is the only divergence"),
    # Not done here; a value behind the reason is that which switches it off there.
    drop("ref_adapters ref_model_adapters ref_model_type ref_model_revision ref_model_quantization_bit "
         "ref_model_init_kwargs model_adapter_name ref_adapter_name", _OTHER_REFERENCE),
    drop("force_use_ref_model", _OTHER_REFERENCE, False),
    drop("sync_ref_model", "the reference stays as it is", False),
    drop("ref_model_mixup_alpha ref_model_sync_steps", "the reference stays as it is"),
    drop("max_prompt_length max_completion_length max_target_length",
         "prompt and answer together have data.max_length; data.overlong says what becomes of longer ones"),
    drop("ld_alpha loss_weights", "has no counterpart"),
    drop("use_weighting pref_bco_weight dpo_use_weighting", "has no counterpart", False),
    # Not needed.
    ignore("precompute_ref_log_probs precompute_ref_batch_size precompute_ref_eval_batch_size",
           "the reference is computed once, before training, and kept"),
    ignore("disable_dropout", "dropout of the adapter is lora.dropout, and off in the reference"),
    ignore("task_type", "follows from the task"),
    ignore("packing sample_packing neat_packing eval_packing packing_length eval_sample_packing",
           "answers lie end to end in a packed batch (data.packing), and a pair stays together"),
    ignore("discopop_tau f_alpha_divergence_coef use_logits_to_keep dpo_use_logits_to_keep generate_during_eval "
           "is_encoder_decoder padding_value label_pad_token_id rlhf_type num_labels dpo_use_liger_kernel",
           "has no counterpart, and no effect on the result"),
]  # fmt: skip
