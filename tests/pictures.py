"""Tiny models that see, and questions about images that are made on the spot."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.tiny import train_tokenizer

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (30, 50, 220),
    "yellow": (230, 220, 40),
}
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
_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 64,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HYBRID: dict[str, Any] = {
    "rope_parameters": {**_ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}

# Size of a patch, and what a text and a vision config hold besides.
ARCHITECTURES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (14, {"rope_parameters": _ROPE}, {"fullatt_block_indexes": [1]}),
    "qwen3_vl": (
        16,
        {"rope_parameters": {**_ROPE, "mrope_interleaved": True}},
        {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    ),
    "qwen2_vl": (14, {"rope_parameters": _ROPE}, {}),
    "qwen3_vl_moe": (
        16,
        {"rope_parameters": {**_ROPE, "mrope_interleaved": True}, **_EXPERTS},
        {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    ),
    "qwen3_5": (16, _HYBRID, {"num_position_embeddings": 64}),
    "qwen3_5_moe": (
        16,
        {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 32},
        {"num_position_embeddings": 64},
    ),
    "glm4v": (
        14,
        {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}},
        {"image_size": 112},
    ),
}


def save_seeing_model(
    folder: Path,
    name: str = "qwen2_5_vl",
    *,
    sharpen: float = 2.0,
    sizes: Mapping[str, Any] = MappingProxyType({}),
    of_tower: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Return a random model of an architecture with its tokenizer and image processor, as on the hub."""
    train_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in IMAGE_TOKENS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    patch, text, vision = ARCHITECTURES[name]
    size = tokenizer.get_vocab_size()
    ids = [tokenizer.token_to_id(token) for token in IMAGE_TOKENS]
    tower = {**_TOWER, "patch_size": patch, **vision, **of_tower}
    if name == "qwen2_vl":
        tower = {
            "depth": 3,
            "embed_dim": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "hidden_size": 64,
            "patch_size": patch,
        }
    ends = "image" if name == "glm4v" else "vision"
    tokens = (f"{ends}_start_token_id", "image_token_id", f"{ends}_end_token_id", "video_token_id")
    config = AutoConfig.for_model(
        name,
        text_config={
            **_TEXT,
            **text,
            "vocab_size": size,
            **sizes,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vision_config=tower,
        tie_word_embeddings=False,
        **dict(zip(tokens, ids, strict=True)),
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpen)
    model.save_pretrained(folder)
    facts = {
        "image_processor_type": "Glm4vImageProcessor"
        if name == "glm4v"
        else "Qwen2VLImageProcessorFast",
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
    """Return a square of a colour on grey, anywhere, of any size; the image is of any size too."""
    draw = random.Random(seed)
    width = draw.randint(56, 112)
    height = draw.randint(56, 112)
    image = Image.new("RGB", (width, height), (128, 128, 128))
    left = draw.randint(0, width // 3)
    top = draw.randint(0, height // 3)
    shade = tuple(min(255, max(0, part + draw.randint(-20, 20))) for part in COLOURS[colour])
    ImageDraw.Draw(image).rectangle((left, top, left + width // 2, top + height // 2), fill=shade)
    image.save(file)
    return file


def write_questions(
    folder: Path, name: str, rows: int, seed: int = 0, *, text_rows: int = 0
) -> Path:
    """Return `rows` questions about the colour of an image of their own, and `text_rows` without any, as JSONL."""
    draw = random.Random(seed)
    (folder / "images").mkdir(exist_ok=True)
    lines = []
    for number in range(rows):
        colour = draw.choice(sorted(COLOURS))
        paint(folder / "images" / f"{name}-{number}.png", colour, seed * 100_000 + number)
        lines.append(
            _row(f"<image>{QUESTION}", colour) | {"images": [f"images/{name}-{number}.png"]}
        )
    lines += [_row(f"{number} plus one", f"it is {number + 1}") for number in range(text_rows)]
    draw.shuffle(lines)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def write_colour_pairs(
    folder: Path, name: str, rows: int, seed: int = 0, *, text_rows: int = 0
) -> Path:
    """Return `rows` pairs of a right and a wrong colour of an image of their own, and `text_rows` without any, as JSONL."""
    draw = random.Random(seed)
    file = write_questions(folder, name, rows, seed, text_rows=text_rows)
    lines = []
    for number, line in enumerate(file.read_text().splitlines()):
        row = json.loads(line)
        question, answer = row["messages"]
        wrong = draw.choice([colour for colour in sorted(COLOURS) if colour != answer["content"]])
        question["content"] += f" {number}" * draw.randint(1, 3)  # no two prompts are alike
        lines.append(
            {
                **row,
                "messages": [question],
                "chosen": answer,
                "rejected": {**answer, "content": wrong},
            }
        )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def _row(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


_LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{{ '<|im_end|>\\n' if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_IDEFICS_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{{ '<end_of_utterance>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_GEMMA_TEMPLATE = (
    "{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>assistant\\n' }}{% endif %}"
)
_CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE\\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MISTRAL_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST]' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] in ['image', 'image_url'] %}{{ '[IMG]' }}{% endif %}{% endfor %}{% endif %}{{ '[/INST]' }}"
    "{% elif message['content'] is string %}{{ message['content'] + eos_token }}"
    "{% else %}{{ message['content'][0]['text'] + eos_token }}{% endif %}{% endfor %}"
)
_GEMMA4_TEMPLATE = (
    "{% for message in messages %}{{ '<|turn>' + message['role'].replace('assistant', 'model') + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<|image|>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<turn|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)
_GEMMA4_TOKENS = ["<|image>", "<|image|>", "<image|>", "<|turn>", "<turn|>", "<|audio>", "<|audio|>", "<audio|>",
                  "<|video|>"]  # fmt: skip
_CLIP = {"image_size": 28, "patch_size": 14, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "projection_dim": 32}  # fmt: skip
_SIGLIP = {**_CLIP, "image_size": 56}
_PLAIN_TEXT = {key: value for key, value in _TEXT.items() if key != "tie_word_embeddings"}
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_IDEFICS_TOKENS = [
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *_TILES,
]
_CLIP_IMAGES = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_IDEFICS_IMAGES = {
    "size": {"longest_edge": 112},
    "max_image_size": {"longest_edge": 56},
    "do_image_splitting": True,
}
_LLAVA_PROCESSOR = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
_PIXTRAL = {**_CLIP, "model_type": "pixtral", "image_size": 56}
_PIXTRAL_IMAGES = {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}}
_PIXTRAL_TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"]
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]


@dataclass(frozen=True)
class Family:
    """A kind of model whose images are no grids. `image_token` is the one that is repeated for each feature."""

    tokens: list[str]
    image_token: str
    template: str
    text: dict[str, Any]
    vision: dict[str, Any]
    config: dict[str, Any]
    image_processor: str
    images: dict[str, Any]
    processor: str
    settings: dict[str, Any]
    tokenizer: dict[str, Any] = field(default_factory=dict)
    model_type: str = ""


FAMILIES: dict[str, Family] = {
    "llava": Family(
        ["<image>"], "<image>", _LLAVA_TEMPLATE, {"model_type": "llama"}, {"model_type": "clip_vision_model", **_CLIP},
        {"vision_feature_layer": -1}, "CLIPImageProcessor", _CLIP_IMAGES, "LlavaProcessor", _LLAVA_PROCESSOR,
    ),
    "llava_next": Family(
        ["<image>"], "<image>", _LLAVA_TEMPLATE, {"model_type": "llama"}, {"model_type": "clip_vision_model", **_CLIP},
        {"vision_feature_layer": -1, "image_grid_pinpoints": _PINPOINTS}, "LlavaNextImageProcessor",
        {**_CLIP_IMAGES, "image_grid_pinpoints": _PINPOINTS}, "LlavaNextProcessor", _LLAVA_PROCESSOR,
    ),
    "idefics3": Family(
        _IDEFICS_TOKENS, "<image>", _IDEFICS_TEMPLATE, {"model_type": "llama"}, _SIGLIP, {"scale_factor": 2},
        "Idefics3ImageProcessor", _IDEFICS_IMAGES, "Idefics3Processor", {"image_seq_len": 4},
    ),
    "smolvlm": Family(
        _IDEFICS_TOKENS, "<image>", _IDEFICS_TEMPLATE, {"model_type": "llama"}, _SIGLIP, {"scale_factor": 2},
        "SmolVLMImageProcessor", _IDEFICS_IMAGES, "SmolVLMProcessor", {"image_seq_len": 4},
    ),
    "gemma3": Family(
        ["<start_of_image>", "<end_of_image>", "<image_soft_token>", "<start_of_turn>", "<end_of_turn>"],
        "<image_soft_token>", _GEMMA_TEMPLATE, {"query_pre_attn_scalar": 16, "sliding_window": 32}, _SIGLIP,
        {"mm_tokens_per_image": 4}, "Gemma3ImageProcessor", {"size": {"height": 56, "width": 56}}, "Gemma3Processor",
        {"image_seq_length": 4},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "internvl": Family(
        ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"], "<IMG_CONTEXT>",
        _CHATML_TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>"), {"model_type": "qwen2"},
        {**_SIGLIP, "image_size": [56, 56], "patch_size": [14, 14]}, {"image_seq_length": 4},
        "GotOcr2ImageProcessor", {"size": {"height": 56, "width": 56}, "max_patches": 3}, "InternVLProcessor",
        {"image_seq_length": 4},
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"},
    ),
    "llava_onevision": Family(
        ["<image>", "<video>"], "<image>", _CHATML_TEMPLATE.replace("IMAGE", "<image>"), {"model_type": "qwen2"},
        {"model_type": "siglip_vision_model", **_CLIP},
        {"image_grid_pinpoints": _PINPOINTS, "vision_feature_layer": -1}, "LlavaOnevisionImageProcessor",
        {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": _PINPOINTS}, "LlavaOnevisionProcessor",
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "aya_vision": Family(
        ["<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"], "<|IMG_PATCH|>",
        _CHATML_TEMPLATE.replace("IMAGE\\n", "<image>"), {"model_type": "llama"},
        {"model_type": "siglip_vision_model", **_SIGLIP},
        {"downsample_factor": 2, "vision_feature_layer": -1, "alignment_intermediate_size": 4096},
        "GotOcr2ImageProcessor", {"size": {"height": 56, "width": 56}, "max_patches": 3}, "AyaVisionProcessor",
        {"patch_size": 14, "img_size": 56, "downsample_factor": 2},
    ),
    "pixtral": Family(
        _PIXTRAL_TOKENS, "[IMG]", _MISTRAL_TEMPLATE, {"model_type": "mistral", "sliding_window": None}, _PIXTRAL,
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}, "PixtralImageProcessor",
        _PIXTRAL_IMAGES, "PixtralProcessor", {"patch_size": 14}, model_type="llava",
    ),
    "mistral3": Family(
        _PIXTRAL_TOKENS, "[IMG]", _MISTRAL_TEMPLATE, {"model_type": "mistral", "sliding_window": None}, _PIXTRAL,
        {"spatial_merge_size": 2}, "PixtralImageProcessorFast", _PIXTRAL_IMAGES, "PixtralProcessor",
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "gemma4": Family(
        _GEMMA4_TOKENS, "<|image|>", _GEMMA4_TEMPLATE,
        {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512,
         "num_hidden_layers": 4, "num_kv_shared_layers": 2, "final_logit_softcapping": 30.0, "sliding_window": 8,
         "initializer_range": 0.1, "use_bidirectional_attention": "vision",
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
         "position_embedding_size": 64, "use_clipped_linears": True},
        {"audio_config": None}, "Gemma4ImageProcessor",
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}, "Gemma4Processor", {"image_seq_length": 70},
        {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "audio_token": "<|audio|>",
         "boa_token": "<|audio>", "eoa_token": "<audio|>"},
    ),
    "paligemma": Family(
        ["<bos>", "<image>"], "<image>", "", {"model_type": "gemma", "initializer_range": 0.1},
        {**_SIGLIP, "model_type": "siglip_vision_model"},
        {"projection_dim": 64}, "SiglipImageProcessor", {"size": {"height": 56, "width": 56}, "image_seq_length": 16},
        "PaliGemmaProcessor", {}, {"bos_token": "<bos>"},
    ),
}  # fmt: skip


def save_family_model(
    folder: Path, name: str, *, weights: bool = True, family: Family | None = None
) -> Path:
    """Return a random model of a family, or of one like it, with its tokenizer and processor, as on the hub."""
    family = family or FAMILIES[name]
    train_tokenizer(folder, None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in family.tokens]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    more = {key: token for key, token in family.tokenizer.items() if key != "bos_token"}
    facts |= {"chat_template": family.template, **family.tokenizer, "extra_special_tokens": more}
    ends = {"gemma3": "<end_of_turn>", "gemma4": "<turn|>"}
    ends |= dict.fromkeys(("idefics3", "smolvlm"), "<end_of_utterance>")
    facts["eos_token"] = ends.get(name, "<|im_end|>")
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    images = {"image_processor_type": family.image_processor, **family.images}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(
        json.dumps({"processor_class": family.processor, **family.settings})
    )
    size = {
        "vocab_size": tokenizer.get_vocab_size(),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    more = {"image_token_id": tokenizer.token_to_id(family.image_token)}
    if name == "gemma3":
        names = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
        more = {f"{key}_token_index": tokenizer.token_to_id(token) for key, token in names.items()}
    if name == "gemma4":
        names = {
            "boi": "<|image>",
            "eoi": "<image|>",
            "video": "<|video|>",
            "boa": "<|audio>",
            "audio": "<|audio|>",
        }
        more |= {f"{key}_token_id": tokenizer.token_to_id(token) for key, token in names.items()}
    config = AutoConfig.for_model(
        family.model_type or name,
        text_config={**_PLAIN_TEXT, **size, **family.text},
        vision_config=family.vision,
        **family.config,
        **more,
    )
    if not weights:
        config.save_pretrained(folder)
        return folder
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Gemma 3's projector begins at zero, the positions of Gemma 4's tower at one: they would see nothing.
                parameter.copy_(
                    parameter * 2 if parameter.std() else torch.randn_like(parameter) / 8
                )
    model.save_pretrained(folder)
    return folder
