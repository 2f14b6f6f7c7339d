"""The models of the measurements: Qwen3 shapes from config with random weights, made once by transformers.

    python -m benchmarks.models NAME FOLDER

Speed depends on shapes, not on what the weights were trained on; so nothing is downloaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.corpus import EOS, Corpus, text_rows, word
from benchmarks.flops import Shape

SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SHAPES = {
    "tiny": Shape(64, 2, 128, 4, 2, 16, vocab_size=2_000),
    "q32k": Shape(**SMALL, vocab_size=32_000),
    "q152k": Shape(**SMALL, vocab_size=151_936),
    "qwen3-8b": Shape(4096, 36, 12_288, 32, 8, 128, vocab_size=151_936, tie_word_embeddings=False),
}
WORDS = "words"
TEXT_VOCABULARY = 31_000
SPECIAL = {"unk_token": "<unk>", "eos_token": "<eos>", "pad_token": "<pad>"}


def make_model(name: str, folder: Path, *, text: bool = False) -> None:
    """Save the model with a word-level tokenizer or, for `text`, a byte-level BPE, unless it is there already.

    Weights are fp32, as most trainers load them by default. Those of the 8B model are bf16, as published.
    """
    if (folder / "tokenizer.json").exists():
        return
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    shape = SHAPES[name]
    config = Qwen3Config(
        **asdict(shape), max_position_embeddings=4096, eos_token_id=EOS, bos_token_id=None
    )
    torch.manual_seed(0)
    if name == "qwen3-8b":
        torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    tokenizer = _text_tokenizer() if text else _word_tokenizer(shape.vocab_size)
    # Last, because its presence says that the folder is whole.
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)


def make_family(kind: str, sizes: Mapping[str, Any], folder: Path) -> None:
    """Save a causal LM of a `model_type` of transformers with random weights, unless it is there already.

    The tokenizer of words gets a folder of its own: beside some models transformers reads it as another kind.
    """
    if (folder / WORDS / "tokenizer.json").exists():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(folder)
    tokenizer = _word_tokenizer(sizes["vocab_size"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder / WORDS)


def _word_tokenizer(vocab_size: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, word(EOS): EOS, "<unk>": 2}
    for token in range(3, vocab_size):
        vocabulary[word(token)] = token
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _text_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_VOCABULARY,
        special_tokens=["<pad>", "<eos>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = islice(text_rows(Corpus(rows=4_000)), 4_000)
    tokenizer.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    return tokenizer


if __name__ == "__main__":
    make_model(sys.argv[1], Path(sys.argv[2]), text="--text" in sys.argv)
