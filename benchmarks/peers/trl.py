"""TRL's SFTTrainer, given ids and labels, or text for measuring how soon it starts."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.job import (
    Order,
    drive,
    lora,
    read_lines,
    read_rows,
    recording_callback,
    stock_arguments,
    train,
)
from benchmarks.recorder import Recorder


def measure(order: Order) -> dict[str, Any]:
    """Train as ordered; settings: `packed`, and those of `stock_arguments`.

    Packing makes rows of `pack_length` tokens and cuts off what is longer, so its tokens are counted afterwards.
    """
    recorder = Recorder(order.started)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found, unused-ignore]

    arguments, loading = stock_arguments(order)
    arguments["max_length"] = order.max_length
    if order.settings.get("packed"):
        arguments |= {"packing": True, "max_length": order.pack_length}
    rows = read_lines(order) if order.text else read_rows(order)
    trainer = SFTTrainer(
        model=order.model,
        args=SFTConfig(**arguments, model_init_kwargs=loading or None),
        train_dataset=Dataset.from_list(rows),
        peft_config=lora(order),
        processing_class=AutoTokenizer.from_pretrained(order.model),
        callbacks=[recording_callback(recorder)],
    )
    return train(trainer, recorder)


if __name__ == "__main__":
    drive(measure)
