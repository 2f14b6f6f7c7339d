"""What our sections do not allow together is taken out of a draft, and the key that it came from says why."""

from __future__ import annotations

from kubetune.config.schema import DataConfig
from kubetune.plugins.importers.engine import Draft, near

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
    if draft.has("push.private") and not draft.has("push.repo"):
        del draft.settings["push.private"]
        draft.ignore("hub_private_repo", "nothing is uploaded")
    if not draft.has("lora") and draft.tool.name != "job resources":
        for path in list(draft.settings):
            if path.startswith("lora."):
                draft.withdraw(path, "every parameter is trained, so it says nothing")
    if not _allows_fp8(draft):
        why = "training.fp8 is for LoRA without dropout, on a base that is neither quantised nor sharded"
        draft.withdraw("training.fp8", why)
    if draft.ours("training.parallelism") == "fsdp":
        _sharding(draft)


def _packed_batches(draft: Draft) -> None:
    """Make a number of tokens of a global batch that counts packed rows."""
    rows = draft.ours("training.global_batch_size")
    if rows is None or draft.ours("training.global_batch_tokens") != "packed":
        return
    # Example: 64 packed rows of 1,024 tokens become 65,536 tokens.
    length = draft.ours("data.max_length", DataConfig.model_fields["max_length"].default)
    key = draft.origins["training.global_batch_size"]
    draft.withdraw("training.global_batch_size", "")
    path = "training.global_batch_tokens"
    text = f"{path}: {rows * length:,}, {rows} full rows of {length:,} tokens"
    draft.carry(key, path, rows * length, text)


def _allows_fp8(draft: Draft) -> bool:
    """True for LoRA alone on a base in 16 bits, one copy on each GPU."""
    others = ("quantization", "lora.dropout", "lora.use_dora", "training.parallelism")
    is_plain = draft.ours("task", "causal_lm") == "causal_lm" and draft.has("lora")
    return is_plain and not any(draft.ours(path) for path in others)


def _sharding(draft: Draft) -> None:
    """Take out FSDP2 beside settings that it cannot be combined with here."""
    # The first of these that applies is told.
    is_full = not draft.has("lora")
    path = "training.parallelism"
    task = draft.ours("task")
    what = ""
    if draft.ours("quantization", "none") not in ("none", "auto"):
        what = "a quantised base, which is small,"
    elif task == "sequence_classification":
        what = f"task: {task}"
    elif is_full and draft.has("preference.images"):
        what = "preference.images without lora"
    elif draft.ours("lora.use_dora"):
        what = "DoRA"
    elif draft.has("lora.modules_to_save"):
        what = "a model with lora.modules_to_save"
    if what:
        draft.withdraw(path, f"{what} is not sharded; each GPU holds a copy")
    elif is_full and draft.ours("training.optim") == "adamw_8bit":
        key = draft.origins["training.optim"]
        why = "8-bit state is not sharded; slices of AdamW's are small"
        draft.write(key, near("adamw", why), "training.optim")
