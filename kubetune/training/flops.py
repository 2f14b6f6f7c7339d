"""How much of a device's speed a run makes use of: the FLOPs that training must do, against a peak that is named.

Per token, with N weights in frozen linear modules and P in trained ones:

    forward 2N + 2P · gradient of the inputs 2N + 2P · gradient of the weights 2P

so a frozen weight costs 4 FLOPs a token and a trained one 6: a figure of 6 for all would show LoRA as half as fast
again as it is. Attention costs 12·heads·head_dim for each pair of tokens and layer, of which causal attention has
L(L+1)/2 in a sequence. The head is needed where there is a label. Padding, recomputed activations, norms and the
optimizer are a trainer's own affair and not counted. Of experts only those that a token visits are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kubetune.config.schema import Config
from kubetune.data.prepared.rows import Rows
from kubetune.models.acceleration import device_bytes
from kubetune.models.classifier_pooling import pools_last
from kubetune.models.padding_free import unwrap
from kubetune.planning.gpu_specs import stated_tflops

_FROZEN, _TRAINED = 4, 6
_CPU_SIZE, _GPU_SIZE = 512, 8192
_REPEATS = 3


@dataclass(frozen=True)
class Cost:
    """FLOPs of forward and backward: for each token, each pair of tokens that attend, and each label."""

    token: float
    pair: float
    label: float


def cost_of(model: nn.Module, *, has_vocabulary: bool) -> Cost:
    """What training this model costs. `has_vocabulary`: its head is one, and computed where there is a label."""
    lm: Any = unwrap(model)
    config = lm.config.get_text_config()
    layer = lm.get_output_embeddings() if has_vocabulary else None
    token = sum(_flops(weights, is_trained) for weights, is_trained in _linears(lm, config, skip=layer))
    heads = getattr(config, "num_attention_heads", 0)
    size = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    pair = 12 * heads * size * config.num_hidden_layers
    label = 0.0
    if layer is not None:
        label = _flops(_weights_of(layer), any(p.requires_grad for p in layer.parameters()))
    return Cost(float(token), float(pair), float(label))


def flops_per_token(cost: Cost, rows: Rows, *, is_causal: bool) -> float:
    """Mean over an epoch of the data, labels and attention shared out over all tokens."""
    lengths = rows.lengths.astype("float64")
    pairs = float((lengths * (lengths + 1) / 2).sum() if is_causal else (lengths**2).sum())
    labels = float(rows.trained_counts.sum())
    return cost.token + (cost.pair * pairs + cost.label * labels) / max(1.0, float(lengths.sum()))


def describe(learner: Any, config: Config, rows: Rows, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Device and dtype, and what report.json needs to speak of MFU, unless the model hides its sizes: FLOPs per token
    and the peak."""
    classifies = config.task == "sequence_classification"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    known = {"device": name, "device_bytes": device_bytes(device), "dtype": str(dtype).removeprefix("torch.")}
    try:
        cost = cost_of(learner.model, has_vocabulary=not classifies)
    except AttributeError:
        return known
    is_causal = not classifies or pools_last(unwrap(learner.model))
    peak, source = peak_of(device, dtype, config.compute.peak_tflops)
    return {
        **known,
        "flops_per_token": flops_per_token(cost, rows, is_causal=is_causal),
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
    return measured(device, dtype)


def measured(device: torch.device, dtype: torch.dtype, size: int | None = None) -> tuple[float, str]:
    """TFLOP/s of the fastest of a few bare matrix products, and what was multiplied: squares of `size`."""
    size = size or (_GPU_SIZE if device.type == "cuda" else _CPU_SIZE)
    left = torch.full((size, size), 0.5, dtype=dtype, device=device)
    right, best = left.clone(), math.inf
    for _ in range(_REPEATS + 1):
        _wait(device)
        began = time.perf_counter()
        left @ right
        _wait(device)
        best = min(best, time.perf_counter() - began)
    kind = str(dtype).removeprefix("torch.")
    return 2 * size**3 / best / 1e12, f"measured: a product of {size} × {size} in {kind}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flops(weights: float, is_trained: bool) -> float:
    return (_TRAINED if is_trained else _FROZEN) * weights


def _linears(lm: nn.Module, config: Any, skip: nn.Module | None) -> Iterator[tuple[float, bool]]:
    """Weights that each token meets in a linear module, and whether they are trained."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    visited = (getattr(config, "num_experts_per_tok", None) or 1) / experts
    for name, module in lm.named_modules():
        is_expert = "experts" in name.split(".") and "shared" not in name
        if module is skip or _is_head(name):
            continue
        if weights := _weights_of(module):
            trained = any(p.requires_grad for p in module.parameters(recurse=False))
            yield weights * (visited if is_expert else 1), trained
        elif is_expert:
            # All experts of a layer in one parameter: [experts, inputs, outputs].
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 3:
                    yield parameter.numel() * visited, parameter.requires_grad


def _weights_of(module: nn.Module) -> int:
    """Of a linear module of any make; quantised ones hold fewer numbers than they have weights."""
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, torch.Tensor):
        return weight.numel()
    return 0


def _is_head(name: str) -> bool:
    """A classifier's own layers see one token of each sequence."""
    return any(part in ("score", "classifier", "pre_classifier", "pooler") for part in name.split("."))
