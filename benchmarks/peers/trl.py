"""TRL's SFTTrainer, given ids and labels, or text for measuring how soon it starts."""

from __future__ import annotations

import json
from pathlib import Path
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
    """Train as ordered; settings: `model` (keyword arguments of loading), `grouped`, `packed`, `tuned`, `arguments`.

    Packing makes rows of `pack_length` tokens and cuts off what is longer, so its tokens are counted afterwards.
    """
    recorder = Recorder(order.started)
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found, unused-ignore]

    arguments = common_arguments(order, cpu=not torch.cuda.is_available())
    arguments |= {"max_length": order.max_length}
    loading = dict(order.settings.get("model", {}))
    if order.settings.get("grouped"):
        group_whole_set()
        arguments["train_sampling_strategy"] = "group_by_length"
    if order.settings.get("packed"):
        arguments |= {"packing": True, "max_length": order.pack_length}
    if order.settings.get("tuned"):
        loading["attn_implementation"] = fast_attention()
        arguments["use_liger_kernel"] = has_liger()
    trainer = SFTTrainer(
        model=order.model,
        args=SFTConfig(**arguments, model_init_kwargs=loading or None),
        train_dataset=Dataset.from_list(_text(order) if order.text else read_rows(order)),
        peft_config=lora(order),
        processing_class=AutoTokenizer.from_pretrained(order.model),
        callbacks=[recording_callback(recorder)],
    )
    trainer.train()
    return recorder.result(
        tokens_of(trainer.train_dataset), effective=effective(trainer.model, trainer.args, trainer.state)
    )


def _text(order: Order) -> list[dict[str, str]]:
    with Path(order.data).open() as file:
        return [json.loads(line) for line in file]


if __name__ == "__main__":
    drive(measure)
