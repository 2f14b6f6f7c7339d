"""TRL's own processing of pairs, run in an environment that has TRL (benchmarks/.venv-peers), which tests have not.

`trl_pairs.py TOKENIZER` reads records from standard input, a JSON line each, and writes for each the ids of its prompt,
of the chosen answer and of the rejected one.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace


def main() -> None:
    """Prepare every record by itself, since TRL looks at the first of a data set to see what all are."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    settings = DPOConfig(
        output_dir="unused", report_to=[], max_length=None, bf16=False, use_cpu=True
    )
    for line in sys.stdin:
        data = Dataset.from_list([json.loads(line)])
        (row,) = DPOTrainer._prepare_dataset(
            SimpleNamespace(_tokenizer=tokenizer), data, tokenizer, settings, "train"
        )
        print(json.dumps([row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]]))


if __name__ == "__main__":
    main()
