"""Tiny classifiers and reviews they can learn to tell apart, for tests: all made on the spot."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel

from kubetune.config.schema import Config

GOOD = ("good", "great", "fine")
BAD = ("bad", "awful", "dull")
WORDS = (
    *GOOD,
    *BAD,
    "the",
    "film",
    "was",
    "a",
    "very",
    "and",
    "plot",
    "cast",
    "story",
    "it",
    "is",
    "of",
)
STEPS = 24
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def save_model(folder: Path, kind: str = "bert", **settings: Any) -> Path:
    """Return a 2-layer backbone without a head, and a word tokenizer that frames texts and pairs as BERT's does."""
    # Weights as large as trained ones are: from BERT's own tiny ones a model learns nothing in a few steps.
    small = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 0, "initializer_range": 0.1}
    bert = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        **small,
    }
    ends = {"bos_token_id": 2, "eos_token_id": 3}
    settings_of: dict[str, dict[str, Any]] = {
        "bert": bert,
        "albert": {**bert, "embedding_size": 16},
        "modernbert": {
            **bert,
            **ends,
            "cls_token_id": 2,
            "sep_token_id": 3,
            "classifier_pooling": "mean",
        },
        "qwen3": {**bert, **ends, "num_key_value_heads": 1, "head_dim": 16},
        "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, **small},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, **small, **ends, "pad_token_id": None},
    }
    config = AutoConfig.for_model(kind, **settings_of[kind] | settings)
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    vocabulary = {word: id for id, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


def review(draw: random.Random, label: int) -> str:
    words = draw.choices([word for word in WORDS if word not in GOOD + BAD], k=draw.randint(1, 12))
    for _ in range(1 + len(words) // 3):
        words.insert(draw.randrange(len(words) + 1), draw.choice(GOOD if label else BAD))
    return " ".join(words)


def write_tsv(path: Path, rows: int, seed: int = 0) -> Path:
    """Write reviews as SST-2's files are: `sentence<TAB>label`."""
    draw = random.Random(seed)
    labels = [draw.randrange(2) for _ in range(rows)]
    path.write_text(
        "sentence\tlabel\n" + "".join(f"{review(draw, label)}\t{label}\n" for label in labels)
    )
    return path


def make_inputs(folder: Path, kind: str = "bert", **settings: Any) -> Path:
    """Write `model`, `train.tsv` and `eval.tsv` into a folder, and return it."""
    save_model(folder / "model", kind, **settings)
    write_tsv(folder / "train.tsv", 96, seed=1)
    write_tsv(folder / "eval.tsv", 41, seed=2)
    return folder


def make_config(inputs: Path, training: Mapping[str, Any] | None = None, **sections: Any) -> Config:
    """Return the config of a full fine-tuning that learns the reviews in a few steps."""
    data = {"train": str(inputs / "train.tsv"), "eval": str(inputs / "eval.tsv"), "max_length": 64}
    is_graded = (sections.get("classification") or {}).get("problem_type") == "regression"
    settings: dict[str, Any] = {
        "task": "sequence_classification",
        "model": str(inputs / "model"),
        **sections,
        "data": {**data, "cache": str(inputs / "cache"), "num_proc": 1, **sections.get("data", {})},
        "training": {
            "global_batch_size": 16,
            "per_device_train_batch_size": 4,
            "max_steps": STEPS,
            "learning_rate": 5e-3,
            "seed": 43,  # with most others so few steps teach less
            "eval_steps": 6,
            "save_steps": 6,
            "metric_for_best_model": "eval_loss" if is_graded else "eval_accuracy",
            **(training or {}),
        },
    }
    return Config.model_validate(settings)
