"""Drives one trainer of sentence classification: `python -m benchmarks.peers.classify ORDER`, ORDER being JSON."""

from __future__ import annotations

import csv
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.recorder import report, versions

BATCH, LEARNING_RATE, MAX_LENGTH = 64, 5e-5, 128


def main(order: dict[str, Any]) -> None:
    """Train, evaluate, and report CPU and wall seconds of that, accuracy and peak memory."""
    run = prepare_kubetune(order) if order["trainer"] == "kubetune" else prepare_trainer(order)
    cpu, wall = time.process_time(), time.perf_counter()
    accuracy = run()
    report(
        {
            "cpu_seconds": time.process_time() - cpu,
            "seconds": time.perf_counter() - wall,
            "accuracy": accuracy,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "versions": versions(),
        }
    )


def prepare_kubetune(order: dict[str, Any]) -> Any:
    """Prepare the data; the function returned trains as `kubetune train` does."""
    from kubetune import train_worker
    from kubetune.config.schema import Config
    from kubetune.data.prepare import prepare
    from kubetune.health import StopRequest
    from kubetune.launch.local import create_run_dir
    from kubetune.metrics import read_metrics

    run_dir = Path(order["work"]) / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    config = Config.model_validate(
        {
            "task": "sequence_classification",
            "model": {"path": order["model"], "dtype": order["dtype"]},
            "data": {
                "train": f"{order['data']}/train.tsv",
                "eval": f"{order['data']}/dev.tsv",
                "max_length": MAX_LENGTH,
                "cache": order["work"],
            },
            "training": {
                "num_train_epochs": 1,
                "global_batch_size": BATCH,
                "per_device_train_batch_size": BATCH,
                "learning_rate": LEARNING_RATE,
                "lr_scheduler_type": "linear",
                "warmup_ratio": 0.0,
            },
            "output": str(run_dir),
        }
    )
    create_run_dir(config, run_dir)
    (run_dir / "logs").mkdir(exist_ok=True)
    prepare(config)

    def train() -> float:
        train_worker.work(config, run_dir, StopRequest())
        return float(read_metrics(run_dir)[-1]["eval_accuracy"])

    return train


def prepare_trainer(order: dict[str, Any]) -> Any:
    """Tokenise, load the model and set up the Trainer; the function returned trains and evaluates."""
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(order["model"])
    padded = order["trainer"] == "trainer-padded"

    def read(name: str) -> Dataset:
        with open(f"{order['data']}/{name}.tsv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        padding = {"padding": "max_length"} if padded else {}
        encoded = tokenizer([r["sentence"] for r in rows], truncation=True, max_length=MAX_LENGTH, **padding)
        return Dataset.from_dict({**encoded, "labels": [int(r["label"]) for r in rows]})

    arguments = TrainingArguments(
        f"{order['work']}/trainer",
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        bf16=order["dtype"] == "bfloat16",
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **({} if padded else {"train_sampling_strategy": "group_by_length"}),
    )
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_pretrained(order["model"], num_labels=2),
        args=arguments,
        train_dataset=read("train"),
        eval_dataset=read("dev"),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda said: {"accuracy": float((said.predictions.argmax(1) == said.label_ids).mean())},
    )

    def train() -> float:
        trainer.train()
        return float(trainer.evaluate()["eval_accuracy"])

    return train


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
