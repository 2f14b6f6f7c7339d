"""Memory that a run takes, before anything is held: the peak of one device, part by part. Hours are in cost.py.

On a GPU all is arithmetic on the shapes of the weights and the config, without torch; the CUDA context and what the
allocator loses are allowances. On a CPU the same parts are counted, and what they leave out (the heap's holes,
attention, code of matrix products, libraries) is one factor and one constant, fitted to measured runs.

Worked example: Qwen2.5-7B (7.62 G parameters) on one GPU of 80 GiB, LoRA of rank 16 on all linear modules (40.4 M),
bf16, batch 8 × 2,048 tokens:

    weights                      7.62 G · 2 bytes                            14.2 GiB
    adapters, gradients, AdamW   40.4 M · (4 + 4 + 8) bytes                   0.6 GiB
    logits                       1,024 rows · 152,064 words · (2 + 8) bytes   1.5 GiB
    CUDA context                                                              0.6 GiB
    activations                  67.8 GiB if all 28 layers kept theirs (activations.py). 80 GiB · 0.92 leaves 56.7 GiB
                                 for them and one layer more, so 6 layers recompute: 53.3 GiB, inputs 0.7 GiB

The sources: 16 bytes a trained parameter, ZeRO (arXiv 1910.02054); nf4 with doubly quantised scales, QLoRA (2305.14314).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kubetune.plan.activations import activations, expects_compiling, goes_alone
from kubetune.plan.drawing import cache_bytes, sampling_bytes
from kubetune.plan.linears import adapter_parameters, learning_whole, linears, shape_of, stacks
from kubetune.plan.memory import ROOM_TO_DRAW, USABLE_SHARE, Shape, chunk_rows
from kubetune.plan.model_shapes import TOWERS, Weights
from kubetune.plan.rank_work import RankWork

MIB = 2**20
GIB = 2**30

# An allowance: no GPU was available to measure it.
CUDA_CONTEXT_BYTES = 600 * MIB
# Share of weights, state and activations: blocks that the allocator cannot use again. An allowance.
CUDA_LOST_SHARE = 0.06

# Rows whose probabilities are compared with a teacher's at a time (kernels/divergence), and bytes of a value: the most that
# was measured of any `beta` and `support`, nine numbers in fp32.
COMPARED_ROWS = 128
COMPARED_BYTES = 36

CPU_PROCESS_BYTES = 480 * MIB
# Peak of a process on a CPU: CPU_PROCESS_BYTES + CPU_FACTOR × the parts. Fitted to 108 of the runs of
# benchmarks/results/*-memory.json, which it meets within 25 %, half of them within 6 %; docs/forecast.md says which
# were left out.
CPU_FACTOR = 1.3

NF4_BITS = 4.127  # of a parameter, with its share of the doubly quantised scales

TOWER = re.compile(rf"(^|\.)({'|'.join(TOWERS)})\.")
# Scores of words, which a classifier replaces by its own head.
VOCABULARY_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|cls\.predictions)\.")


@dataclass(frozen=True)
class Forecast:
    """Peak memory of one device."""

    parts: Mapping[str, int]  # bytes by name, in the order in which they are printed
    trained_parameters: int
    parameters: int
    device_bytes: int | None  # memory of the device, None if unknown
    # Layers that recompute by `gradient_checkpointing: auto`: with plain kernels, and with compiled ones.
    recomputed: tuple[int, int] = (0, 0)

    @property
    def peak_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def allocated_bytes(self) -> int:
        """The bytes that a run's measured peak counts.

        On a GPU torch counts only its own tensors: neither the context, nor what lies idle between them.
        """
        uncounted = self.parts.get("CUDA context", 0) + self.parts.get("allocator", 0)
        return self.peak_bytes - uncounted

    @property
    def fits(self) -> bool | None:
        """True if it fits together with what the allocator loses; None if the device's memory is not known."""
        if self.device_bytes is None:
            return None
        return self.peak_bytes - self.parts.get("allocator", 0) <= USABLE_SHARE * self.device_bytes


def forecast(work: RankWork, weights: Weights, device_bytes: int | None = None) -> Forecast | None:
    """Return the peak of one device, or None for models that do not name their sizes in config.json."""
    shape = shape_of(weights)
    if shape is None:
        return None
    if work.classifies:
        weights = _without_vocabulary_head(weights)
    # Bytes that a rank holds for the whole run.
    trained = adapter_parameters(work.trainable, weights)
    borrowed = _borrowed_parts(work, weights, shape, device_bytes)
    held = _held_parts(work, weights, trained) | borrowed | _largest_gradient(work, weights)
    # Bytes that come and go within a step. Activations get the room that is left.
    logits = _logits_bytes(work, weights, device_bytes)
    room = None
    if device_bytes is not None:
        room = int(USABLE_SHARE * device_bytes) - sum(held.values()) - logits - CUDA_CONTEXT_BYTES
    keep = partial(activations, work, weights, shape, room=room, logits=logits)
    plain = keep(compiled=False)
    compiled = keep(compiled=True)
    kept = compiled if expects_compiling(work, weights.parameters) else plain
    passing = {**kept.parts, "logits, a chunk at a time": logits}
    if work.draws_answers:
        # Answers are drawn before a step begins, when nothing of what comes and goes within it is there.
        drawing = _drawing_bytes(work, weights, shape)
        if borrowed:
            drawing += _gathered_bytes(work, weights, shape, room)
        comes_and_goes = sum(passing.values()) + sum(borrowed.values())
        held["drawing answers, beyond what a step takes"] = max(0, drawing - comes_and_goes)
    counted = held | passing
    parts = counted | _uncounted_parts(work, sum(counted.values()))
    present = {name: size for name, size in parts.items() if size}
    recomputed = (plain.recomputed_layers, compiled.recomputed_layers)
    return Forecast(present, trained, weights.parameters, device_bytes, recomputed)


def _drawing_bytes(work: RankWork, weights: Weights, shape: Shape) -> int:
    """Return the bytes of the key-value cache and of the sampling, at the end of the longest answers."""
    text = weights.text_config
    cache = cache_bytes(text, shape, work.drawn_rows, work.drawn_tokens, work.element)
    return cache + sampling_bytes(text, work.drawn_rows, work.element)


def _gathered_bytes(work: RankWork, weights: Weights, shape: Shape, room: int | None) -> int:
    """Return the bytes of the weights that a rank gathers to draw answers. `room`: beside all that it holds anyway.

    They are all weights, but for a frozen base that has no room.
    """
    base = _weight_bytes(work, weights)
    two = _two_layers(work, weights, shape)
    if work.lora is None:
        return base + (two if work.holds_reference else 0)
    has_room = work.device == "cuda" and (room or 0) + two >= ROOM_TO_DRAW * base
    return base if has_room else two


def _uncounted_parts(work: RankWork, counted: int) -> dict[str, int]:
    """Return what a process takes besides the bytes that other parts count."""
    if work.device == "cuda":
        return {
            "allocator": int(CUDA_LOST_SHARE * counted),
            "CUDA context": CUDA_CONTEXT_BYTES,
        }
    return {
        "not counted apart, as measured": int((CPU_FACTOR - 1) * counted),
        "process": CPU_PROCESS_BYTES,
    }


def _without_vocabulary_head(weights: Weights) -> Weights:
    """Return the weights that a classifier holds: it leaves the scores of words in the file."""
    shapes = {}
    for name, shape in weights.shapes.items():
        if not VOCABULARY_HEAD.search(name):
            shapes[name] = shape
    return replace(weights, shapes=shapes)


def _held_parts(work: RankWork, weights: Weights, trained: int) -> dict[str, int]:
    """Return what a rank holds from its start to its end: weights and the optimizer's state."""
    shards = work.sharing if work.is_sharded else 1
    weight_bytes = _weight_bytes(work, weights)
    if work.lora:
        # Adapters, a vision tower and what modules that learn began with stay whole on every rank.
        whole = _weight_bytes(work, _whole(weights, work.lora.modules_to_save))
        held = whole + (weight_bytes - whole) // shards
        if work.element < 4:
            # Beside their fp32 these modules have numbers to compute with.
            held += whole - _weight_bytes(work, _whole(weights, ()))
        state = "adapters, in fp32"
        of_rank = trained
    else:
        # Weights in fp32 that are trained, and all sharded ones, are the optimizer's own copy. The rest is a vision
        # tower that does not learn.
        frozen = (weights.parameters - trained) * work.element
        held = frozen if work.element == 4 or shards > 1 else weight_bytes
        state = "trained weights, in fp32"
        of_rank = trained // shards
    moments = 2 if work.optimizer == "adamw_8bit" else 8  # bytes of both together
    return {
        "weights": held,
        "model before training": weight_bytes // shards if work.holds_reference else 0,
        state: 4 * of_rank,
        "their gradients": 4 * of_rank,
        "AdamW's two moments": moments * of_rank,
    }


def _weight_bytes(work: RankWork, weights: Weights) -> int:
    """Return the bytes of the base as it lies on the device. Only linear modules are quantised.

    Files in FP8 and MXFP4 are read as numbers of `model.dtype` (models/quantization).
    """
    quantization = weights.quantization or work.quantization
    linear_bytes: float = work.element
    if quantization == "8bit":
        linear_bytes = 1
    elif quantization != "none":
        linear_bytes = NF4_BITS / 8
    in_linears = _linear_parameters(weights)
    return int(in_linears * linear_bytes) + (weights.parameters - in_linears) * work.element


def _linear_parameters(weights: Weights) -> int:
    return sum(linear.rows * linear.columns for linear in linears(weights))


def _whole(weights: Weights, trained: Collection[str]) -> Weights:
    """Return the weights of the vision tower, and of modules with names in `trained`."""
    shapes = learning_whole(weights, trained)
    for name, shape in weights.shapes.items():
        if TOWER.search(name):
            shapes[name] = shape
    return replace(weights, shapes=shapes)


def _largest_gradient(work: RankWork, weights: Weights) -> dict[str, int]:
    """Return the largest gradient of full fine-tuning on a GPU, mostly that of embeddings or head.

    Autograd makes it whole before the optimizer's buffer takes it.
    """
    if work.device != "cuda" or work.lora is not None:
        return {}
    largest = max(math.prod(sizes) for sizes in weights.shapes.values())
    return {"gradient of the largest weight": work.element * largest}


def _borrowed_parts(
    work: RankWork, weights: Weights, shape: Shape, device_bytes: int | None
) -> dict[str, int]:
    """Return what ranks hold in addition to their own slices: what they borrow, and what is on its way between them.

    Layers are gathered one by one, the next one ahead. In full fine-tuning embeddings, head and last norm form a group
    around them that stays gathered from the beginning of the forward to the end of the backward. Of a frozen base each
    is gathered when it is used, like a layer, and arrives where it is used.
    """
    if not work.is_sharded or work.ranks == 1:
        return {}
    if work.lora is not None:
        two = _two_layers(work, weights, shape)
        return {"weights, borrowed: two layers, or one and a table of tokens": two}
    layer = _layer_parameters(weights, shape)
    around = weights.parameters - layer * shape.layers
    element = work.element
    head = 0 if work.classifies else _table_parameters(weights, shape)
    parts = {
        "weights, gathered: two layers and what lies around them": (2 * layer + around) * element,
        # Its weights on their way in, its gradient in fp32 as it goes out, and as it was before.
        "a layer on its way between the ranks": layer * (element + 8),
        "gradient of the head, whole": 4 * head,
        # They leave as one group when the backward ends: the embeddings' gradient is whole too, and all are copied
        # in fp32.
        "gradients of what lies around, on their way": element * max(0, around - head) + 4 * around,
    }
    whole = 4 * weights.parameters
    if work.may_accumulate and device_bytes is not None and whole <= device_bytes // 8:
        parts["gradients before they are summed"] = whole
    return parts


def _two_layers(work: RankWork, weights: Weights, shape: Shape) -> int:
    """Return the bytes that a rank borrows at most of a frozen base in parts: two layers, or one and a table of tokens."""
    around = weights.parameters - _layer_parameters(weights, shape) * shape.layers
    layer = (_weight_bytes(work, weights) - around * work.element) // shape.layers
    return layer + max(layer, _table_parameters(weights, shape) * work.element)


def _layer_parameters(weights: Weights, shape: Shape) -> int:
    in_layers = _linear_parameters(weights)
    for stack in stacks(weights):
        in_layers += stack.experts * stack.rows * stack.columns
    return in_layers // shape.layers


def _table_parameters(weights: Weights, shape: Shape) -> int:
    return int(weights.text_config.get("vocab_size") or 0) * shape.hidden


def _logits_bytes(work: RankWork, weights: Weights, device_bytes: int | None) -> int:
    """Return the bytes of a chunk of logits and of what becomes of them; they never exist whole.

    A value of a GPU is the logit, its log-probability and the gradient of that in fp32, and with a cap or a factor what
    that was applied to. On a CPU all is done in place, in fp32.
    """
    if work.classifies:
        return 0
    text = weights.text_config
    vocabulary = int(text.get("vocab_size") or 0)
    tokens = work.row_tokens if goes_alone(work, weights) else work.batch_tokens
    # Of distillation also both models' probabilities and what becomes of them.
    compared = 0
    if work.task == "distill":
        compared = min(tokens, COMPARED_ROWS) * vocabulary * COMPARED_BYTES
    if work.device == "cpu":
        return min(tokens, chunk_rows(vocabulary)) * vocabulary * 4 + compared
    value_bytes = work.element + 8
    if text.get("final_logit_softcapping") or text.get("logits_soft_cap"):
        value_bytes += 8
    elif any((text.get(name) or 1.0) != 1.0 for name in ("logit_scale", "logits_scaling")):
        value_bytes += 4
    return min(tokens, chunk_rows(vocabulary, device_bytes)) * vocabulary * value_bytes + compared
