"""What a run takes before anything is held: the peak memory of one device, part by part. Hours are in cost.py.

Arithmetic on the shapes of the weights and the config, without torch. Each part says what it stands for; what cannot
be known (the allocator's losses, kernels' workspaces) is an allowance that was measured where it says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kubetune.base.allocator import KEPT_PRODUCTS
from kubetune.config.schema import Config
from kubetune.planning.memory import USABLE_SHARE, Shape, activation_bytes_per_token
from kubetune.planning.model_shapes import TOWERS, Weights
from kubetune.planning.plan import Plan

MIB, GIB = 2**20, 2**30

PROCESS_BYTES = {"cpu": 391 * MIB, "cuda": 600 * MIB}
"""Before a model: on CPUs Python with torch and transformers, as measured; on GPUs the CUDA context, an allowance."""
TRACKER_BYTES = {"tensorboard": 13 * MIB, "mlflow": 171 * MIB}
"""What importing and using a tracker adds to the process of rank 0, as measured."""
LOST_SHARE = {"cpu": 0.15, "cuda": 0.06}
"""Of everything but the process: blocks that the allocator cannot use again. On CPUs as measured, else an allowance."""
KEPT_PRODUCT_BYTES = 252 * 2**10
"""Code that oneDNN makes for a product of matrices in 16 bits; it keeps malloc.KEPT_PRODUCTS of them."""

GLOO_THREADS = 2
"""Each gathers into memory of its own before it copies that to where it is wanted, and keeps it for the next time."""

EXACT_ROWS = 256
LONG_ROW = 1024
"""Block attention keeps the probabilities of blocks of so many queries; beyond LONG_ROW tokens nothing is kept."""

HEADS = re.compile(r"(^|\.)(lm_head|embed_out|score|classifier|pooler|pre_classifier)(\.|$)")
EMBEDDINGS = re.compile(r"(embed|wte|wpe|position)", re.IGNORECASE)
TOWER = re.compile(rf"(^|\.)({'|'.join(TOWERS)})\.")
LAYER_NORM = re.compile(r"(norm|layernorm|ln_\w+)\d?\.bias$", re.IGNORECASE)
NORM_OF_A_LAYER = re.compile(r"\.0\.(\w*(norm|ln_)\w*)\.weight$", re.IGNORECASE)
FUSED_ATTENTION = re.compile(r"\.(qkv_proj|query_key_value|c_attn|Wqkv)\.")
KEPT_OF_WIDE = {"gelu": 2, "relu": 1}
NOT_TEXT = re.compile(r"(^|\.)(visual|vision_tower|vision_model|multi_modal_projector)\.")


@dataclass(frozen=True)
class Forecast:
    """Peak memory of one device, in bytes by part, in the order in which they are printed."""

    parts: Mapping[str, int]
    trained_parameters: int
    parameters: int
    device_bytes: int | None

    @property
    def peak_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def allocated_bytes(self) -> int:
        """What of it is counted when a run's peak is measured. On a GPU torch tells of its own tensors alone: not of
        the context, nor of what lies idle between them."""
        untold = ("CUDA context", "allocator") if "CUDA context" in self.parts else ()
        return self.peak_bytes - sum(self.parts.get(part, 0) for part in untold)

    @property
    def fits(self) -> bool | None:
        """Whether it fits beside what the allocator loses; None where the device's memory is not known."""
        if self.device_bytes is None:
            return None
        return self.peak_bytes - self.parts.get("allocator", 0) <= USABLE_SHARE * self.device_bytes


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
        if _is_target(name, targets):
            total += lora.r * sum(sizes) + (sizes[0] if lora.use_dora else 0)
    for name, shape in weights.shapes.items():
        if any(f".{module}." in f".{name}" for module in lora.modules_to_save):
            total += math.prod(shape)
    return total


def _is_target(name: str, targets: str | tuple[str, ...]) -> bool:
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def forecast(
    config: Config, plan: Plan, weights: Weights, device_bytes: int | None = None, longest: int | None = None
) -> Forecast | None:
    """The peak of one device; None for models whose sizes the config does not name.

    `longest`: tokens of the longest row, where the data are known; else rows may be as long as the config lets them.
    """
    shape = shape_of(weights)
    if shape is None:
        return None
    config, plan = _for_rows(config, plan, longest)
    element = element_bytes(config, plan)
    sharded = plan.world_size if config.training.parallelism == "fsdp" else 1
    frozen = _weight_bytes(config, plan, weights, element)
    trained = adapter_parameters(config, weights) if config.lora else weights.parameters
    if config.lora:  # adapters stay whole on every rank
        whole = _tower_bytes(config, plan, weights, element)
        held = whole + (frozen - whole) // sharded
        parts = {"weights": held, **_state_parts(config, "adapters, in fp32", trained)}
    else:  # fp32 weights that are trained, and all sharded ones, are the optimizer's own copy
        held = 0 if element == 4 or sharded > 1 else frozen
        parts = {"weights": held, **_state_parts(config, "trained weights, in fp32", trained // sharded)}
    if sharded > 1:
        parts |= _sharing_parts(config, plan, weights, shape, element, device_bytes)
    # Autograd makes it whole before the optimizer's buffer takes it; embeddings and heads are the largest.
    largest = 0 if config.lora else element * max(math.prod(s) for s in weights.shapes.values())
    if plan.device == "cuda":
        parts["gradient of the largest weight"] = largest
    tokens = micro_batch_tokens(config, plan)
    chunk = 0 if classifies(config) else _chunk_bytes(weights, tokens, element, plan)
    before = sum(parts.values()) + chunk + PROCESS_BYTES[plan.device]
    left = None if device_bytes is None else int(USABLE_SHARE * device_bytes) - before
    activations = _activation_parts(config, plan, weights, tokens, element, left, chunk)
    if plan.device == "cpu" and element == 4:
        # Embeddings' comes last, when nothing else is left of the batch; in 16 bits it has only the words that occur.
        parts["gradient of the largest weight"] = max(0, largest - sum(activations.values()))
    # On a CPU logits stay where they are and leave no holes, so that they are no part of what is lost.
    lost = LOST_SHARE[plan.device]
    lossy = sum(parts.values()) + sum(activations.values()) + (chunk if plan.device == "cuda" else 0)
    parts |= {**activations, "logits, a chunk at a time": chunk, "allocator": int(lost * lossy)}
    if plan.device == "cpu":
        parts["code of matrix products"] = KEPT_PRODUCTS * KEPT_PRODUCT_BYTES if element == 2 else 0
        parts["trackers"] = sum(size for name, size in TRACKER_BYTES.items() if getattr(config.tracking, name))
    parts["process" if plan.device == "cpu" else "CUDA context"] = PROCESS_BYTES[plan.device]
    return Forecast({k: v for k, v in parts.items() if v}, trained, weights.parameters, device_bytes)


def _for_rows(config: Config, plan: Plan, longest: int | None) -> tuple[Config, Plan]:
    """Config and plan with no more tokens than rows of `longest` tokens can fill a step's micro-batches with."""
    if longest is None or longest >= config.data.max_length:
        return config, plan
    data = config.data.model_copy(update={"max_length": max(1, longest)})
    tokens = plan.micro_batch_tokens
    if tokens is not None and plan.global_batch_tokens is None:
        tokens = min(tokens, -(-plan.global_batch_size // plan.world_size) * longest)
    return config.model_copy(update={"data": data}), plan.model_copy(update={"micro_batch_tokens": tokens})


def micro_batch_tokens(config: Config, plan: Plan) -> int:
    """Tokens of the largest micro-batch."""
    return plan.micro_batch_tokens or plan.per_device_train_batch_size * config.data.max_length


def element_bytes(config: Config, plan: Plan) -> int:
    if config.model.dtype == "auto":
        return 2 if plan.device == "cuda" else 4
    return 4 if config.model.dtype == "float32" else 2


def _state_parts(config: Config, what: str, trained: int) -> dict[str, int]:
    """Of trained parameters: master copy, gradient and two moments, or two of 8 bits with their scales."""
    moments = 2 if config.training.optim == "adamw_8bit" else 8
    return {what: 4 * trained, "their gradients": 4 * trained, "AdamW's two moments": moments * trained}


def quantization_of(config: Config, plan: Plan) -> str:
    """`quantization`, with `auto` decided as the run will."""
    if config.quantization != "auto":
        return config.quantization
    alone = config.lora is not None and plan.device == "cuda" and plan.world_size == 1
    return "8bit" if alone else "none"


def _weight_bytes(config: Config, plan: Plan, weights: Weights, element: int) -> int:
    """Of the base as it lies on the device: nf4 with doubly quantised scales takes 4.13 bits, 8-bit has one per row."""
    per_linear = {"none": float(element), "8bit": 1.0}.get(quantization_of(config, plan), 4.127 / 8)
    inside = sum(a * b for _, a, b in linears(weights))
    return int(inside * per_linear) + (weights.parameters - inside) * element


def _tower_bytes(config: Config, plan: Plan, weights: Weights, element: int) -> int:
    """Of the vision tower, which stays whole on every rank."""
    shapes = {name: shape for name, shape in weights.shapes.items() if TOWER.search(name)}
    return _weight_bytes(config, plan, replace(weights, shapes=shapes), element)


def _sharing_parts(
    config: Config, plan: Plan, weights: Weights, shape: Shape, element: int, device_bytes: int | None
) -> dict[str, int]:
    """What ranks hold beside their own slices: what they borrow, and what is on its way between them.

    Layers are gathered one by one, the next one ahead; embeddings, head and last norm form a group around them that
    stays gathered from the beginning of the forward to the end of the backward.
    """
    layer = sum(a * b for _, a, b in linears(weights)) // shape.layers
    around = weights.parameters - layer * shape.layers
    parts = {"weights, gathered: two layers and what lies around them": (2 * layer + around) * element}
    if config.lora is not None:
        parts["a layer on its way between the ranks"] = layer * element
    else:
        # Its weights on their way in, its gradient in fp32 as it goes out, and as it was before.
        parts["a layer on its way between the ranks"] = layer * (element + 8)
        if not classifies(config):
            parts["gradient of the head, whole"] = 4 * int(weights.text_config.get("vocab_size") or 0) * shape.hidden
        whole = 4 * weights.parameters
        if plan.may_accumulate and device_bytes is not None and whole <= device_bytes // 8:
            parts["gradients before they are summed"] = whole
    if plan.device == "cpu":
        parts["buffers of the collectives"] = GLOO_THREADS * element * around
        if config.lora is None:
            # Resident, but the kernel's to take back: the slices' files, from which a model is put together.
            parts["files of a checkpoint, mapped"] = 4 * weights.parameters
    return parts


def _activation_parts(
    config: Config, plan: Plan, weights: Weights, tokens: int, element: int, left: int | None, logits: int
) -> dict[str, int]:
    """What autograd keeps until the backward, and the gradients of the layer that the backward is in.

    On a GPU those come when the `logits` are gone, so only what they need beyond that room counts.
    """
    shape = Shape.of(weights.text_config)
    assert shape is not None
    fused = plan.device == "cuda" or config.training.compile is True
    logits = logits if plan.device == "cuda" else 0
    if fused:
        kept = tokens * activation_bytes_per_token(shape, element, recompute=False, fused=True)
    else:
        kept = tokens * shape.layers * _kept_by_plain_layer(config, weights, shape, element)
    if any(FUSED_ATTENTION.search(name) for name in weights.shapes):
        # The values are a part of one product, which stays whole with queries and keys that nothing else needs.
        kept += tokens * shape.layers * (shape.attention + shape.keys) * element
    heads = int(weights.text_config.get("num_attention_heads") or weights.text_config.get("n_head") or 1)
    attention = shape.layers * heads * _pairs(config, tokens) * element if plan.device == "cpu" else 0
    if weights.text_config.get("attn_logit_softcapping"):
        attention *= 2  # the scores as they were bent are kept beside the probabilities
    a_layer = (kept + attention) // shape.layers
    setting = config.training.gradient_checkpointing
    recomputed = shape.layers if setting is True else 0
    if setting == "auto" and plan.device == "cuda" and left is not None and kept + a_layer > left:
        saved = kept // shape.layers - tokens * shape.hidden * element
        recomputed = min(shape.layers, -(-(kept + a_layer - left) // max(1, saved)))
    # Of gate, up, what SiLU and their product gave, and of what a layer is handed on.
    gradients = tokens * element * (4 * shape.intermediate + 3 * shape.hidden)
    gradients_beside = {"gradients of one layer's activations": max(0, gradients - logits)}
    if not recomputed:
        return {"activations": kept, "attention": attention, **gradients_beside}
    # What is kept whole, at least the one layer that runs again, and the inputs of the others.
    whole = max(1, shape.layers - recomputed)
    if whole == 1:
        # Running a layer again leaves blocks behind that its gradients do not fit into; as measured on a CPU.
        gradients_beside = {"gradients of one layer's activations": max(0, 2 * a_layer - logits)}
    # Those that run again are the first ones: their turn comes when what the others kept is free.
    return {
        f"activations, {recomputed} of {shape.layers} layers recomputed": whole * a_layer,
        "inputs of those layers": recomputed * tokens * shape.hidden * element,
        **gradients_beside,
    }


def _kept_by_plain_layer(config: Config, weights: Weights, shape: Shape, element: int) -> int:
    """Bytes a token that a layer keeps whose norms and activation are torch's own kernels, one after the other.

    What goes into a norm, in fp32; where its weight is trained, what it made before that; and what the two norms
    before attention and the wide part give. Queries, keys, values and what attention gives.
    """
    names = {found[1] for name in weights.shapes if (found := NORM_OF_A_LAYER.search(name))}
    is_plain = any(LAYER_NORM.search(name) for name in weights.shapes)  # one kernel, which keeps what it is given
    trained = config.lora is None

    def norm(width: int) -> int:
        return width * (element if is_plain else 4 + element * trained)

    norms = max(2, len(names)) * norm(shape.hidden) + 2 * shape.hidden * element
    if any("q_norm" in name for name in weights.shapes):
        norms += norm(shape.attention + shape.keys)
    inner = (2 * shape.attention + 2 * shape.keys + _kept_of_wide(weights) * shape.intermediate) * element
    low = (
        config.lora.r * sum(1 for name, *_ in linears(weights) if _is_target(name, config.lora.target_modules))
        if config.lora
        else 0
    )
    return norms + inner + low * element // shape.layers


def _kept_of_wide(weights: Weights) -> int:
    """How often a layer keeps its wide part: gate, activation, up and product; without a gate what GELU is given and
    gives, or what ReLU gives alone."""
    names = ("hidden_act", "hidden_activation", "activation", "activation_function")
    act = next((str(weights.text_config[name]) for name in names if weights.text_config.get(name)), "")
    return 4 if any("gate" in name for name in weights.shapes) else KEPT_OF_WIDE.get(act, 4)


def _pairs(config: Config, tokens: int) -> int:
    """Probabilities that block attention keeps for each head on CPUs, for rows of the longest kind."""
    length = min(config.data.max_length, tokens)
    if length > LONG_ROW:
        return 0
    borders = range(0, length, EXACT_ROWS)
    pairs = sum(min(EXACT_ROWS, length - first) * min(first + EXACT_ROWS, length) for first in borders)
    return pairs * (tokens // length)


def classifies(config: Config) -> bool:
    """Whether the head has a few classes, seen by one token of each sequence, instead of a vocabulary."""
    return config.task == "sequence_classification"


def _chunk_bytes(weights: Weights, tokens: int, element: int, plan: Plan) -> int:
    """Logits of a chunk of rows and what becomes of them: never more than the chunk, whatever the batch.

    On a CPU all is done in place, in fp32, beside narrower logits; a cap needs its slope as well. On a GPU there are
    log-probabilities and their gradient too. A cap or a factor needs the logits that it made.
    """
    text = weights.text_config
    vocabulary = int(text.get("vocab_size") or 0)
    rows = min(512, max(128, 2**25 // max(1, vocabulary)), tokens)
    capped = any(text.get(name) for name in ("final_logit_softcapping", "logits_soft_cap"))
    if plan.device == "cpu":
        return rows * vocabulary * (element + (4 if element < 4 else 0) + (4 if capped else 0))
    scaled = any((text.get(name) or 1.0) != 1.0 for name in ("logit_scale", "logits_scaling"))
    return rows * vocabulary * (element + 8 + (8 if capped else 4 if scaled else 0))


def remedies(
    config: Config, plan: Plan, weights: Weights, device_bytes: int, longest: int | None = None
) -> list[tuple[str, Forecast]]:
    """Changes of the config, each by itself, that make it fit, with what it comes to then. Mildest first."""
    training = config.training
    changes: list[tuple[str, Config, Plan]] = []

    def change(text: str, section: str | None = None, **values: object) -> None:
        if section is None:
            changed = config.model_copy(update=values)
        else:
            changed = config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
        batch = changed.training.per_device_train_batch_size
        tokens = batch * changed.data.max_length if changed.data.packing else None
        update = {"per_device_train_batch_size": batch, "micro_batch_tokens": tokens}
        changes.append((text, changed, plan.model_copy(update=update)))

    if training.gradient_checkpointing is not True:
        change("training.gradient_checkpointing: true", "training", gradient_checkpointing=True)
    batch = training.per_device_train_batch_size
    while batch > 1:
        batch //= 2
        text = f"training.per_device_train_batch_size: {batch}, with the same global_batch_size"
        change(text, "training", per_device_train_batch_size=batch)
    if training.parallelism == "ddp" and plan.world_size > 1:
        change("training.parallelism: fsdp", "training", parallelism="fsdp")
    if config.lora is None:
        change("training.optim: adamw_8bit", "training", optim="adamw_8bit")
        from kubetune.config.schema import LoraConfig

        change("lora: {r: 16}", lora=LoraConfig())
    elif plan.device == "cuda" and quantization_of(config, plan) in ("none", "8bit"):
        change("quantization: 4bit", quantization="4bit")
    change(f"data.max_length: {config.data.max_length // 2}", "data", max_length=max(8, config.data.max_length // 2))
    found = [(text, forecast(each, each_plan, weights, device_bytes, longest)) for text, each, each_plan in changes]
    return [(text, what) for text, what in found if what is not None and what.fits]
