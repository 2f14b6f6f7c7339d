"""Hugging Face Trainer for sentence classification, given files as GLUE's SST-2 has them."""

from __future__ import annotations

import csv
from typing import Any

from benchmarks.peers.job import Order, drive, recording_callback, stock_arguments, train
from benchmarks.recorder import Recorder

LORA = {
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "target_modules": ["query", "value"],
    "task_type": "SEQ_CLS",
}


def measure(order: Order) -> dict[str, Any]:
    """Train and evaluate as ordered; settings: `padded` (every row to the full length), those of `stock_arguments`."""
    recorder = Recorder(order.started)
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    arguments, loading = stock_arguments(order)
    tokenizer = AutoTokenizer.from_pretrained(order.model)
    padding = {"padding": "max_length"} if order.settings.get("padded") else {}

    def read(name: str) -> Dataset:
        with open(f"{order.data}/{name}.tsv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        texts = [row["sentence"] for row in rows]
        encoded = tokenizer(texts, truncation=True, max_length=order.max_length, **padding)
        return Dataset.from_dict({**encoded, "labels": [int(row["label"]) for row in rows]})

    model = AutoModelForSequenceClassification.from_pretrained(order.model, num_labels=2, **loading)
    if order.adapt == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**LORA))  # type: ignore[arg-type]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments, per_device_eval_batch_size=order.batch),
        train_dataset=read("train"),
        eval_dataset=read("dev"),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=_accuracy,
        callbacks=[recording_callback(recorder)],
    )
    numbers = train(trainer, recorder)
    return numbers | {"accuracy": float(trainer.evaluate()["eval_accuracy"])}


def _accuracy(outputs: Any) -> dict[str, float]:
    is_right = outputs.predictions.argmax(1) == outputs.label_ids
    return {"accuracy": float(is_right.mean())}


if __name__ == "__main__":
    drive(measure)
