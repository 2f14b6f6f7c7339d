"""Models of random weights and rows of random words, for the cases of `kubetune bench`.

`python -m kubetune.plugins.diagnostics.bench.inputs SHAPE FOLDER` writes a model in a process
of its own, which imports torch.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from kubetune.base import files
from kubetune.plan.model_shapes import INDEX, shapes_of
from kubetune.plugins.diagnostics.bench.cases import SHAPES

LONGEST, MEAN, SPREAD = 1024, 5.0, 0.75
"""Of the rows, log-normal as instruction data are: tokens at most, and what the logarithms are drawn by."""
END = 1


def bytes_of(shape: str) -> int:
    """Bytes of a model on disk, in 16 bits."""
    return 2 * sum(
        rows * (columns[0] if columns else 1)
        for rows, *columns in shapes_of(SHAPES[shape]).values()
    )


def write_model(shape: str, folder: Path) -> None:
    """A model in bf16 with a tokenizer of words; its weights are files of a layer each."""
    import torch
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shapes, index = shapes_of(SHAPES[shape]), dict[str, str]()
    parts: dict[str, list[str]] = {}
    for name in shapes:
        layer = name.split(".")[2] if ".layers." in name else name.split(".")[-2]
        parts.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file, names in parts.items():
        tensors = {name: _drawn(shapes[name], device, torch) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    _write_tokenizer(folder, SHAPES[shape]["vocab_size"])
    # Last, as it says that the folder is whole.
    files.write_atomic(
        folder / "config.json", json.dumps({**SHAPES[shape], "torch_dtype": "bfloat16"})
    )


def _drawn(shape: tuple[int, ...], device: str, torch: Any) -> Any:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02).cpu()


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": END, "<unk>": 2} | {f"t{i}": i for i in range(3, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "pad_token": "<pad>"}))


def write_rows(path: Path, rows: int, vocabulary: int, shared: int) -> None:
    """Prompts and completions, of which all begin with the same `shared` words."""
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"t{draw.randrange(10, vocabulary)}" for _ in range(count))

    beginning = words(shared)
    with path.open("w") as file:
        for _ in range(rows):
            length = int(min(LONGEST - 1, max(16.0, draw.lognormvariate(MEAN, SPREAD))))
            prompt = max(1, int(length * draw.uniform(0.25, 0.65)))
            row = {
                "prompt": f"{beginning} {words(prompt)}".strip(),
                "completion": f" {words(length - prompt)}",
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]))
