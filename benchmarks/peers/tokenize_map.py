"""`datasets.map` with a fast tokenizer in batches, as a careful user writes it for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.job import Order, drive, tokens_of
from benchmarks.peers.tokenizing import processes_of, text_of, timed


def measure(order: Order) -> dict[str, Any]:
    """Tokenise prompts and whole texts; the prompt's tokens are no labels."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_caching()
    tokenizer = AutoTokenizer.from_pretrained(order.model)
    rows = datasets.Dataset.from_list(text_of(order))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [
            prompt + completion
            for prompt, completion in zip(batch["prompt"], batch["completion"], strict=True)
        ]
        whole = tokenizer(texts, add_special_tokens=False)["input_ids"]
        prompts = tokenizer(batch["prompt"], add_special_tokens=False)["input_ids"]
        ids = [[*row, tokenizer.eos_token_id][: order.max_length] for row in whole]
        labels = [
            [-100] * len(prompt) + row[len(prompt) :]
            for prompt, row in zip(prompts, ids, strict=True)
        ]
        return {"input_ids": ids, "labels": labels}

    made: list[Any] = []

    def work() -> int:
        made.append(
            rows.map(
                encode, batched=True, num_proc=processes_of(order), remove_columns=rows.column_names
            )
        )
        return 0

    return timed(work, len(rows)) | {"tokens": tokens_of(made[0])}


if __name__ == "__main__":
    drive(measure)
