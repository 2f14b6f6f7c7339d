"""What our sections do not allow together is taken out of a draft, and the key that it came from says why."""

from __future__ import annotations

from kubetune.config.schema import DataConfig
from kubetune.plugins.importers.engine import Draft, near
from kubetune.plugins.importers.shared import TRACKERS

_NEEDS_EVALUATION = (
    "early_stopping_patience",
    "metric_for_best_model",
    "greater_is_better",
    "eval_steps",
)


def settle(draft: Draft) -> None:
    """Take out what our sections do not allow together, and say so."""
    _packed_batches(draft)
    # Their trainers evaluate nothing without data, and say nothing of it; ours refuses the setting.
    if not draft.has("data.eval"):
        why = "nothing is evaluated, since no data are given for it; set data.eval"
        for key in _NEEDS_EVALUATION:
            draft.withdraw(f"training.{key}", why)
    if not draft.has("push.repo"):
        draft.withdraw("push.private", "nothing is uploaded", "unneeded")
    if not draft.has("lora") and draft.tool.name != "job resources":
        why = "every parameter is trained, so it says nothing; for LoRA: lora: true"
        _withdraw_section(draft, "lora", why)
    # WANDB_PROJECT in a file whose report_to is [tensorboard] says nothing.
    for name in TRACKERS:
        if not draft.has(f"tracking.{name}"):
            _withdraw_section(draft, f"tracking.{name}", f"{name} is not on in this file")

    others = ("quantization", "lora.dropout", "lora.use_dora", "training.parallelism")
    is_plain = draft.ours("task", "causal_lm") == "causal_lm" and draft.has("lora")
    if not is_plain or any(draft.ours(path) for path in others):
        why = "training.fp8 is for LoRA without dropout, on a base that is neither quantised nor sharded"
        draft.withdraw("training.fp8", why)
    if draft.ours("training.parallelism") == "fsdp":
        _sharding(draft)


def _withdraw_section(draft: Draft, section: str, why: str) -> None:
    """Take out all settings of a section that the file does not switch on."""
    for path in list(draft.settings):
        if path.startswith(f"{section}."):
            draft.withdraw(path, why, "unneeded" if section != "lora" else "dropped")


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
    task = draft.ours("task")
    # The first of these that applies is told.
    conflicts = {
        "a quantised base, which is small,": draft.ours("quantization")
        not in (None, "none", "auto"),
        "task: sequence_classification": task == "sequence_classification",
        "preference.images without lora": is_full and draft.has("preference.images"),
        "DoRA": bool(draft.ours("lora.use_dora")),
        "a model with lora.modules_to_save": draft.has("lora.modules_to_save"),
    }
    for what, applies in conflicts.items():
        if applies:
            draft.withdraw("training.parallelism", f"{what} is not sharded; each GPU holds a copy")
            return
    if is_full and draft.ours("training.optim") == "adamw_8bit":
        key = draft.origin("training.optim") or ""
        why = "8-bit state is not sharded; slices of AdamW's are small"
        draft.write(key, near("adamw", why), "training.optim")
