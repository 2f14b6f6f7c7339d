"""Preference tuning and reward models in other tools' files: the loss, and its settings.

All four tools build on TRL's trainers.
"""

from __future__ import annotations

from typing import Any

from kubetune.config.metric_names import full_name, metrics_of
from kubetune.plugins.importers.common.training_keys import REFERENCE_STAYS, loss, reference
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
METHODS = ("dpo", "ipo", "orpo", "simpo", "cpo", "kto")
# Our loss for each `loss_type` that a method may have; orpo and simpo are LLaMA-Factory's.
_LOSSES = {
    "dpo": {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust", "orpo": "orpo", "simpo": "simpo"},
    "cpo": {"sigmoid": "cpo", "simpo": "simpo"},
    "kto": {"kto": "kto"},
}  # fmt: skip
# Defaults of TRL's CPO trainer, which is axolotl's too.
SIMPO = {"preference.beta": 0.1, "preference.gamma": 0.5, "preference.sft_weight": 1.0}
_METRICS = {
    "loss": "loss", "rewards/accuracies": "accuracy", "rewards/margins": "margin", "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected", "logps/chosen": "logp_chosen", "logps/rejected": "logp_rejected",
    "accuracy": "accuracy", "margin": "margin", "kl": "kl",
}  # fmt: skip
_OTHER_REFERENCE = "the reference is the model before training; no other model can be named"


def tables(kind: str) -> tuple[Table, ...]:
    """Return the tables of a kind of learning, such as `dpo` or `reward`."""
    known = _LOSSES.get(kind, {})
    rows = [loss("dpo_loss_type pref_loss", "preference.loss", known)]
    if kind in _LOSSES:
        rows.append(loss("loss_type", "preference.loss", known))
    if kind == "kto":
        rows.append(Row("pref_loss", other=unneeded("has no effect in KTO")))
    return TABLE, Table(rows=rows)


def finish(draft: Draft) -> None:
    """Fill in the loss of a kind of learning that has one, and the tool's defaults of that loss."""
    if draft.ours("task") == "preference":
        loss = draft.settings.setdefault("preference.loss", draft.kind)
        draft.assume_defaults(loss)


def _sft_term(value: Any, draft: Draft) -> Outcome:
    """Take LLaMA-Factory's SFT term."""
    if not value:
        return carried(value)
    if draft.get("pref_loss") == "orpo" or draft.get("stage") != "dpo":
        return dropped("kubetune has no SFT term beside this loss")
    return near(
        value,
        "LLaMA-Factory takes the mean of each answer's mean loss, kubetune the mean over all tokens, so that "
        "long answers weigh more",
    )


def _metric(value: Any, draft: Draft) -> Outcome:
    """Carry the metric by which the best checkpoint is chosen."""
    name = full_name(_METRICS.get(str(value).removeprefix("eval_")))
    is_judged = "kto" in (draft.command, *map(draft.get, ("rl", "rlhf_type", "stage")))
    if name in metrics_of(draft.ours("task", "causal_lm"), "auto", judged=is_judged):
        return carried(name)
    return dropped(f"evaluations have no {value}; see training.metric_for_best_model")


# Keys of preference tuning and reward models; each counts before the tool's own row for it.
TABLE = Table(
    same={
        # The first name of each is TRL's, or the tool's that has it first.
        "preference.beta": "beta pref_beta rl_beta dpo_beta orpo_alpha",
        "preference.gamma": "simpo_gamma",
        "preference.desirable_weight": "desirable_weight kto_chosen_weight kto_desirable_weight",
        "preference.undesirable_weight": "undesirable_weight kto_rejected_weight kto_undesirable_weight",
        "preference.reference_free": "reference_free",
        "preference.center_coefficient": "center_rewards_coefficient",
        "preference.label_smoothing": "label_smoothing dpo_label_smoothing",
        "preference.sft_weight": "cpo_alpha rpo_alpha",
    },
    rows=[
        Row("pref_ftx", "preference.sft_weight", other=_sft_term),
        # What means something else than in supervised fine-tuning.
        Row("metric_for_best_model", "training.metric_for_best_model", other=_metric),
        Row("ref_model ref_model_id", other=reference),
        Row("loss_scale", "data.train_on", dict.fromkeys(("default", "last_round"), "assistant"),
            dropped("tokens weigh 1")),
    ],
    dropped={
        "f_divergence_type": ("the reverse KL is the only divergence", "reverse_kl"),
        "ref_adapters ref_model_adapters ref_model_type ref_model_revision ref_model_quantization_bit "
        "ref_model_init_kwargs model_adapter_name ref_adapter_name": _OTHER_REFERENCE,
        "force_use_ref_model": (_OTHER_REFERENCE, False),
        **REFERENCE_STAYS,
        "max_prompt_length max_completion_length max_target_length":
            "prompt and answer together have data.max_length; data.overlong says what becomes of longer ones",
        "ld_alpha loss_weights use_weighting pref_bco_weight dpo_use_weighting": ("has no counterpart", False),
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
