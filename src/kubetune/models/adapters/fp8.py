"""Frozen linear layers computed in 8-bit floats: `training.fp8`. Twice the arithmetic of bf16 on GPUs that have it.

Each row of a factor is scaled by its own largest value (arXiv 2209.05433 has the format), to 448, the largest e4m3:

    row of x              0.5   -2.0    1.0         largest 2.0, scale 2.0 / 448
    rounded, 8 bits       112   -448    224
    the product with w    (112 w₀ - 448 w₁ + 224 w₂) × scale of x × scale of w

The base is rounded once and kept in both orders, by rows for the forward and by columns for the backward, in the memory
that bf16 took. Adapters stay as they are. Checkpoints hold adapters only, so nothing rounded is ever saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from kubetune import errors
from kubetune.base import logs
from kubetune.kernels import lora, pointwise
from kubetune.kernels.pointwise import Kernels
from kubetune.models.adapters.shared_input import (
    SharedInput,
    arguments,
    is_plain_lora,
    is_transposed,
    shared_inputs,
)

# torch's product of 8-bit floats. None if this version of torch has it no more: then the product is in bf16.
SCALED_MM: Any = getattr(torch, "_scaled_mm", None)
GRANULE: Final = 16  # the product wants both widths of a layer to be multiples of this
LARGEST_LOSS_CHANGE: Final = 0.01  # share by which rounding may change the loss of the first batch


def adopt(
    model: nn.Module,
    kernels: Kernels,
    device: torch.device,
    loss_ahead: Callable[[], float],
) -> None:
    """Compute frozen layers in 8-bit floats from now on, if that hardly changes the loss of the first batch.

    Raise ConfigError if it does not, if the GPU cannot, and if no layer can.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise errors.ConfigError(
            f"training.fp8: {name} has no 8-bit floats (Ada, Hopper and later do); leave it out"
        )

    # The check compares the same batch before and after: what rounding does to a model shows only on the model.
    exact = loss_ahead()
    layers = round_layers(model, kernels)
    if not layers:
        raise errors.ConfigError(
            f"training.fp8: no adapted layer has widths that are multiples of {GRANULE}; leave it out"
        )

    rounded = loss_ahead()
    change = abs(rounded - exact) / max(abs(exact), 1e-12)
    logs.MODEL.info(
        "%d layers compute in 8-bit floats, loss of the first batch %.4f → %.4f",
        layers,
        exact,
        rounded,
    )
    # `not (<=)` instead of `>`: NaN must refuse too.
    if not change <= LARGEST_LOSS_CHANGE:
        raise errors.ConfigError(
            f"training.fp8 changes the loss of the first batch from {exact:.4f} to {rounded:.4f}, by {change:.1%}; "
            f"{LARGEST_LOSS_CHANGE:.0%} is allowed. This model does not stand the rounding: leave it out"
        )


def round_layers(model: nn.Module, kernels: Kernels) -> int:
    """Round the frozen weights under plain adapters. Return the number of layers that were rounded."""
    layers: list[Any] = []
    for module in model.modules():
        if is_plain_lora(module) and _fits(module):
            layers.append(module)
    for layer in layers:
        _round(layer)
        layer.forward = partial(_forward, layer, kernels)

    # Layers with the same input stay together if all of them were rounded. The others are each computed separately.
    for shared in shared_inputs(layers):
        if not all(hasattr(layer.base_layer, "row_scales") for layer in shared.layers):
            for layer in shared.layers:
                if layer in layers:
                    layer.shared_input = SharedInput((layer,))

    for layer in layers:
        if not hasattr(layer, "shared_input"):
            layer.shared_input = SharedInput((layer,))
        layer.shared_input.compute = partial(_compute, kernels)

    return len(layers)


def _fits(layer: Any) -> bool:
    weight = layer.base_layer.weight
    if is_transposed(layer) or weight.dim() != 2:
        return False
    return all(size % GRANULE == 0 for size in weight.shape)


def _round(layer: Any) -> None:
    base = layer.base_layer
    weight = base.weight.data  # [out, in]

    # Both orders are rounded from the exact weight: rounding one out of the other would round twice.
    rows, row_scales = pointwise.round_rows(weight)
    columns, column_scales = pointwise.round_rows(weight.t().contiguous())
    # Buffers move with the model, and are not saved.
    base.weight = nn.Parameter(rows, requires_grad=False)
    base.register_buffer("row_scales", row_scales, persistent=False)
    base.register_buffer("columns", columns, persistent=False)
    base.register_buffer("column_scales", column_scales, persistent=False)


def _forward(layer: Any, kernels: Kernels, x: Tensor) -> Tensor:
    if layer.disable_adapters or layer.merged:
        raise RuntimeError("a base in 8-bit floats works only with its adapter")
    if torch.compiler.is_compiling():
        return _compute(kernels, [layer], x, None)[0]
    return cast(SharedInput, layer.shared_input).forward(layer, x)


def _compute(
    kernels: Kernels,
    layers: Sequence[Any],
    x: Tensor,
    copies: lora.AdapterCopies | None,
) -> tuple[Tensor, ...]:
    # `_Products` takes the first two of each layer, and `_times_transposed` the last two.
    bases = [layer.base_layer for layer in layers]
    frozen = [(base.weight, base.row_scales, base.columns, base.column_scales) for base in bases]
    plain_layers, settings = arguments(layers, frozen, copies)
    out = _Fp8LoraLinears.apply(x, settings, kernels, *lora.flattened(plain_layers))  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], out)


def _product(
    rounded: Tensor,
    row_scales: Tensor,
    columns: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return `x @ columnsᵀ` of rounded `x` `[rows, inner]` and `columns` `[outer, inner]`.

    `row_scales` and `scales` are the scales of their rows.
    """
    if SCALED_MM is not None:
        product = SCALED_MM(
            rounded,
            columns.t(),
            row_scales,
            scales.t(),
            out_dtype=torch.bfloat16,
        )
    else:
        # Without torch's kernel: the same numbers, multiplied in bf16 and scaled afterwards.
        plain = rounded.to(torch.bfloat16) @ columns.t().to(torch.bfloat16)
        product = plain.float() * row_scales * scales.t()
    return cast(Tensor, product.to(dtype))


class _Products:
    """Products of layers with the same input, which the first of them rounds for all."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.rounded: tuple[Tensor, Tensor] | None = None  # the input, and scales of its rows

    def __call__(
        self,
        rows: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        row_scales: Tensor,
        *columns: Tensor,
    ) -> Tensor:
        # q, k and v get the same rows: rounding them once spares two passes over them.
        if self.rounded is None:
            self.rounded = self.kernels["round_rows"](rows)
        rounded, scales = self.rounded
        y = _product(rounded, scales, weight, row_scales, rows.dtype)
        if bias is None:
            return y
        return y.add_(bias)


def _times_transposed(
    kernels: Kernels,
    total: Tensor | None,
    d_y: Tensor,
    weight: Tensor,
    row_scales: Tensor,
    columns: Tensor,
    column_scales: Tensor,
) -> Tensor:
    # dx = dy W: the sum runs over W's outputs, so W is needed by columns, each with a scale of its own.
    rounded, scales = kernels["round_rows"](d_y)
    product = _product(rounded, scales, columns, column_scales, d_y.dtype)
    if total is None:
        return product
    return total.add_(product)


class _Fp8LoraLinears(Function):
    """As in kernels/lora.py, with frozen weights rounded in both orders."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        settings: lora.Adapters,
        kernels: Kernels,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.kernels = kernels
        return lora.lora_forward(ctx, _Products(kernels), x, settings, *flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        d_x, d_settings, *others = lora.lora_backward(
            ctx, partial(_times_transposed, ctx.kernels), grads
        )
        # `kernels` is between the settings and the layers.
        return d_x, d_settings, None, *others
