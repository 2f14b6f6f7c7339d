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
from typing import Any

from kubetune.base import files
from kubetune.plan.model_shapes import INDEX, shapes_of
from kubetune.plugins.diagnostics.bench.cases import SHAPES

# Tokens of a row: log-normal, as those of instruction data are. exp(5) = 148 tokens is the median.
LONGEST = 1024
MEAN_OF_LOGARITHM = 5.0
SPREAD_OF_LOGARITHM = 0.75
END = 1


def bytes_of(shape: str) -> int:
    """Return the bytes of a model on disk, in 16 bits."""
    numbers = 0
    for tensor_shape in shapes_of(SHAPES[shape]).values():
        numbers += math.prod(tensor_shape)
    return 2 * numbers


def write_model(shape: str, folder: Path) -> None:
    """Write a model in bf16 with a tokenizer of words; its weights are files of a layer each."""
    import torch
    from safetensors.torch import save_file

    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    torch.manual_seed(0)
    shapes = shapes_of(SHAPES[shape])

    # model.layers.7.mlp.up_proj.weight → model-7.safetensors; model.norm.weight → model-norm.safetensors
    names_by_file: dict[str, list[str]] = {}
    for name in shapes:
        parts = name.split(".")
        layer = parts[-2]
        if ".layers." in name:
            layer = parts[2]
        names_by_file.setdefault(f"model-{layer}.safetensors", []).append(name)

    # Of a large model one layer at a time fits into memory.
    index: dict[str, str] = {}
    for file, names in names_by_file.items():
        tensors = {name: _random_weight(shapes[name], device) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(names, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    _write_tokenizer(folder, SHAPES[shape]["vocab_size"])

    # Last, since a folder with a config.json counts as a whole model.
    config = {**SHAPES[shape], "torch_dtype": "bfloat16"}
    files.write_atomic(folder / "config.json", json.dumps(config))


def _random_weight(shape: tuple[int, ...], device: str) -> Any:
    """Return a tensor as a new model has it: a norm's weights are ones."""
    import torch

    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    # Drawn on the device, which is faster for billions of numbers.
    weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return weight.normal_(0, 0.02).cpu()


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer whose tokens are the words t3, t4, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": END, "<unk>": 2}
    for number in range(3, vocabulary):
        words[f"t{number}"] = number
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_rows(path: Path, rows: int, vocabulary: int) -> None:
    """Write prompts and completions of random words."""
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"t{draw.randrange(10, vocabulary)}" for _ in range(count))

    with path.open("w") as file:
        for _ in range(rows):
            tokens = draw.lognormvariate(MEAN_OF_LOGARITHM, SPREAD_OF_LOGARITHM)
            length = int(min(LONGEST - 1, max(16.0, tokens)))
            # A quarter to two thirds of a row is its prompt.
            prompt = max(1, int(length * draw.uniform(0.25, 0.65)))
            row = {"prompt": words(prompt), "completion": f" {words(length - prompt)}"}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]))
