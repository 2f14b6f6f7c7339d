"""TRL's DPOTrainer, given prompts and answers as texts, from which it makes the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Order, drive, effective, lora, recording_callback, stock_arguments
from benchmarks.recorder import Recorder

COLUMNS = ("prompt", "chosen", "rejected")


def measure(order: Order) -> dict[str, Any]:
    """Train as ordered; settings: `precomputed`, what the reference says found before training, and those of
    `stock_arguments`. Raises RuntimeError where TRL's ids are others than those given."""
    recorder = Recorder(order.started)
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer  # type: ignore[import-not-found, unused-ignore]

    arguments, loading = stock_arguments(order)
    arguments |= {
        "max_length": order.max_length,
        "precompute_ref_log_probs": bool(order.settings.get("precomputed")),
    }
    rows = load_dataset("json", data_files=order.data, split="train")
    if order.settings.get(
        "grouped"
    ):  # by a column, which it would take away as one that no model takes
        rows = rows.map(lambda row: {"length": len(row["ids"]["prompt"]) + _longer(row["ids"])})
        arguments |= {"remove_unused_columns": False}
    trainer = DPOTrainer(
        model=order.model,
        args=DPOConfig(**arguments, model_init_kwargs=loading or None),
        train_dataset=rows,
        peft_config=lora(order),
        processing_class=AutoTokenizer.from_pretrained(order.model),
        callbacks=[recording_callback(recorder)],
    )
    with Path(order.data).open() as file:
        given = [json.loads(line)["ids"] for line in file]
    if [{name: row[f"{name}_ids"] for name in COLUMNS} for row in trainer.train_dataset] != given:
        raise RuntimeError("TRL made other ids of the texts than those that kubetune is given")
    trainer.train()
    tokens = sum(
        2 * len(ids["prompt"]) + len(ids["chosen"]) + len(ids["rejected"]) for ids in given
    )
    return recorder.result(tokens, effective=effective(trainer.model, trainer.args, trainer.state))


def _longer(ids: dict[str, list[int]]) -> int:
    return max(len(ids["chosen"]), len(ids["rejected"]))


if __name__ == "__main__":
    drive(measure)
