"""Hugging Face Trainer with PEFT, as its documentation shows it. Works without the `datasets` library."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.job import (
    Order,
    drive,
    lora,
    read_rows,
    recording_callback,
    stock_arguments,
    train,
)
from benchmarks.recorder import Recorder


def measure(order: Order) -> dict[str, Any]:
    """Train as ordered; settings: `dtype`, and those of `stock_arguments`."""
    recorder = Recorder(order.started)
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
    )

    arguments, loading = stock_arguments(order)
    loading["dtype"] = order.settings.get("dtype", "float32")
    tokenizer = AutoTokenizer.from_pretrained(order.model)
    model = AutoModelForCausalLM.from_pretrained(order.model, **loading)
    settings = lora(order)
    if settings is not None:
        from peft import get_peft_model

        model = get_peft_model(model, settings)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=read_rows(order),
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100),
        processing_class=tokenizer,
        callbacks=[recording_callback(recorder)],
    )
    return train(trainer, recorder)


if __name__ == "__main__":
    drive(measure)
