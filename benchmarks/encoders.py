"""BERT shapes from config with random weights, beside a tokenizer that is at hand. Nothing is downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
    "small": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
    },
    "base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
}


def make_encoder(name: str, tokenizer: Path, folder: Path, **settings: Any) -> Path:
    """Save the encoder with its tokenizer, anew each time, and return the folder.

    `tokenizer` is a folder with `tokenizer.json`.
    """
    import torch
    from transformers import BertConfig, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        tokenizer,
        folder,
        ignore=shutil.ignore_patterns("config.json"),
        copy_function=shutil.copyfile,
    )
    vocabulary = (tokenizer / "tokenizer.json").read_text(encoding="utf-8")
    config = BertConfig(
        vocab_size=vocabulary_size(vocabulary),
        max_position_embeddings=128,
        **SHAPES[name] | settings,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


def vocabulary_size(text: str) -> int:
    """Return how many ids a tokenizer.json knows."""
    from tokenizers import Tokenizer

    return int(Tokenizer.from_str(text).get_vocab_size())
