"""Linear modules of a model, by the names of its weights: which there are, and which of them LoRA adapts.

Experts may lie in files one by one; transformers stacks those of a layer when it loads them, and so they are told here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kubetune.config.schema import Config, VisionConfig
from kubetune.plan.memory import Shape
from kubetune.plan.model_shapes import HEARING, PROJECTORS, TOWERS, Weights

HEADS = re.compile(r"(^|\.)(lm_head|embed_out|score|classifier|pooler|pre_classifier)(\.|$)")
EMBEDDINGS = re.compile(r"(embed|wte|wpe|position)", re.IGNORECASE)
EXPERT = re.compile(r"(?P<stack>(?:.*\.)?experts)\.\d+\.(?P<layer>\w+)\.weight")
FUSED = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
}
ROUTER = re.compile(r"\.(gate|router)(\.|$)")
_UNREACHED = r"(.*\.)?(indexer\..*|(mamba|mixer)\.dt_proj|o_a_proj)"
"""Linear modules an adapter of which nothing would reach: indexers choose keys without a gradient (DeepSeek-V3.2,
GLM-5), and of the other two only the weight is read (Mamba, Jamba; DeepSeek-V4)."""
_READ_BY_KERNELS = {
    **dict.fromkeys(("falcon_mamba", "mamba"), r"(.*\.)?mixer\.(out_proj|x_proj)"),
    **dict.fromkeys(
        ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"),
        r"(.*\.)?(mamba|mixer)\.out_proj",
    ),
}
"""Linear modules, by the model_type of the language model, whose weights transformers hands to a fused kernel on a GPU,
which never calls the modules: an adapter on them would learn on a CPU alone."""
PARTS = (
    *(
        (part, re.compile(rf"(^|\.)({'|'.join(names)})(\.|$)"))
        for part, names in (
            ("projector", PROJECTORS),
            ("vision tower", TOWERS),
            ("hearing", HEARING),
        )
    ),
    ("router", ROUTER),
    ("head", HEADS),
    ("embeddings", EMBEDDINGS),
    ("attention", re.compile(r"attn|attention|mixer|mamba|\.conv")),
    ("feed-forward", re.compile(r"mlp|ffn|feed_forward|fc\d|shared_expert|moe|dense")),
)
"""Parts of a model besides its experts, by what the names of their parameters hold."""


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


UNQUANTISED = "bitsandbytes stores linear layers in fewer bits, and stacked experts are none"
"""Reason why the base of a mixture shrinks little."""


class Stack(NamedTuple):
    """The same layer of all experts in one tensor, and its sizes."""

    name: str
    experts: int
    rows: int
    columns: int


def linears(weights: Weights, *, embeddings: bool = False) -> Iterator[tuple[str, int, int]]:
    """Name and two sizes of each linear module inside the model: no head, no experts; embeddings if asked."""
    for name, shape in weights.shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or module == name or EXPERT.fullmatch(name):
            continue
        if not HEADS.search(module) and (embeddings or not EMBEDDINGS.search(module)):
            yield module, shape[0], shape[1]


def stacks(weights: Weights) -> Iterator[Stack]:
    """Tensors of a mixture that hold a layer of all experts."""
    held: dict[str, list[int]] = {}
    for name, shape in weights.shapes.items():
        if len(shape) == 3 and is_expert(name):
            yield Stack(name, *shape)
        elif len(shape) == 2 and (found := EXPERT.fullmatch(name)) is not None:
            layer = {"w2": "down_proj"}.get(
                found["layer"], FUSED.get(found["layer"], found["layer"])
            )
            sizes = held.setdefault(f"{found['stack']}.{layer}", [0, 0, shape[1]])
            sizes[1] += shape[0]
            sizes[0] += found["layer"] not in ("up_proj", "w3")
    for name, (experts, rows, columns) in held.items():
        yield Stack(name, experts, rows // max(1, experts), columns)


def is_expert(name: str) -> bool:
    """Membership of a module in a mixture's experts, by its name; those that all tokens share are none."""
    return "experts" in name.split(".") and "shared" not in name


def frozen_names(vision: VisionConfig, names: Iterable[str]) -> str | None:
    """An expression for the full names, of modules or parameters, of what must not learn; None where all may."""
    parts = {part for name in names for part in name.split(".")}
    tower, projector, hearing = (
        rf"(.*\.)?({'|'.join(them)})(\..*)?" for them in (TOWERS, PROJECTORS, HEARING)
    )
    frozen = {
        tower
        if vision.freeze_projector
        else f"(?!{projector}$){tower}": vision.freeze_vision_tower,
        projector: vision.freeze_projector and not parts.isdisjoint(PROJECTORS),
        hearing: not parts.isdisjoint(HEARING),
    }
    return "|".join(part for part, is_frozen in frozen.items() if is_frozen) or None


def _left(config: Config, weights: Weights) -> re.Pattern[str]:
    """Full names of what does not learn; of a model that sees, and reads text alone here, all but its text."""
    return re.compile(
        frozen_names(config.vision if config.sees else VisionConfig(), weights.shapes) or "$^"
    )


def part_of(name: str) -> str:
    """Part of a model that a parameter belongs to, by its name."""
    if is_expert(name):
        return "experts"
    return next((part for part, pattern in PARTS if pattern.search(name)), "others")


def parts_line(trained: Counter[str], held: Counter[str]) -> str:
    """`attention 0.8 M of 33 M, experts …`: parameters that learn beside those that are there, by part."""
    text = ("attention", "feed-forward", "experts", "router", "embeddings", "head", "others")
    order = (*text, "vision tower", "projector", "hearing")
    return ", ".join(
        f"{part} {trained[part]:,} of {held[part]:,}"
        for part in order
        if trained[part] or held[part]
    )


def adapter_parameters(config: Config, weights: Weights) -> int:
    """Parameters that LoRA adds, and those of modules that are trained in full beside it."""
    return trained_by_part(config, weights).total()


def trained_by_part(config: Config, weights: Weights) -> Counter[str]:
    """Parameters that a run trains of each part of the model; with LoRA those of the adapters on it."""
    found: Counter[str] = Counter()
    lora = config.lora
    left = _left(config, weights)
    for name, shape in weights.shapes.items():
        is_whole = lora is None and not (config.sees and left.fullmatch(name))
        if is_whole or (
            lora and any(f".{module}." in f".{name}" for module in lora.modules_to_save)
        ):
            found[part_of(name)] += math.prod(shape)
    if lora is None:
        return found
    for name, *sizes in adapted_linears(config, weights):
        found[part_of(name)] += lora.r * sum(sizes) + (sizes[0] if lora.use_dora else 0)
    for stack in adapted_stacks(config, weights):
        found["experts"] += lora.r * stack.experts * (stack.rows + stack.columns)
    return found


def adapted_linears(config: Config, weights: Weights) -> Iterator[tuple[str, int, int]]:
    """Linear modules that get an adapter; of a mixture no router, unless it is named."""
    assert config.lora is not None
    lora, targets = config.lora, config.lora.target_modules
    left, has_experts = _left(config, weights), any(True for _ in stacks(weights))
    out_of_reach = unreached(weights.text_config.get("model_type"))
    for name, *sizes in linears(weights, embeddings=targets != "all-linear"):
        is_left = targets == "all-linear" and (
            (has_experts and ROUTER.search(name)) or out_of_reach.fullmatch(name)
        )
        is_named = bool(lora.target_parameters) and is_target(
            f"{name}.weight", lora.target_parameters
        )
        if is_named or (is_target(name, targets) and not is_left and not left.fullmatch(name)):
            yield name, *sizes  # type: ignore[misc]  # two of them


def adapted_stacks(config: Config, weights: Weights) -> Iterator[Stack]:
    """Stacked experts that get adapters, by their names or those of the layers that they hold."""
    assert config.lora is not None
    targets, named = config.lora.target_modules, config.lora.target_parameters
    for stack in stacks(weights):
        above, _, own = stack.name.rpartition(".")
        olds = {"down_proj": ("down_proj", "w2"), "gate_up_proj": ("gate_proj", "w1")}.get(own, ())
        names = (above, stack.name, *(f"{above}.{old}" for old in olds))
        if any(is_target(name, targets) for name in names) or (
            named and is_target(stack.name, named)
        ):
            yield stack


def unreached(kind: object) -> re.Pattern[str]:
    """Return an expression for the whole names of modules an adapter of which would learn nothing, by `model_type`."""
    return re.compile("|".join(filter(None, (_UNREACHED, _READ_BY_KERNELS.get(str(kind))))))


def is_target(name: str, targets: str | Iterable[str]) -> bool:
    """Choice of a module for LoRA by `lora.target_modules`, as PEFT chooses."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)
