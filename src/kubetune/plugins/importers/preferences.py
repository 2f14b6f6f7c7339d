"""Preference tuning and reward models in other tools' files: the loss, and its settings.

All four tools build on TRL's trainers.
"""

from __future__ import annotations

from typing import Any, Final

from kubetune.config.metric_names import full_name, metrics_of
from kubetune.config.schema.preference import ONLY_WITH
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

# Words of the tools for kinds of learning that compare or judge answers.
METHODS: Final = ("dpo", "ipo", "orpo", "simpo", "cpo", "kto")
# Our loss for each `loss_type` that a method may have; orpo and simpo are LLaMA-Factory's.
_LOSSES: Final[dict[str, dict[str, str]]] = {
    "dpo": {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust", "orpo": "orpo", "simpo": "simpo"},
    "cpo": {"sigmoid": "cpo", "simpo": "simpo"},
    "kto": {"kto": "kto"},
}  # fmt: skip
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


def learn(draft: Draft, kind: str) -> tuple[Table, ...]:
    """Take the loss of a kind. Return the table that counts then."""
    if draft.ours("task") == "preference":
        draft.settings["preference.loss"] = _loss(draft, kind)
    if _has_no_dropout(draft):
        draft.ignore(_NO_DROPOUT, "lora_dropout")
    return (TABLE,)


def finish(draft: Draft) -> None:
    """Fill in the defaults of SimPO, and take out what the tools assume of supervised fine-tuning alone."""
    if _has_no_dropout(draft):
        draft.withdraw("lora.dropout", _NO_DROPOUT)
    if draft.ours("preference.loss") == "simpo":
        beta, gamma, sft_weight = _SIMPO.get(draft.tool.name, _SIMPO_OF_TRL)
        draft.assume("preference.beta", beta)
        draft.assume("preference.gamma", gamma)
        draft.assume("preference.sft_weight", sft_weight)


def _has_no_dropout(draft: Draft) -> bool:
    """Return True where dropout is off, as in all of TRL's trainers; LLaMA-Factory's reward model has its own."""
    return draft.get("disable_dropout") is not False and draft.get("stage") != "rm"


def take_loss(draft: Draft, key: str, path: str, known: dict[str, str]) -> str | None:
    """Take a loss by its name, and return ours; None where none is named. Raise ConfigError for another one."""
    value = draft.take(key)
    if value is None:
        return None
    name = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(name, str) or name not in known:
        expected = ", ".join(known)
        draft.refuse(key, f"{value} is a loss that kubetune does not have; expected {expected}")
    draft.carry(key, path, known[name])
    return known[name]


def _loss(draft: Draft, kind: str) -> str:
    """Return our loss. Raise ConfigError where we do not have it."""
    keys = ["pref_loss", "dpo_loss_type"]
    if kind == "kto":
        draft.ignore("says nothing in KTO", keys.pop(0))
    if kind in _LOSSES:
        keys.insert(0, "loss_type")
    for key in keys:
        loss = take_loss(draft, key, "preference.loss", _LOSSES.get(kind, {}))
        if loss is not None:
            return loss
    return kind


def _weight(keys: str, name: str, *losses: str) -> Row:
    """Return the row of a weight of the loss, which says nothing to other losses than these."""
    losses = losses or ONLY_WITH[name]

    def says_nothing(draft: Draft) -> str:
        loss = draft.ours("preference.loss", "a reward model")
        return "" if loss in losses else f"says nothing to {loss}"

    return Row(keys, f"preference.{name}", unless=says_nothing)


def _label_smoothing(value: Any, draft: Draft) -> Outcome:
    """Carry label smoothing. Raise ConfigError where LLaMA-Factory refuses it."""
    loss = draft.ours("preference.loss", "dpo")
    if draft.tool.name == "LLaMA-Factory" and value and loss != "dpo":
        draft.refuse(draft.at, f"LLaMA-Factory refuses it beside pref_loss: {loss}")
    return _SMOOTHING.outcome(value, draft)


def _rpo(value: Any, draft: Draft) -> Outcome:
    """Carry TRL's name for the SFT term, which says something to losses with a reference alone."""
    loss = draft.ours("preference.loss")
    if loss in ("cpo", "simpo"):
        return unneeded(f"says nothing to {loss}")
    return _SFT_WEIGHT.outcome(value, draft)


def _sft_term(value: Any, draft: Draft) -> Outcome:
    """Take LLaMA-Factory's SFT term."""
    outcome = _SFT_WEIGHT.outcome(value, draft)
    if not value:
        return outcome
    if outcome.kind == "unneeded":
        return dropped(
            f"an SFT term beside {draft.ours('preference.loss', 'a reward model')} is not there"
        )
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
TABLE: Final = Table(
    rows=[
        # Weights of the loss; the first name of each is TRL's, or the tool's that has it first.
        _weight("beta pref_beta rl_beta dpo_beta orpo_alpha", "beta", *METHODS, "hinge", "robust"),
        _weight("simpo_gamma", "gamma"),
        _weight("desirable_weight kto_chosen_weight kto_desirable_weight", "desirable_weight"),
        _weight("undesirable_weight kto_rejected_weight kto_undesirable_weight", "undesirable_weight"),
        _weight("reference_free", "reference_free"),
        _weight("center_rewards_coefficient", "center_coefficient", "a reward model"),
        _SMOOTHING,
        Row("dpo_label_smoothing", "preference.label_smoothing", other=_label_smoothing),
        _SFT_WEIGHT,
        Row("rpo_alpha", "preference.sft_weight", other=_rpo),
        Row("pref_ftx", "preference.sft_weight", other=_sft_term),
        # What means something else than in supervised fine-tuning.
        Row("metric_for_best_model", "training.metric_for_best_model", other=_metric),
        Row("trl", "preference.beta", other=_trl),
        Row("ref_model ref_model_id", other=_reference),
        Row("loss_scale", "data.train_on", dict.fromkeys(("default", "last_round"), "assistant"),
            dropped("tokens weigh 1")),
    ],
    dropped={
        "f_divergence_type": ("the reverse KL is the only divergence", "reverse_kl"),
        "ref_adapters ref_model_adapters ref_model_type ref_model_revision ref_model_quantization_bit "
        "ref_model_init_kwargs model_adapter_name ref_adapter_name": _OTHER_REFERENCE,
        "force_use_ref_model": (_OTHER_REFERENCE, False),
        "sync_ref_model": ("the reference stays as it is", False),
        "ref_model_mixup_alpha ref_model_sync_steps": "the reference stays as it is",
        "max_prompt_length max_completion_length max_target_length":
            "prompt and answer together have data.max_length; data.overlong says what becomes of longer ones",
        "ld_alpha loss_weights": "has no counterpart",
        "use_weighting pref_bco_weight dpo_use_weighting": ("has no counterpart", False),
    },
    unneeded={
        "precompute_ref_log_probs precompute_ref_batch_size precompute_ref_eval_batch_size":
            "the reference is computed once, before training, and kept",
        "disable_dropout": "dropout of the adapter is lora.dropout, and off in the reference",
        "task_type": "follows from the task",
        "packing sample_packing neat_packing eval_packing packing_length eval_sample_packing":
            "answers lie end to end in a packed batch (data.packing), and a pair stays together",
        "discopop_tau f_alpha_divergence_coef use_logits_to_keep dpo_use_logits_to_keep generate_during_eval "
        "is_encoder_decoder padding_value label_pad_token_id rlhf_type num_labels dpo_use_liger_kernel":
            "has no counterpart, and no effect on the result",
    },
)  # fmt: skip
