"""TRL's DPOTrainer, given prompts and answers as texts, from which it makes the same ids."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.job import (
    Order,
    drive,
    effective,
    lora,
    read_lines,
    recording_callback,
    stock_arguments,
)
from benchmarks.recorder import Recorder

COLUMNS = ("prompt", "chosen", "rejected")


def measure(order: Order) -> dict[str, Any]:
    """Train as ordered; settings: `precomputed` (the reference is asked before training), and those of `stock_arguments`.

    Raise RuntimeError if TRL makes other ids of the texts than kubetune has.
    """
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
    if order.settings.get("grouped"):
        rows = rows.map(lambda row: {"length": _length(row["ids"])})
        # The column of lengths is none that a model takes: the trainer would remove it.
        arguments["remove_unused_columns"] = False
    trainer = DPOTrainer(
        model=order.model,
        args=DPOConfig(**arguments, model_init_kwargs=loading or None),
        train_dataset=rows,
        peft_config=lora(order),
        processing_class=AutoTokenizer.from_pretrained(order.model),
        callbacks=[recording_callback(recorder)],
    )
    tokens = 0
    for row, line in zip(trainer.train_dataset, read_lines(order), strict=True):
        ids = line["ids"]
        if any(row[f"{name}_ids"] != ids[name] for name in COLUMNS):
            raise RuntimeError("TRL made other ids of the texts than those that kubetune is given")
        tokens += 2 * len(ids["prompt"]) + len(ids["chosen"]) + len(ids["rejected"])
    trainer.train()
    return recorder.result(tokens, effective=effective(trainer.model, trainer.args, trainer.state))


def _length(ids: dict[str, list[int]]) -> int:
    """Return the tokens of the longer of both sequences."""
    return len(ids["prompt"]) + max(len(ids["chosen"]), len(ids["rejected"]))


if __name__ == "__main__":
    drive(measure)
