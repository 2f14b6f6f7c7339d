"""LLaMA-Factory, through the function that its command line calls. It takes text only and tokenises it itself."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.peers.job import (
    ATTENTION,
    Order,
    common_arguments,
    drive,
    effective,
    read_lines,
    recording_callback,
)
from benchmarks.recorder import Recorder


def measure(order: Order) -> dict[str, Any]:
    """Train with LoRA as ordered; settings: `arguments`."""
    recorder = Recorder(order.started)
    import torch

    _stand_in_for_torchaudio()
    from llamafactory.train import tuner  # type: ignore[import-not-found, unused-ignore]
    from transformers import TrainerCallback

    # The function returns nothing: what it trained with is known to its callbacks alone.
    kept: dict[str, Any] = {}

    class Keep(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            kept["effective"] = effective(parts["model"], args, state)
            kept["loader"] = parts["train_dataloader"]

    arguments = _arguments(order, cpu=not torch.cuda.is_available())
    # After training it writes a model card, which needs libraries that are not there.
    with contextlib.suppress(ImportError):
        tuner.run_exp(arguments, callbacks=[recording_callback(recorder), Keep()])
    tokens = sum(int(batch["attention_mask"].sum()) for batch in kept["loader"])
    return recorder.result(tokens, effective=kept["effective"])


def _stand_in_for_torchaudio() -> None:
    """Put an empty module in the place of torchaudio, which it imports for speech models only."""
    module = ModuleType("torchaudio")
    module.__spec__ = ModuleSpec("torchaudio", None)
    sys.modules.setdefault("torchaudio", module)


def _arguments(order: Order, cpu: bool) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="peer-"))
    # The `empty` template adds nothing: ids are those of the other trainers.
    pairs = []
    for row in read_lines(order):
        pairs.append({"instruction": row["prompt"], "input": "", "output": row["completion"]})
    (folder / "rows.json").write_text(json.dumps(pairs))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    method: dict[str, Any] = {"finetuning_type": "full"}
    if order.adapt != "full":
        method = {
            "finetuning_type": "lora",
            "lora_rank": order.lora_rank,
            "lora_alpha": 2 * order.lora_rank,
            "lora_target": ",".join(ATTENTION) if order.adapt == "attention" else "all",
        }
    return {
        **common_arguments(order, cpu),
        **method,
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": order.model,
        "dataset_dir": str(folder),
        "dataset": "rows",
        "template": "empty",
        "cutoff_len": order.max_length,
        "num_train_epochs": float(order.epochs),
        "plot_loss": False,
        "dataloader_num_workers": 0,
    }


if __name__ == "__main__":
    drive(measure)
