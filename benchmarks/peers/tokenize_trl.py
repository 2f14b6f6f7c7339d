"""TRL's own preparation of a data set of prompts and completions, timed inside a whole SFTTrainer."""

from __future__ import annotations

import tempfile
from typing import Any

from benchmarks.peers.job import Order, drive, tokens_of
from benchmarks.peers.tokenizing import processes_of, text_of, timed


def measure(order: Order) -> dict[str, Any]:
    """Make a trainer; only what it does with the data set is timed."""
    import datasets
    import torch
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found, unused-ignore]

    datasets.disable_caching()
    found: dict[str, Any] = {}

    class Timed(SFTTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            made: list[Any] = []

            def work() -> int:
                made.append(super(Timed, self)._prepare_dataset(dataset, *args, **kwargs))
                return 0

            found.update(timed(work, len(dataset)))
            found["tokens"] = tokens_of(made[0])
            return made[0]

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
        train_dataset=datasets.Dataset.from_list(text_of(order)),
        processing_class=AutoTokenizer.from_pretrained(order.model),
    )
    return found


if __name__ == "__main__":
    drive(measure)
