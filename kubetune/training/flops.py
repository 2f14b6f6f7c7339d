"""Share of a device's speed that a run makes use of (MFU): its FLOPs, against a peak that is named.

What is counted is said in plan/flops.py; this file finds it in a model at hand.
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

from kubetune.data.prepared.rows import Rows
from kubetune.distributed.process_group import wait_for_device
from kubetune.models.acceleration import device_bytes
from kubetune.models.classifier_pooling import pools_last
from kubetune.models.learner import Learner
from kubetune.models.padding_free import unwrap
from kubetune.plan.flops import Cost, Linear, cost, visited_share
from kubetune.plan.gpu_specs import stated_tflops
from kubetune.plan.linears import is_expert


def cost_of(model: nn.Module, *, has_vocabulary: bool) -> Cost:
    """Cost of training this model. `has_vocabulary`: its head is one, and computed where there is a label."""
    lm: Any = unwrap(model)
    config = lm.config.get_text_config()
    layer = lm.get_output_embeddings() if has_vocabulary else None
    head = None
    if layer is not None:
        head = Linear("head", _weights_of(layer), any(p.requires_grad for p in layer.parameters()))
    return cost(
        _linears(lm, skip=layer),
        head,
        attention=_attention_width(config),
        layers=config.num_hidden_layers,
        visited=visited_share(config.to_dict()),
    )


def _attention_width(config: Any) -> float:
    """Heads times their size, of a mean layer: those of Gemma 4 differ."""
    if getattr(config, "is_heterogeneous", False):
        return math.fsum(map(_attention_width, config.per_layer_config)) / len(
            config.per_layer_config
        )
    heads = getattr(config, "num_attention_heads", 0)
    return float(heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)))


def flops_of(learner: Learner, rows: Rows, spared: float = 0.0) -> NDArray[np.float64] | None:
    """Return the FLOPs of each row, `[rows]`; None where the model hides its sizes.

    `spared`: share of the tokens that stands in beginnings which other rows have computed.
    """
    classifies = learner.labels is not None
    try:
        unit = cost_of(learner.model, has_vocabulary=not classifies).sparing(spared)
    except AttributeError:
        return None
    lengths = rows.lengths.astype(np.float64)
    is_causal = not classifies or pools_last(unwrap(learner.model))
    # Pairs of tokens of which one attends to the other.
    pairs = lengths * (lengths + 1) / 2 if is_causal else lengths**2
    flops: NDArray[np.float64] = unit.token * lengths + unit.pair * pairs
    return flops + unit.label * rows.trained_counts


def describe(
    learner: Learner,
    stated_peak: float | None,
    rows: Rows,
    device: torch.device,
    dtype: torch.dtype,
    spared: float = 0.0,
) -> dict[str, Any]:
    """Return device and dtype, and what report.json needs to speak of MFU, unless the model hides its sizes.

    That is the peak of the device, where `stated_peak` is the config's word on it, and FLOPs per token: a mean over an
    epoch with labels and attention shared out over all tokens.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    known = {
        "device": name,
        "device_bytes": device_bytes(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
    flops = flops_of(learner, rows, spared)
    if flops is None:
        return known
    peak, source = peak_of(device, dtype, stated_peak)
    return {
        **known,
        "flops_per_token": math.fsum(flops.tolist()) / max(1, int(rows.lengths.sum())),
        "peak_tflops": peak,
        "peak_source": source,
    }


def peak_of(device: torch.device, dtype: torch.dtype, stated: float | None) -> tuple[float, str]:
    """TFLOP/s that one device could do at best, and whose word that is: config, data sheet, or a measurement."""
    if stated is not None:
        return stated, "compute.peak_tflops"
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        known = stated_tflops(name)
        if known is not None:
            return known, f"stated for {name}"
    return _measured_peak(device, dtype)


def _measured_peak(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the TFLOP/s of the fastest bare matrix product here, and what was multiplied.

    The fastest, since whatever else the machine does only slows products down.
    """
    size = 8192 if device.type == "cuda" else 512
    left = torch.full((size, size), 0.5, dtype=dtype, device=device)
    right = left.clone()
    _ = left @ right  # the first one prepares the kernel
    durations: list[float] = []
    while len(durations) < 3 or math.fsum(durations) < 0.05:
        wait_for_device(device)
        began = time.perf_counter()
        _ = left @ right
        wait_for_device(device)
        durations.append(time.perf_counter() - began)
    kind = str(dtype).removeprefix("torch.")
    return 2 * size**3 / min(durations) / 1e12, f"measured: a {size} × {size} {kind} product"


def _linears(lm: nn.Module, skip: nn.Module | None) -> Iterator[Linear]:
    """Linear modules that each token meets."""
    for name, module in lm.named_modules():
        if module is skip or _is_head(name):
            continue
        if weights := _weights_of(module):
            yield Linear(
                name, weights, any(p.requires_grad for p in module.parameters(recurse=False))
            )
        elif is_expert(name):
            # All experts of a layer in one parameter: [experts, inputs, outputs].
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 3:
                    yield Linear(name, parameter.numel(), parameter.requires_grad)


def _weights_of(module: nn.Module) -> int:
    """Of a linear module of any make; quantised ones hold fewer numbers than they have weights."""
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    weight = getattr(module, "weight", None)
    if type(module).__name__.endswith(("Conv1D", "Router")) and isinstance(weight, torch.Tensor):
        return weight.numel()
    return 0


def _is_head(name: str) -> bool:
    """A classifier's own layers see one token of each sequence."""
    return any(
        part in ("score", "classifier", "pre_classifier", "pooler") for part in name.split(".")
    )
