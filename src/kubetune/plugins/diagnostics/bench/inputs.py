"""Models of random weights and rows of random words, for the cases of `kubetune bench`.

`python -m kubetune.plugins.diagnostics.bench.inputs SHAPE FOLDER` writes a model in a process of its own, which
imports torch.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

from kubetune.plan.model_shapes import shapes_of
from kubetune.plugins.diagnostics.bench.cases import SHAPES

# Tokens of a row: log-normal, as those of instruction data are. exp(5) = 148 tokens is the median.
LONGEST = 1024
MEAN_OF_LOGARITHM = 5.0
SPREAD_OF_LOGARITHM = 0.75
END = 1

TOKENIZER = "tokenizer.json"


def parameters_of(shape: str) -> int:
    """Return the number of parameters of a model."""
    return sum(math.prod(tensor) for tensor in shapes_of(SHAPES[shape]).values())


def write_model(shape: str, folder: Path) -> None:
    """Write a new model in bf16, and a tokenizer of words."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # Billions of numbers are drawn fast on a GPU.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(**SHAPES[shape])
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    model.save_pretrained(folder)
    # Last: a folder with a tokenizer counts as a whole model.
    _write_tokenizer(folder, SHAPES[shape]["vocab_size"])


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer whose tokens are the words t3, t4, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": END, "<unk>": 2}
    for number in range(3, vocabulary):
        words[f"t{number}"] = number
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / TOKENIZER))


def write_rows(path: Path, rows: int, vocabulary: int) -> None:
    """Write prompts and completions of random words."""
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"t{draw.randrange(10, vocabulary)}" for _ in range(count))

    with path.open("w") as file:
        for _ in range(rows):
            tokens = draw.lognormvariate(MEAN_OF_LOGARITHM, SPREAD_OF_LOGARITHM)
            # Half of a row is its prompt.
            half = int(min(LONGEST - 1, max(16, tokens))) // 2
            row = {"prompt": words(half), "completion": f" {words(half)}"}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]))
