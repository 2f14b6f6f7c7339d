"""TRL's GRPOTrainer as benchmarks.grpo orders it: `python -m benchmarks.peers.trl_grpo ORDER`."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.peers.grpo_reward import alike


def train(order: dict[str, Any]) -> None:
    """Train as ordered. What is not named here stays at TRL's default."""
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

    arguments = GRPOConfig(
        output_dir=order["output"],
        max_steps=order["steps"],
        per_device_train_batch_size=order["micro_batch"],
        gradient_accumulation_steps=order["answers_of_step"] // order["micro_batch"],
        num_generations=order["answers"],
        max_completion_length=order["longest"],
        learning_rate=order["learning_rate"],
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=order["model"],
        args=arguments,
        reward_funcs=[alike],
        train_dataset=load_dataset("json", data_files=order["prompts"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(order["model"]),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
