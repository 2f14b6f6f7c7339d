"""Tiny models that see, and questions about images that are made on the spot."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.tiny import train_tokenizer

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (30, 50, 220), "yellow": (230, 220, 40)}
QUESTION = "what colour is it"
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_TOWER: dict[str, Any] = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}

ARCHITECTURES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (14, {"rope_parameters": _ROPE}, {"fullatt_block_indexes": [1]}),
    "qwen3_vl": (
        16,
        {"rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    ),
    "qwen2_vl": (14, {"rope_parameters": _ROPE}, {}),
}
"""Size of a patch, and what a text and a vision config hold besides."""


def save_seeing_model(folder: Path, name: str = "qwen2_5_vl", *, sharpen: float = 2.0) -> Path:
    """A random model of an architecture with its tokenizer and image processor, as on the hub."""
    train_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in IMAGE_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    patch, text, vision = ARCHITECTURES[name]
    size = tokenizer.get_vocab_size()
    ids = [tokenizer.token_to_id(token) for token in IMAGE_TOKENS]
    tower = {**_TOWER, "patch_size": patch, **vision}
    if name == "qwen2_vl":
        tower = {"depth": 3, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64, "patch_size": patch}
    config = AutoConfig.for_model(
        name,
        text_config={**_TEXT, **text, "vocab_size": size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        vision_config=tower,
        vision_start_token_id=ids[0],
        image_token_id=ids[1],
        vision_end_token_id=ids[2],
        video_token_id=ids[3],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpen)
    model.save_pretrained(folder)
    facts = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 1024 * (2 * patch) ** 2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(facts))
    return folder


def paint(file: Path, colour: str, seed: int) -> Path:
    """A square of a colour on grey, anywhere, of any size; the image is of any size too."""
    draw = random.Random(seed)
    width, height = draw.randint(56, 112), draw.randint(56, 112)
    image = Image.new("RGB", (width, height), (128, 128, 128))
    left, top = draw.randint(0, width // 3), draw.randint(0, height // 3)
    shade = tuple(min(255, max(0, part + draw.randint(-20, 20))) for part in COLOURS[colour])
    ImageDraw.Draw(image).rectangle((left, top, left + width // 2, top + height // 2), fill=shade)
    image.save(file)
    return file


def write_questions(folder: Path, name: str, rows: int, seed: int = 0, *, text_rows: int = 0) -> Path:
    """`rows` questions about the colour of an image of their own, and `text_rows` without any, as JSONL."""
    draw = random.Random(seed)
    (folder / "images").mkdir(exist_ok=True)
    lines = []
    for number in range(rows):
        colour = draw.choice(sorted(COLOURS))
        paint(folder / "images" / f"{name}-{number}.png", colour, seed * 100_000 + number)
        lines.append(_row(f"<image>{QUESTION}", colour) | {"images": [f"images/{name}-{number}.png"]})
    lines += [_row(f"{number} plus one", f"it is {number + 1}") for number in range(text_rows)]
    draw.shuffle(lines)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def _row(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
