"""Count a run's FLOPs and find its device's peak, for the share of the peak that the run uses (MFU).

plan/flops.py says what is counted; this module reads the sizes off a loaded model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kubetune.base.cpu import processor
from kubetune.data.prepared.rows import Rows
from kubetune.distributed.process_group import wait_for_device
from kubetune.models.acceleration import device_bytes
from kubetune.models.classifier_pooling import pools_last
from kubetune.models.learner import Learner
from kubetune.models.padding_free import unwrap
from kubetune.plan.flops import Cost, LinearCost, cost, visited_share
from kubetune.plan.linears import is_expert
from kubetune.training.gpu_specs import stated_tflops


def cost_of(model: nn.Module, *, has_vocabulary: bool) -> Cost:
    """Return the cost of training this model.

    `has_vocabulary`: its head predicts tokens, and is computed only where there is a label.
    """
    lm: Any = unwrap(model)
    config = lm.config.get_text_config()
    layer = lm.get_output_embeddings() if has_vocabulary else None

    head = None
    if layer is not None:
        is_trained = any(parameter.requires_grad for parameter in layer.parameters())
        head = LinearCost("head", _weights_of(layer), is_trained)
    return cost(
        _linears(lm, skip=layer),
        head,
        attention=_attention_width(config),
        layers=config.num_hidden_layers,
        visited=visited_share(config.to_dict()),
    )


def _attention_width(config: Any) -> float:
    """Return the heads times their size, in the mean of all layers: Gemma 4's layers differ."""
    if getattr(config, "is_heterogeneous", False):
        widths = [_attention_width(layer) for layer in config.per_layer_config]
        return math.fsum(widths) / len(widths)

    heads = getattr(config, "num_attention_heads", 0)
    head_size = getattr(config, "head_dim", None)
    if not head_size:
        head_size = config.hidden_size // max(1, heads)
    return float(heads * head_size)


def flops_of(
    learner: Learner,
    rows: Rows,
    saved_share: float = 0.0,
) -> NDArray[np.float64] | None:
    """Return the FLOPs of each row, `[rows]`; None if the model does not show its sizes.

    `saved_share`: the share of the tokens that is saved because rows share prefixes.
    """
    classifies = learner.labels is not None
    # FLOPs of one token, of one pair of tokens in attention, and of one label in the head.
    try:
        unit = cost_of(learner.model, has_vocabulary=not classifies).without_share(saved_share)
    except AttributeError:
        return None

    # Pairs of tokens of which one attends to the other. In a causal model each attends to itself and those before it:
    # 3 tokens are 1 + 2 + 3 pairs.
    lengths = rows.lengths.astype(np.float64)
    is_causal = not classifies or pools_last(unwrap(learner.model))
    pairs = lengths**2
    if is_causal:
        pairs = lengths * (lengths + 1) / 2

    flops: NDArray[np.float64] = unit.token * lengths + unit.pair * pairs
    return flops + unit.label * rows.trained_counts


def describe(
    learner: Learner,
    stated_peak: float | None,
    rows: Rows,
    device: torch.device,
    dtype: torch.dtype,
    saved_share: float = 0.0,
) -> dict[str, Any]:
    """Return device and dtype, and what MFU is computed from, if the model shows its sizes.

    That is the device's peak, by `stated_peak` of the config if it is set, and the FLOPs per token: the mean of an
    epoch, in which labels and attention are shared out over all tokens.
    """
    name = "CPU"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    kind = str(dtype).removeprefix("torch.")
    known = {"device": name, "device_bytes": device_bytes(device), "dtype": kind}
    flops = flops_of(learner, rows, saved_share)
    if flops is None:
        return known

    tokens = int(rows.lengths.sum())
    known["flops_per_token"] = math.fsum(flops.tolist()) / max(1, tokens)
    if stated_peak is None and device.type == "cpu" and processor.slow_dtype(kind, None):
        # A share of a product that is slow itself would look good where the run is slow.
        return known
    peak, source = peak_of(device, dtype, stated_peak)
    return {**known, "peak_tflops": peak, "peak_source": source}


def peak_of(
    device: torch.device,
    dtype: torch.dtype,
    stated: float | None,
) -> tuple[float, str]:
    """Return the TFLOP/s that one device could do at best, and the source: config, data sheet, or a measurement."""
    if stated is not None:
        return stated, "compute.peak_tflops"
    # Data sheets state the peak of 16 bits.
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        known = stated_tflops(name)
        if known is not None:
            return known, f"stated for {name}"

    return _measured_peak(device, dtype)


def _measured_peak(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the TFLOP/s of the fastest bare matrix product here, and what was multiplied.

    The fastest, because whatever else the machine does only slows products down.
    """
    # Large enough that starting the product takes no part of the time.
    size = 512
    if device.type == "cuda":
        size = 8192  # smaller ones do not fill a GPU

    left = torch.full((size, size), 0.5, dtype=dtype, device=device)
    right = left.clone()
    # As the model does: for 16 bits `@` takes another, slower path on some CPUs.
    multiply = nn.functional.linear
    multiply(left, right)  # the first one prepares the kernel
    # At least three products, and at least 0.05 s.
    durations: list[float] = []
    while len(durations) < 3 or math.fsum(durations) < 0.05:
        wait_for_device(device)
        began = time.perf_counter()
        multiply(left, right)
        wait_for_device(device)
        durations.append(time.perf_counter() - began)

    kind = str(dtype).removeprefix("torch.")
    operations = 2 * size**3  # a multiplication and an addition for each of size³ pairs of numbers
    return operations / min(durations) / 1e12, f"measured: a {size} × {size} {kind} product"


def _linears(lm: nn.Module, skip: nn.Module | None) -> Iterator[LinearCost]:
    """Yield the linear modules that every token goes through, and all experts."""
    for name, module in lm.named_modules():
        if module is skip or _is_head(name):
            continue
        parameters = list(module.parameters(recurse=False))
        weights = _weights_of(module)
        if weights:
            is_trained = any(parameter.requires_grad for parameter in parameters)
            yield LinearCost(name, weights, is_trained)
        elif is_expert(name):
            # All experts of a layer in one parameter: [experts, inputs, outputs].
            for parameter in parameters:
                if parameter.dim() == 3:
                    yield LinearCost(name, parameter.numel(), parameter.requires_grad)


def _weights_of(module: nn.Module) -> int:
    """Return the number of weights of a linear module of any kind, 0 for another module."""
    # Not `numel`: quantised weights are packed into fewer numbers.
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features

    # Classes of transformers that multiply by a matrix without being nn.Linear: GPT-2's, and routers.
    weight = getattr(module, "weight", None)
    if type(module).__name__.endswith(("Conv1D", "Router")) and isinstance(weight, torch.Tensor):
        return weight.numel()
    return 0


def _is_head(name: str) -> bool:
    """True for a classifier's own layers, which see only one token of each sequence."""
    heads = {"score", "classifier", "pre_classifier", "pooler"}
    return not heads.isdisjoint(name.split("."))
