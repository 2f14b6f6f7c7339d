"""TRL's own preparation of a data set of prompts and completions, timed inside a whole SFTTrainer."""

from __future__ import annotations

import tempfile
from typing import Any

from benchmarks.peers.job import Order, drive, read_lines, tokens_of
from benchmarks.peers.tokenizing import processes_of, timed


def measure(order: Order) -> dict[str, Any]:
    """Make a trainer; only what it does with the data set is timed."""
    import datasets
    import torch
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found, unused-ignore]

    datasets.disable_caching()
    numbers: dict[str, Any] = {}

    class Timed(SFTTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            prepare = super()._prepare_dataset
            prepared, seconds = timed(lambda: prepare(dataset, *args, **kwargs))
            numbers.update(seconds, rows=len(dataset), tokens=tokens_of(prepared))
            return prepared

    config = SFTConfig(
        output_dir=tempfile.mkdtemp(prefix="peer-"),
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        max_length=order.max_length,
        dataset_num_proc=processes_of(order),
    )
    Timed(
        model=order.model,
        args=config,
        train_dataset=datasets.Dataset.from_list(read_lines(order)),
        processing_class=AutoTokenizer.from_pretrained(order.model),
    )
    return numbers


if __name__ == "__main__":
    drive(measure)
