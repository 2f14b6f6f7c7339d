"""Linear modules of a model, by the names of its weights: which there are, and which of them LoRA adapts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from kubetune.config.schema import Config
from kubetune.planning.memory import Shape
from kubetune.planning.model_shapes import Weights

HEADS = re.compile(r"(^|\.)(lm_head|embed_out|score|classifier|pooler|pre_classifier)(\.|$)")
EMBEDDINGS = re.compile(r"(embed|wte|wpe|position)", re.IGNORECASE)
NOT_TEXT = re.compile(r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector)\.")


def shape_of(weights: Weights) -> Shape | None:
    """The sizes of the decoder; None where they are not named, or differ from layer to layer."""
    try:
        shape = Shape.of(weights.text_config)
    except TypeError:
        return None
    if shape is None:
        return None
    sizes = (shape.hidden, shape.layers, shape.intermediate, shape.attention, shape.keys)
    return shape if all(isinstance(size, int) and size > 0 for size in sizes) else None


def linears(weights: Weights) -> Iterator[tuple[str, int, int]]:
    """Name and two sizes of each linear module inside the model: no embeddings, no head."""
    for name, shape in weights.shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and module != name and not HEADS.search(module) and not EMBEDDINGS.search(module):
            yield module, shape[0], shape[1]


def adapter_parameters(config: Config, weights: Weights) -> int:
    """Parameters that LoRA adds, and those of modules that are trained in full beside it."""
    assert config.lora is not None
    lora, total = config.lora, 0
    targets = lora.target_modules
    for name, *sizes in linears(weights):
        if NOT_TEXT.search(name) and targets == "all-linear":
            continue
        if is_target(name, targets):
            total += lora.r * sum(sizes) + (sizes[0] if lora.use_dora else 0)
    for name, shape in weights.shapes.items():
        if any(f".{module}." in f".{name}" for module in lora.modules_to_save):
            total += math.prod(shape)
    return total


def is_target(name: str, targets: str | tuple[str, ...]) -> bool:
    """Choice of a module for LoRA by `lora.target_modules`, as PEFT chooses."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
