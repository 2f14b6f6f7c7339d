"""Memory that a run takes, before anything is held: the peak memory of one device, part by part. Hours are in cost.py.

Arithmetic on the shapes of the weights and the config, without torch. Each part says what it stands for; what cannot
be known (the allocator's losses, kernels' workspaces) is an allowance that was measured where it says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kubetune.base.allocator import is_mkl_narrow, kept_products
from kubetune.config.schema import Config
from kubetune.plan.activations import activations, expects_compiling, goes_alone
from kubetune.plan.linears import EXPERT, adapter_parameters, linears, shape_of, stacks
from kubetune.plan.memory import USABLE_SHARE, Shape, chunk_rows
from kubetune.plan.model_shapes import TOWERS, Weights
from kubetune.plan.plan import Plan

MIB, GIB = 2**20, 2**30

PROCESS_BYTES = {"cpu": 391 * MIB, "cuda": 600 * MIB}
"""Before a model: on CPUs Python with torch and transformers, as measured; on GPUs the CUDA context, an allowance."""
TRACKER_BYTES = {"tensorboard": 13 * MIB, "mlflow": 171 * MIB}
"""Memory that importing and using a tracker adds to the process of rank 0, as measured."""
BITSANDBYTES_BYTES = 44 * MIB
"""Memory that importing bitsandbytes adds to a process on a CPU, as measured; only runs that need it do so."""
LOST_SHARE = {"cpu": 0.15, "cuda": 0.06}
"""Of everything but the process: blocks that the allocator cannot use again. On CPUs as measured, else an allowance."""
LOST_SHARE_OF_QUANTIZED = 0.27
"""The same on CPUs of a quantised base, as measured: its codes lie in the heap, where other weights lie in their file,
and each product makes its weight anew between blocks that stay."""
LOST_SHARE_OF_FULL, LOST_BYTES_OF_FULL = 0.09, 84 * MIB
"""The same on CPUs where all weights are trained, of what autograd keeps, and whatever the model: weights, gradients
and moments are a few blocks of their own, made before the first step and kept to the end, so that they leave no
holes. By least squares over 23 measured cases, in which what was lost did not grow with these; a toy, which holds less
than the allowance, loses no more than it holds."""
KEPT_PRODUCT_BYTES = 1280 * 2**10
"""Code that oneDNN makes for a product of matrices in 16 bits, and the holes it leaves in the heap, as measured; it
keeps allocator.kept_products of them."""
FP32_PRODUCTS_BYTES = {"lora": 55 * MIB, "full": 105 * MIB}
"""The same of all products in fp32 where they are oneDNN's: of adapters, whose cases took 50 to 56 MiB more than with
MKL, and of a head that is trained, which took 36 to 141, as its gradient comes in blocks that lie between the codes."""

GLOO_THREADS = 2
"""Each gathers into memory of its own before it copies that to where it is wanted, and keeps it for the next time."""

TOWER = re.compile(rf"(^|\.)({'|'.join(TOWERS)})\.")
VOCABULARY_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|cls\.predictions)\.")
"""Scores of words, in whose place a classifier has its own head."""


@dataclass(frozen=True)
class Forecast:
    """Peak memory of one device, in bytes by part, in the order in which they are printed."""

    parts: Mapping[str, int]
    trained_parameters: int
    parameters: int
    device_bytes: int | None
    recomputed_layers: int = 0

    @property
    def peak_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def allocated_bytes(self) -> int:
        """The part of it that a run's measured peak counts. On a GPU torch tells of its own tensors alone: not of
        the context, nor of what lies idle between them."""
        untold = ("CUDA context", "allocator") if "CUDA context" in self.parts else ()
        return self.peak_bytes - sum(self.parts.get(part, 0) for part in untold)

    @property
    def fits(self) -> bool | None:
        """It fits beside what the allocator loses; None where the device's memory is not known."""
        if self.device_bytes is None:
            return None
        return self.peak_bytes - self.parts.get("allocator", 0) <= USABLE_SHARE * self.device_bytes


def forecast(
    config: Config,
    plan: Plan,
    weights: Weights,
    device_bytes: int | None = None,
    longest: int | None = None,
    *,
    compiled: bool | None = None,
) -> Forecast | None:
    """Return the peak of one device, or None for models whose sizes the config does not name.

    `longest`: tokens of the longest row, where the data are known; else rows may be as long as the config
    lets them. `compiled`: True if pointwise kernels are compiled, None to go by what the plan says.
    """
    shape = shape_of(weights)
    if shape is None:
        return None
    weights = _held(config, weights)
    config, plan = _for_rows(config, plan, longest)
    element = element_bytes(config, plan)
    on_cpu = plan.device == "cpu"
    trained = adapter_parameters(config, weights)
    parts = _held_parts(config, plan, weights, element, trained)
    if config.training.parallelism == "fsdp" and plan.world_size > 1:
        parts |= _sharing_parts(config, plan, weights, shape, element, device_bytes)
    largest_gradient = _largest_gradient(config, weights, element)
    if not on_cpu:
        parts["gradient of the largest weight"] = largest_gradient

    tokens = config.longest_row if goes_alone(config, weights) else micro_batch_tokens(config, plan)
    logits = 0
    if not config.classifies:
        logits = _chunk_bytes(weights, tokens, element, plan, device_bytes)
    held = sum(parts.values()) + logits + PROCESS_BYTES[plan.device]
    if compiled is None:
        compiled = expects_compiling(config, plan, weights)
    kept, recomputed = activations(
        config,
        plan,
        weights,
        tokens=tokens,
        element=element,
        left=None if device_bytes is None else int(USABLE_SHARE * device_bytes) - held,
        logits=logits,
        compiled=compiled,
    )
    if on_cpu and element == 4:
        # The embeddings' gradient comes last, when nothing else is left of the batch. In 16 bits it
        # has only the words that occur.
        parts["gradient of the largest weight"] = max(0, largest_gradient - sum(kept.values()))
    lost = _lost_bytes(config, plan, sum(parts.values()), sum(kept.values()), logits)
    parts |= kept
    parts["logits, a chunk at a time"] = logits
    parts["allocator"] = lost
    parts |= _process_parts(config, plan, element, used=sum(parts.values()) - lost)
    parts["file of experts, until they are stacked"] = _stacking_bytes(
        config, plan, weights, shape, parts, element
    )
    present = {name: size for name, size in parts.items() if size}
    return Forecast(present, trained, weights.parameters, device_bytes, recomputed)


def _held_parts(
    config: Config, plan: Plan, weights: Weights, element: int, trained: int
) -> dict[str, int]:
    """Return what a rank holds from its start to its end: weights and the optimizer's state."""
    is_sharded = config.training.parallelism == "fsdp"
    shards = plan.world_size if is_sharded else 1
    weight_bytes = _weight_bytes(config, plan, weights, element)
    if config.lora:
        # Adapters and a vision tower stay whole on every rank.
        tower = _tower_bytes(config, plan, weights, element)
        held = tower + (weight_bytes - tower) // shards
        return {"weights": held, **_state_parts(config, "adapters, in fp32", trained)}
    # Weights in fp32 that are trained, and all sharded ones, are the optimizer's own copy. What is
    # left is a vision tower that does not learn.
    frozen = (weights.parameters - trained) * element
    held = frozen if element == 4 or shards > 1 else weight_bytes
    return {
        "weights": held,
        **_state_parts(config, "trained weights, in fp32", trained // shards),
    }


def _largest_gradient(config: Config, weights: Weights, element: int) -> int:
    """Return the size of the largest weight's gradient, mostly that of embeddings or head.

    Autograd makes it whole before the optimizer's buffer takes it.
    """
    if config.lora:
        return 0
    return element * max(math.prod(shape) for shape in weights.shapes.values())


def _process_parts(config: Config, plan: Plan, element: int, used: int) -> dict[str, int]:
    """Return what the process itself takes. `used`: bytes of all other parts."""
    if plan.device != "cpu":
        return {"CUDA context": PROCESS_BYTES[plan.device]}
    uses_bitsandbytes = (
        quantization_of(config, plan) != "none" or config.training.optim == "adamw_8bit"
    )
    trackers = 0
    for name, size in TRACKER_BYTES.items():
        if getattr(config.tracking, name):
            trackers += size
    return {
        "code of matrix products": _code_bytes(config, element, used),
        "bitsandbytes": BITSANDBYTES_BYTES if uses_bitsandbytes else 0,
        "trackers": trackers,
        "process": PROCESS_BYTES[plan.device],
    }


def _lost_bytes(config: Config, plan: Plan, held: int, kept: int, logits: int) -> int:
    """Return what the allocator loses. `held`: from the start of the run; `kept`: by autograd."""
    if plan.device != "cpu":
        return int(LOST_SHARE[plan.device] * (held + kept + logits))
    # On a CPU logits stay where they are and leave no holes.
    if not config.lora and config.training.parallelism != "fsdp":
        return min(LOST_BYTES_OF_FULL, held) + int(LOST_SHARE_OF_FULL * kept)
    is_quantized = quantization_of(config, plan) != "none"
    share = LOST_SHARE_OF_QUANTIZED if is_quantized else LOST_SHARE["cpu"]
    return int(share * (held + kept))


def _code_bytes(config: Config, element: int, used: int) -> int:
    """Code of oneDNN's products on a CPU. In fp32 they are those of adapters and of a head of words, and where a whole
    model uses less memory than the allowance, the holes between them are no larger."""
    if element == 2:
        return KEPT_PRODUCT_BYTES * kept_products(config.classifies)
    if not is_mkl_narrow() or (config.lora is None and config.classifies):
        return 0
    return FP32_PRODUCTS_BYTES["lora"] if config.lora else min(FP32_PRODUCTS_BYTES["full"], used)


def _stacking_bytes(
    config: Config,
    plan: Plan,
    weights: Weights,
    shape: Shape,
    parts: Mapping[str, int],
    element: int,
) -> int:
    """Memory of loading beyond all parts of a step, where a file has each expert alone: on a CPU the file stays mapped
    until the last layer is stacked."""
    is_apart = any(EXPERT.fullmatch(name) for name in weights.shapes)
    if (
        not is_apart
        or plan.device != "cpu"
        or config.lora is None
        or config.training.parallelism == "fsdp"
    ):
        return 0
    of_file = weights.file_bytes or weights.parameters * element
    stacked = (
        sum(stack.experts * stack.rows * stack.columns for stack in stacks(weights))
        / weights.parameters
    )
    loading = parts["process"] + parts["weights"] + int(of_file * (1 + stacked / shape.layers))
    return max(0, loading - sum(parts.values()))


def _held(config: Config, weights: Weights) -> Weights:
    """Weights that a run holds: a classifier leaves the scores of words in the file."""
    if not config.classifies:
        return weights
    return replace(
        weights,
        shapes={n: each for n, each in weights.shapes.items() if not VOCABULARY_HEAD.search(n)},
    )


def _for_rows(config: Config, plan: Plan, longest: int | None) -> tuple[Config, Plan]:
    """Config and plan with no more tokens than sequences of `longest` tokens can fill a step's micro-batches with."""
    if longest is None or longest > config.data.max_length:
        return config, plan
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"max_length": max(1, longest)})}
    )
    tokens = plan.micro_batch_tokens
    if tokens is not None and plan.global_batch_tokens is None:
        whole = -(-plan.global_batch_size // plan.world_size) * config.longest_row
        tokens = min(tokens, max(config.longest_row, math.ceil(whole * (1 - plan.spared_share))))
    return config, plan.model_copy(update={"micro_batch_tokens": tokens})


def micro_batch_tokens(config: Config, plan: Plan) -> int:
    """Tokens of the largest micro-batch."""
    return plan.micro_batch_tokens or plan.per_device_train_batch_size * config.longest_row


def element_bytes(config: Config, plan: Plan) -> int:
    """Bytes of one parameter of the base as it is computed with."""
    if config.model.dtype == "auto":
        return 2 if plan.device == "cuda" else 4
    return 4 if config.model.dtype == "float32" else 2


def _state_parts(config: Config, what: str, trained: int) -> dict[str, int]:
    """Of trained parameters: master copy, gradient and two moments, or two of 8 bits with their scales."""
    moments = 2 if config.training.optim == "adamw_8bit" else 8
    return {
        what: 4 * trained,
        "their gradients": 4 * trained,
        "AdamW's two moments": moments * trained,
    }


def quantization_of(config: Config, plan: Plan) -> str:
    """`quantization`, with `auto` decided as the run will."""
    if config.quantization != "auto":
        return config.quantization
    return auto_quantization(config, plan.device, plan.world_size)[0]


def auto_quantization(config: Config, device: str, processes: int) -> tuple[str, str]:
    """`quantization: auto` decided, and the reason: 8-bit on a single GPU, where memory is short; else none.

    A run decides the same, or none where its bitsandbytes does not work.
    """
    if config.lora is None:
        return "none", "every parameter is trained and a quantised base could not be"
    if device != "cuda":
        return "none", "there is no GPU whose memory it would save"
    if processes > 1:
        return "none", f"{processes} GPUs share the work"
    return "8bit", "there is a single GPU"


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
    config: Config,
    plan: Plan,
    weights: Weights,
    shape: Shape,
    element: int,
    device_bytes: int | None,
) -> dict[str, int]:
    """Memory that ranks hold beside their own slices: what they borrow, and what is on its way between them.

    Layers are gathered one by one, the next one ahead; embeddings, head and last norm form a group around them that
    stays gathered from the beginning of the forward to the end of the backward.
    """
    inside = sum(a * b for _, a, b in linears(weights)) + sum(
        math.prod(stack[1:]) for stack in stacks(weights)
    )
    layer = inside // shape.layers
    around = weights.parameters - layer * shape.layers
    parts = {
        "weights, gathered: two layers and what lies around them": (2 * layer + around) * element
    }
    if config.lora is not None:
        parts["a layer on its way between the ranks"] = layer * element
    else:
        # Its weights on their way in, its gradient in fp32 as it goes out, and as it was before.
        parts["a layer on its way between the ranks"] = layer * (element + 8)
        head = (
            0
            if config.classifies
            else int(weights.text_config.get("vocab_size") or 0) * shape.hidden
        )
        parts["gradient of the head, whole"] = 4 * head
        # They leave as one group when the backward ends: embeddings' gradient is whole too, and all are copied in fp32.
        parts["gradients of what lies around, on their way"] = (
            element * max(0, around - head) + 4 * around
        )
        whole = 4 * weights.parameters
        if plan.may_accumulate and device_bytes is not None and whole <= device_bytes // 8:
            parts["gradients before they are summed"] = whole
    if plan.device == "cpu":
        parts["buffers of the collectives"] = GLOO_THREADS * element * around
        if config.lora is None:
            # Resident, but the kernel's to take back: the slices' files, from which a model is put together.
            parts["files of a checkpoint, mapped"] = 4 * weights.parameters
    return parts


def _chunk_bytes(
    weights: Weights, tokens: int, element: int, plan: Plan, device_bytes: int | None
) -> int:
    """Logits of a chunk of rows and what becomes of them: never more than the chunk, whatever the batch.

    On a CPU all is done in place, in fp32, beside narrower logits; a cap needs its slope as well. On a GPU there are
    log-probabilities and their gradient too. A cap or a factor needs the logits that it made.
    """
    text = weights.text_config
    vocabulary = int(text.get("vocab_size") or 0)
    rows = min(tokens, chunk_rows(vocabulary, device_bytes if plan.device == "cuda" else None))
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
            changed = config.model_copy(
                update={section: getattr(config, section).model_copy(update=values)}
            )
        batch = changed.training.per_device_train_batch_size
        tokens = batch * changed.longest_row if changed.data.packing else None
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
    change(
        f"data.max_length: {config.data.max_length // 2}",
        "data",
        max_length=max(8, config.data.max_length // 2),
    )
    found = [
        (text, forecast(each, each_plan, weights, device_bytes, longest))
        for text, each, each_plan in changes
    ]
    return [(text, what) for text, what in found if what is not None and what.fits]
