"""What our sections do not allow together is taken out of a draft, and the key that it came from says why."""

from __future__ import annotations

from typing import Final

from kubetune.config.schema import DataConfig, LoraConfig
from kubetune.plugins.importers.engine import Draft, near
from kubetune.plugins.importers.shared import TRACKERS

# Their trainers evaluate nothing without data, and say nothing of it; ours refuses the setting.
_NEEDS_EVALUATION: Final = (
    "early_stopping_patience metric_for_best_model greater_is_better eval_steps"
)
_NOT_FP8: Final = ("quantization", "lora.dropout", "lora.use_dora", "training.parallelism")


def settle(draft: Draft) -> None:
    """Take out what our sections do not allow together, and say so."""
    _packed_batches(draft)
    if not draft.has("data.eval"):
        why = "nothing is evaluated, since no data are given for it; set data.eval"
        for key in _NEEDS_EVALUATION.split():
            draft.withdraw(f"training.{key}", why)
    if not draft.has("push.repo"):
        draft.withdraw("push.private", "nothing is uploaded", "unneeded")

    # WANDB_PROJECT in a file whose report_to is [tensorboard] says nothing.
    for path in list(draft.settings):
        section = path.rpartition(".")[0]
        if section == "lora" and not draft.has("lora") and draft.tool.name != "job resources":
            why = "every parameter is trained, so it says nothing; for LoRA: lora: true"
            draft.withdraw(path, why)
        if section.removeprefix("tracking.") in TRACKERS and not draft.has(section):
            draft.withdraw(path, f"{section} is not on in this file", "unneeded")

    is_plain = draft.ours("task", "causal_lm") == "causal_lm" and draft.has("lora")
    if not is_plain or any(draft.ours(path) for path in _NOT_FP8):
        why = "training.fp8 is for LoRA without dropout, on a base that is neither quantised nor sharded"
        draft.withdraw("training.fp8", why)
    _routers(draft)
    if draft.ours("training.parallelism") == "fsdp":
        _sharding(draft)


def _routers(draft: Draft) -> None:
    """Take out the losses of routers that do not learn, which LoRA leaves as they are unless it names them."""
    names = {
        name: draft.ours(f"lora.{name}")
        for name in ("target_modules", "target_parameters", "modules_to_save")
    }
    named = {name: value for name, value in names.items() if value is not None}
    if not draft.has("lora") or not LoraConfig(**named).leaves_routers:
        return
    for path in ("training.router_aux_loss_coef", "training.router_z_loss_coef"):
        if draft.ours(path):
            draft.withdraw(
                path, "no router learns here; name it in lora.target_parameters ([mlp.gate.weight])"
            )


def _packed_batches(draft: Draft) -> None:
    """Make a number of tokens of a global batch that counts packed rows."""
    rows = draft.ours("training.global_batch_size")
    path = "training.global_batch_tokens"
    if rows is None or draft.ours(path) != "packed":
        return
    # Example: 64 packed rows of 1,024 tokens become 65,536 tokens.
    length = draft.ours("data.max_length", DataConfig.model_fields["max_length"].default)
    key = draft.origin("training.global_batch_size") or ""
    draft.withdraw("training.global_batch_size", "")
    text = f"{path}: {rows * length:,}, {rows} full rows of {length:,} tokens"
    draft.carry(key, path, rows * length, text)


def _sharding(draft: Draft) -> None:
    """Take out FSDP2 beside settings that it cannot be combined with here."""
    is_full = not draft.has("lora")
    path = "training.parallelism"
    if draft.ours("quantization") not in (None, "none", "auto"):
        draft.withdraw(
            path, "a quantised base, which is small, is not sharded; each GPU holds a copy"
        )
    if draft.ours("task") == "sequence_classification":
        draft.withdraw(path, "task: sequence_classification is not sharded")
    if is_full and draft.has("preference.images"):
        draft.withdraw(path, "preference.images without lora is not sharded")
    for name in ("use_dora", "modules_to_save"):
        if draft.ours(f"lora.{name}"):
            draft.withdraw(path, f"a model with lora.{name} is not sharded; each GPU holds a copy")
    if is_full and draft.has(path) and draft.ours("training.optim") == "adamw_8bit":
        key = draft.origin("training.optim") or ""
        why = "8-bit state is not sharded; slices of AdamW's are small"
        draft.write(key, near("adamw", why), "training.optim")
