"""TRL's SFTTrainer on a case of `kubetune bench`, where it is installed.

In bf16, without recomputation, rows grouped by length: the best of its own options. Prints its row as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """Train, and return tokens/s of the steps after the first few, padding not counted, and the most memory."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found, unused-ignore]

    rows = [json.loads(line) for line in Path(order["data"]).read_text().splitlines()]
    mean = statistics.mean(map(_length, rows))
    # Two batches a step, as kubetune's cases have about.
    batch = max(1, round(order["tokens"] / mean / 2))

    # A GPU computes on after a call returns, so the clock waits for it at the end of each step.
    on_gpu = torch.cuda.is_available()
    ends = [time.perf_counter()]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    trainer = SFTTrainer(
        model=order["model"],
        args=SFTConfig(
            output_dir=order["folder"],
            max_steps=order["steps"],
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=2,
            max_length=order["longest"],
            gradient_checkpointing=False,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            group_by_length=True,
            report_to="none",
            save_strategy="no",
            model_init_kwargs={"dtype": "bfloat16"},
        ),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        processing_class=AutoTokenizer.from_pretrained(order["model"], trust_remote_code=False),
        callbacks=[Clock()],
    )
    trainer.train()

    # The first steps also allocate memory and choose kernels, so they do not count.
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    typical = statistics.median(seconds[order["warm"] :])
    peak = 0
    if on_gpu:
        peak = torch.cuda.max_memory_allocated()
    return {"tokens_per_second": 2 * batch * mean / typical, "peak_bytes": peak}


def _length(row: dict[str, str]) -> int:
    """Return the tokens of a row: a word is a token, and each row ends with one more."""
    words = f"{row['prompt']}{row['completion']}".split()
    return len(words) + 1


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
