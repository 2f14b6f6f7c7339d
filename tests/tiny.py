"""Tiny real parts for tests: a tokenizer trained on the spot."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kubetune.plan.model_shapes import shapes_of

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris is the capital of France.",
    "How do I sort a list in Python? Use sorted(items); it returns a new list and leaves the old one alone.",
    "user assistant system tool question answer instruction input output yes no maybe one two three four five",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 20 21 42 100 Hello World! Ping Pong. Héllo wörld, ça va? 你好世界 🙂\n\n",
]

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train_tokenizer(
    folder: Path,
    chat_template: str | None = CHATML,
    *,
    vocab_size: int = 512,
    eos_token: str = "<|im_end|>",
) -> Path:
    """Train a byte-level BPE tokenizer and save it in Hugging Face form.

    Ids 0, 1 and 2 are `<|endoftext|>` (the padding), `<|im_start|>` and `<|im_end|>`. Returns the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "pad_token": "<|endoftext|>",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return folder


# The modules of a layer of Llama.
_LLAMA = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)


def pretend_weights(
    folder: Path, stack: str = "model.layers", layer: Sequence[str] = _LLAMA
) -> Path:
    """Write a config.json and a file of weights, of which nothing but the header is ever read. Returns the folder.

    The weights are those that config.json asks for, if that says it all, else one `layer` of a `stack`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        facts = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000}
        (folder / "config.json").write_text(json.dumps(facts))
    shapes = shapes_of(json.loads((folder / "config.json").read_text()))
    if not shapes:
        shapes = {f"{stack}.0.{name}.weight": (8,) * (1 + ("norm" not in name)) for name in layer}
    header = {}
    end = 0
    for name, shape in shapes.items():
        begin = end
        end += 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
    return folder
