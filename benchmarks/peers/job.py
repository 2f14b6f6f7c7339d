"""What a driver is told, and what drivers share. Imports nothing heavy by itself.

Every driver of this folder has one function, `measure(order)`, which trains as ordered and returns what a `Recorder`
has recorded:

    recorder = Recorder(order.started)                                 before anything heavy is imported
    trainer = Trainer(…, callbacks=[recording_callback(recorder)])     the library's own, by its documentation
    return train(trainer, recorder)
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.gpu import fast_attention, has_liger
from benchmarks.recorder import Recorder, report

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Order:
    """One measurement, as a driver is told it."""

    model: str  # its folder
    data: str  # JSONL of rows
    adapt: str  # what is trained
    lora_rank: int
    batch: int  # sequences at a time and rank
    accumulation: int  # batches of each rank per optimizer step
    epochs: int
    max_length: int  # tokens that no row has more of
    pack_length: int  # tokens of a row of trainers that pack
    settings: dict[str, Any]  # the trainer's own
    started: float  # when the process was started, on time.monotonic's clock
    run_dir: str = ""  # of kubetune alone
    text: bool = False  # True if rows are text, and not ids
    max_steps: int = -1  # -1: all of the epochs


def drive(measure: Callable[[Order], dict[str, Any]]) -> None:
    """Carry out the order in argv. A library that is not installed is a result, not a failure."""
    warnings.filterwarnings("ignore")
    order = Order(**json.loads(sys.argv[1]))
    try:
        report(measure(order))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("benchmarks"):
            raise
        report({"missing": error.name.partition(".")[0]})


def read_lines(order: Order) -> list[dict[str, Any]]:
    """Return every row as it is in the file."""
    with Path(order.data).open() as file:
        return [json.loads(line) for line in file]


def read_rows(order: Order) -> list[dict[str, list[int]]]:
    """Return `input_ids` and `labels` of every row."""
    rows = read_lines(order)
    return [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]


def lora(order: Order) -> Any:
    """Return PEFT's settings, or None for full fine-tuning."""
    if order.adapt == "full":
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=order.lora_rank,
        lora_alpha=2 * order.lora_rank,
        lora_dropout=0.0,
        target_modules=ATTENTION if order.adapt == "attention" else "all-linear",
        task_type="CAUSAL_LM",
    )


def common_arguments(order: Order, cpu: bool) -> dict[str, Any]:
    """Return the arguments of every Hugging Face trainer: the batch, a constant learning rate, nothing saved or reported.

    What is not set here or in the order's settings stays at the trainer's default.
    """
    arguments: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="peer-"),
        "per_device_train_batch_size": order.settings.get("batch", order.batch),
        "gradient_accumulation_steps": order.settings.get("accumulation", order.accumulation),
        "num_train_epochs": order.epochs,
        "max_steps": order.max_steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    # Without a GPU there is nothing to pin memory for, and torch warns of it.
    if cpu:
        arguments |= {"use_cpu": True, "dataloader_pin_memory": False}
        if "WORLD_SIZE" in os.environ:
            arguments["ddp_backend"] = "gloo"
    of_trainer: dict[str, Any] = order.settings.get("arguments", {})
    return arguments | of_trainer


def stock_arguments(order: Order) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a Hugging Face trainer, and keywords for loading its model.

    Settings: `model` (such keywords), `grouped` (length groups), `tuned` (GPU kernels), `arguments`.
    """
    import torch

    arguments = common_arguments(order, cpu=not torch.cuda.is_available())
    loading = dict(order.settings.get("model", {}))
    if order.settings.get("grouped"):
        group_whole_set()
        arguments["train_sampling_strategy"] = "group_by_length"
    if order.settings.get("tuned"):
        loading["attn_implementation"] = fast_attention()
        arguments["use_liger_kernel"] = has_liger()
    return arguments, loading


def train(trainer: Any, recorder: Recorder) -> dict[str, Any]:
    """Train with a Hugging Face trainer that has `recording_callback(recorder)`, and return the measurement."""
    trainer.train()
    return recorder.result(
        tokens_of(trainer.train_dataset),
        effective=effective(trainer.model, trainer.args, trainer.state),
    )


def group_whole_set() -> None:
    """Let length grouping sort the whole set, as it nearly does with the tens of thousands of rows of a real one.

    transformers sorts at most a quarter of the rows together. With a benchmark's few rows that groups hardly anything.
    """
    from transformers import trainer_pt_utils

    stock: Any = trainer_pt_utils.get_length_grouped_indices

    def sorted_together(
        lengths: Any, batch_size: int, mega_batch_mult: int | None = None, generator: Any = None
    ) -> Any:
        return stock(lengths, batch_size, mega_batch_mult=50, generator=generator)

    trainer_pt_utils.get_length_grouped_indices = sorted_together


def recording_callback(recorder: Recorder) -> Any:
    """Return a callback of transformers that tells `recorder` of steps, epochs and losses."""
    from transformers import TrainerCallback

    class Recording(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            recorder.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.step()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            recorder.epoch()

        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if logs and "loss" in logs:
                recorder.losses.append(float(logs["loss"]))

    return Recording()


def tokens_of(rows: Any) -> int:
    """Return the tokens of a data set with `input_ids`, without padding."""
    total = 0
    for row in rows:
        if "attention_mask" in row:
            total += sum(row["attention_mask"])
        else:
            total += len(row["input_ids"])
    return total


def effective(model: Any, arguments: Any, state: Any) -> dict[str, Any]:
    """Return what a trainer really ran with, for the results file."""
    # With adapters the first frozen weight, else the first matrix: what products are computed with.
    first = next(p for p in model.parameters() if not p.requires_grad or p.dim() > 1)
    recomputes = [getattr(module, "gradient_checkpointing", False) for module in model.modules()]
    return {
        "weights": str(first.dtype),
        "autocast_bf16": bool(arguments.bf16),
        "gradient_checkpointing": any(recomputes),
        "attention": getattr(model.config, "_attn_implementation", None),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": state.global_step,
    }
