"""Linear modules of a model, by the names of its weights: which there are, and which of them LoRA adapts.

Experts may lie in files one by one; transformers stacks the experts of a layer when it loads them, and so does this file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kubetune.base import expressions
from kubetune.config.schema import LoraConfig, VisionConfig
from kubetune.errors import ConfigError
from kubetune.plan.memory import Shape
from kubetune.plan.model_shapes import HEARING, PROJECTORS, TOWERS, Weights

# Names of heads that score words, which may be tied to the embeddings.
VOCABULARY_HEADS = ("lm_head", "embed_out")
HEADS = re.compile(r"(^|\.)(lm_head|embed_out|score|classifier|pooler|pre_classifier)(\.|$)")
EMBEDDINGS = re.compile(r"(embed|wte|wpe|position)", re.IGNORECASE)
EXPERT = re.compile(r"(?P<stack>(?:.*\.)?experts)\.\d+\.(?P<layer>\w+)\.weight")
# Names of an expert's layers in files, and of the tensors that transformers stacks them into.
STACKED_AS = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "w2": "down_proj",
}
ROUTER = re.compile(r"\.(gate|router)(\.|$)")
# Linear modules an adapter of which nothing would reach: indexers choose keys without a gradient (DeepSeek-V3.2,
# GLM-5), and of the other two only the weight is read (Mamba, Jamba; DeepSeek-V4).
_UNREACHED = r"(.*\.)?(indexer\..*|(mamba|mixer)\.dt_proj|o_a_proj)"
# Linear modules, by the model_type of the language model, that transformers never calls on a GPU: it hands their
# weights to a fused kernel there. An adapter on them would learn only on a CPU.
_READ_BY_KERNELS = {
    **dict.fromkeys(("falcon_mamba", "mamba"), r"(.*\.)?mixer\.(out_proj|x_proj)"),
    **dict.fromkeys(
        ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"),
        r"(.*\.)?(mamba|mixer)\.out_proj",
    ),
}
# Parts of a model besides its experts, by what the names of their parameters hold.
PARTS = (
    ("projector", re.compile(rf"(^|\.)({'|'.join(PROJECTORS)})(\.|$)")),
    ("vision tower", re.compile(rf"(^|\.)({'|'.join(TOWERS)})(\.|$)")),
    ("hearing", re.compile(rf"(^|\.)({'|'.join(HEARING)})(\.|$)")),
    ("router", ROUTER),
    ("head", HEADS),
    ("embeddings", EMBEDDINGS),
    ("attention", re.compile(r"attn|attention|mixer|mamba|\.conv")),
    ("feed-forward", re.compile(r"mlp|ffn|feed_forward|fc\d|shared_expert|moe|dense")),
)


def shape_of(weights: Weights) -> Shape | None:
    """Return the sizes of the decoder; None if they are not named, or differ from layer to layer."""
    try:
        shape = Shape.of(weights.text_config)
    except TypeError:
        return None
    if shape is None:
        return None
    sizes = (shape.hidden, shape.layers, shape.intermediate, shape.attention, shape.keys)
    return shape if all(isinstance(size, int) and size > 0 for size in sizes) else None


# Reason why the base of a mixture shrinks little.
UNQUANTISED = "bitsandbytes stores linear layers in fewer bits, and stacked experts are none"


class Linear(NamedTuple):
    """A linear module, and the sizes of its weight."""

    name: str
    rows: int
    columns: int


class Stack(NamedTuple):
    """The same layer of all experts in one tensor, and its sizes."""

    name: str
    experts: int
    rows: int  # of one expert
    columns: int


def linears(weights: Weights, *, embeddings: bool = False) -> Iterator[Linear]:
    """Yield each linear module inside the model: no head, no experts; embeddings if asked."""
    for name, shape in weights.shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or module == name or EXPERT.fullmatch(name):
            continue
        if not HEADS.search(module) and (embeddings or not EMBEDDINGS.search(module)):
            yield Linear(module, *shape)


def has_stacks(weights: Weights) -> bool:
    """True if the weights hold experts, stacked or one by one."""
    return next(stacks(weights), None) is not None


def stacks(weights: Weights) -> Iterator[Stack]:
    """Yield the tensors of a mixture that hold a layer of all experts.

    Experts that a file has one by one are stacked here as transformers does when it loads them:

        experts.0.gate_proj [f, h], experts.0.up_proj [f, h], experts.1.…    →  experts.gate_up_proj [2, 2f, h]
    """
    # By the name of the stack, since the weights come in the order of their names.
    experts: Counter[str] = Counter()
    rows: Counter[str] = Counter()  # of all experts
    columns: dict[str, int] = {}
    for name, shape in weights.shapes.items():
        # Many files hold the experts of a layer in one tensor already.
        if len(shape) == 3 and is_expert(name):
            yield Stack(name, *shape)
            continue
        match = EXPERT.fullmatch(name)
        if match is None or len(shape) != 2:
            continue
        layer = match["layer"]
        stack = f"{match['stack']}.{STACKED_AS.get(layer, layer)}"
        columns[stack] = shape[1]
        rows[stack] += shape[0]
        # The gate and the up projection of an expert share a tensor, so an expert is counted by its gate only.
        if layer not in ("up_proj", "w3"):
            experts[stack] += 1
    for name, width in columns.items():
        yield Stack(name, experts[name], rows[name] // max(1, experts[name]), width)


def is_expert(name: str) -> bool:
    """True if a module belongs to a mixture's experts, by its name; those that all tokens share do not count."""
    return "experts" in name.split(".") and "shared" not in name


def frozen_names(vision: VisionConfig, names: Iterable[str]) -> str | None:
    """Return an expression for the full names, of modules or parameters, of what must not learn; None if all may."""
    words = set()
    for name in names:
        words.update(name.split("."))
    tower = rf"(.*\.)?({'|'.join(TOWERS)})(\..*)?"
    projector = rf"(.*\.)?({'|'.join(PROJECTORS)})(\..*)?"
    frozen = []
    if vision.freeze_vision_tower and vision.freeze_projector:
        frozen.append(tower)
    elif vision.freeze_vision_tower:
        # A projector that learns may lie inside the tower.
        frozen.append(f"(?!{projector}$){tower}")
    if vision.freeze_projector and not words.isdisjoint(PROJECTORS):
        frozen.append(projector)
    if not words.isdisjoint(HEARING):
        frozen.append(rf"(.*\.)?({'|'.join(HEARING)})(\..*)?")
    return "|".join(frozen) or None


@dataclass(frozen=True)
class Trainable:
    """The parts of a model that learn."""

    lora: LoraConfig | None  # adapters; None if all parameters learn
    vision: VisionConfig | None  # what learns of a vision tower; None for a model of only text

    def frozen(self, names: Iterable[str]) -> re.Pattern[str]:
        """Return a pattern for the full names of what does not learn of the parts that see and hear."""
        # "$^" matches no name.
        return re.compile(frozen_names(self.vision or VisionConfig(), names) or "$^")


def part_of(name: str) -> str:
    """Return the part of a model that a parameter belongs to, by its name."""
    if is_expert(name):
        return "experts"
    for part, pattern in PARTS:
        if pattern.search(name):
            return part
    return "others"


def parts_line(trained: Counter[str], held: Counter[str]) -> str:
    """Return `attention 0.8 M of 33 M, experts …`: learning parameters of all parameters, by part."""
    order = ("attention", "feed-forward", "experts", "router", "embeddings", "head", "others")
    texts = []
    for part in (*order, "vision tower", "projector", "hearing"):
        if trained[part] or held[part]:
            texts.append(f"{part} {trained[part]:,} of {held[part]:,}")
    return ", ".join(texts)


def adapter_parameters(trainable: Trainable, weights: Weights) -> int:
    """Return the parameters that LoRA adds, with the parameters of modules that are trained in full next to it."""
    return trained_by_part(trainable, weights).total()


def trained_by_part(trainable: Trainable, weights: Weights) -> Counter[str]:
    """Count the parameters that a run trains in each part of the model; with LoRA the parameters of its adapters."""
    counts: Counter[str] = Counter()
    lora = trainable.lora
    # Full training: every parameter that is not frozen.
    if lora is None:
        frozen = trainable.frozen(weights.shapes)
        for name, shape in weights.shapes.items():
            if trainable.vision is None or not frozen.fullmatch(name):
                counts[part_of(name)] += math.prod(shape)
        return counts
    # LoRA: first the modules that are trained in full next to the adapters.
    for name, shape in learning_whole(weights, lora.modules_to_save).items():
        counts[part_of(name)] += math.prod(shape)
    # An adapter is A [r, columns] and B [rows, r]; DoRA adds a magnitude for each row.
    for linear in adapted_linears(trainable, weights):
        added = lora.r * (linear.rows + linear.columns)
        if lora.use_dora:
            added += linear.rows
        counts[part_of(linear.name)] += added
    for stack in adapted_stacks(lora, weights):
        counts["experts"] += lora.r * stack.experts * (stack.rows + stack.columns)
    return counts


def learning_whole(weights: Weights, modules: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of modules that learn whole.

    A head that is tied to the embeddings is in no file. If it learns, it is a table of its own, as large as theirs.
    """
    shapes = {}
    for name, shape in weights.shapes.items():
        if learns_whole(name, modules):
            shapes[name] = shape
    heads = [module for module in modules if module.rpartition(".")[2] in VOCABULARY_HEADS]
    if not heads or any(
        name.removesuffix(".weight").endswith(VOCABULARY_HEADS) for name in weights.shapes
    ):
        return shapes
    for name, shape in weights.shapes.items():
        if EMBEDDINGS.search(name) and shape[0] == weights.text_config.get("vocab_size"):
            shapes[f"{heads[0]}.weight"] = shape
            break
    return shapes


def learns_whole(name: str, modules: Iterable[str]) -> bool:
    """True if a weight is of a module that learns whole. By PEFT's rule `norm` is `input_layernorm` too."""
    return any(f"{module}." in name for module in modules)


def adapted_linears(trainable: Trainable, weights: Weights) -> Iterator[Linear]:
    """Yield the linear modules that get an adapter; of a mixture no router, unless it is named."""
    lora = trainable.lora
    assert lora is not None
    adapts_all = lora.target_modules == "all-linear"
    has_experts = has_stacks(weights)
    frozen = trainable.frozen(weights.shapes)
    out_of_reach = unreached(weights.text_config.get("model_type"))
    candidates = list(linears(weights, embeddings=not adapts_all))
    chosen = targeted([linear.name for linear in candidates], lora.target_modules)
    for linear in candidates:
        name = linear.name
        # A weight that is named gets its adapter, whatever the rules below say.
        if lora.target_parameters and is_target(f"{name}.weight", lora.target_parameters):
            yield linear
            continue
        # `all-linear` leaves out what would not learn, and routers, which decide which expert a token visits.
        if adapts_all and out_of_reach.fullmatch(name):
            continue
        if adapts_all and has_experts and ROUTER.search(name):
            continue
        if name in chosen and not frozen.fullmatch(name):
            yield linear


def adapted_stacks(lora: LoraConfig, weights: Weights) -> Iterator[Stack]:
    """Yield the stacked experts that get adapters, by their names or the names of the layers that they hold."""
    names_of_stacks = {stack: names_of(stack) for stack in stacks(weights)}
    all_names = [name for names in names_of_stacks.values() for name in names]
    chosen = targeted(all_names, lora.target_modules)
    for stack, names in names_of_stacks.items():
        is_named = lora.target_parameters and is_target(stack.name, lora.target_parameters)
        if is_named or not chosen.isdisjoint(names):
            yield stack


def names_of(stack: Stack) -> list[str]:
    """Return the names that choose a stack: of all experts, its own, or of its layers as they are in files."""
    parent, _, layer = stack.name.rpartition(".")
    names = [parent, stack.name]
    for name, stacked in STACKED_AS.items():
        if stacked == layer:
            names.append(f"{parent}.{name}")
    return names


def unreached(kind: object) -> re.Pattern[str]:
    """Return a regular expression, by `model_type`, for the names of modules for which adapters would learn nothing."""
    names = _UNREACHED
    if str(kind) in _READ_BY_KERNELS:
        names += f"|{_READ_BY_KERNELS[str(kind)]}"
    return re.compile(names)


def targeted(names: Iterable[str], targets: str | Iterable[str]) -> frozenset[str]:
    """Return the modules, of these names, that `lora.target_modules` chooses.

    Raise ConfigError for an expression that has no answer soon.
    """
    if targets == "all-linear":
        return frozenset(names)
    # Any other string is a regular expression, a list holds ends of names.
    if not isinstance(targets, str):
        return frozenset(name for name in names if is_target(name, targets))
    chosen = expressions.matches(targets, names)
    if chosen is None:
        raise ConfigError(
            f"lora.target_modules: {targets[:100]!r} takes more than a second to match the names of modules; expected a "
            "regular expression that soon has an answer, such as .*(q|v)_proj, or a list of names"
        )
    return chosen


def is_target(name: str, targets: Iterable[str]) -> bool:
    """True if one of the targets is the name, or its end, as PEFT reads a list of them."""
    return any(name == target or name.endswith(f".{target}") for target in targets)
