"""Hugging Face Trainer with PEFT, as its documentation shows it. Works without the `datasets` library."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.gpu import fast_attention, has_liger
from benchmarks.peers.job import (
    Order,
    common_arguments,
    drive,
    effective,
    group_whole_set,
    lora,
    read_rows,
    recording_callback,
    tokens_of,
)
from benchmarks.recorder import Recorder


def measure(order: Order) -> dict[str, Any]:
    """Train as ordered; settings: `dtype`, `grouped`, `tuned` (GPU kernels), `arguments`."""
    recorder = Recorder(order.started)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    rows = read_rows(order)
    tokenizer = AutoTokenizer.from_pretrained(order.model)
    arguments = common_arguments(order, cpu=not torch.cuda.is_available())
    if order.settings.get("grouped"):
        group_whole_set()
        arguments["train_sampling_strategy"] = "group_by_length"
    extra: dict[str, Any] = {}
    if order.settings.get("tuned"):
        extra["attn_implementation"] = fast_attention()
        arguments["use_liger_kernel"] = has_liger()
    dtype = getattr(torch, order.settings.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_pretrained(order.model, dtype=dtype, **extra)
    if (settings := lora(order)) is not None:
        from peft import get_peft_model

        model = get_peft_model(model, settings)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100),
        processing_class=tokenizer,
        callbacks=[recording_callback(recorder)],
    )
    trainer.train()
    return recorder.result(tokens_of(rows), effective=effective(trainer.model, trainer.args, trainer.state))


if __name__ == "__main__":
    drive(measure)
