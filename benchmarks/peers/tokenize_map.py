"""`datasets.map` with a fast tokenizer in batches, as a careful user writes it for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.job import Order, drive, read_lines, tokens_of
from benchmarks.peers.tokenizing import processes_of, timed


def measure(order: Order) -> dict[str, Any]:
    """Tokenise prompts and whole texts; the prompt's tokens are no labels."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_caching()
    tokenizer = AutoTokenizer.from_pretrained(order.model)
    rows = datasets.Dataset.from_list(read_lines(order))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = map(str.__add__, batch["prompt"], batch["completion"])
        whole = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        prompts = tokenizer(batch["prompt"], add_special_tokens=False)["input_ids"]
        all_ids = []
        all_labels = []
        for prompt, text in zip(prompts, whole, strict=True):
            ids = [*text, tokenizer.eos_token_id][: order.max_length]
            all_ids.append(ids)
            all_labels.append([-100] * len(prompt) + ids[len(prompt) :])
        return {"input_ids": all_ids, "labels": all_labels}

    def work() -> Any:
        return rows.map(
            encode, batched=True, num_proc=processes_of(order), remove_columns=rows.column_names
        )

    encoded, seconds = timed(work)
    return seconds | {"rows": len(rows), "tokens": tokens_of(encoded)}


if __name__ == "__main__":
    drive(measure)
