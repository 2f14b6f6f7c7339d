"""Frozen linear layers with LoRA adapters, forward and backward written out; those that share their input as one.

Adapters are kept in fp32, the arithmetic is in the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from kubetune.kernels.cross_entropy import GradientSum
from kubetune.kernels.dropout import draw, numbers
from kubetune.kernels.products import add_times, times


class Rounded(NamedTuple):
    """Adapters of layers side by side in the dtype of the arithmetic, `down` `[all ranks, in]` and `ups`
    `[out, rank]`, which an optimizer keeps equal to theirs, and its `sums` of the gradients of each A and B."""

    down: Tensor
    ups: tuple[Tensor, ...]
    sums: tuple[GradientSum, ...]


class Adapters(NamedTuple):
    """LoRA adapters of some layers besides their weights. `dropout`: the probability, of their input."""

    scaling: float
    dropout: float = 0.0
    layers: int = 1
    rounded: Rounded | None = None


class Layer(NamedTuple):
    """A frozen linear layer as its product takes it, with its adapter's `a` `[rank, in]` and `b` `[out, rank]`."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    frozen: tuple[Tensor, ...]


def lora_forward(
    ctx: Any, product: Callable[..., Tensor], x: Tensor, adapters: Adapters, *flat: Tensor | None
) -> tuple[Tensor, ...]:
    """`product(x, bias, *frozen) + s (x Aᵀ) Bᵀ` of each layer, all `x Aᵀ` being one product.

    Kept for the backward: x, x Aᵀ and what dropout has kept of the x before Aᵀ, in a byte each.
    """
    rows = x.reshape(-1, x.shape[-1])
    layers = list(_layers(flat, adapters.layers))
    if adapters.rounded is None or adapters.rounded.down.dtype != x.dtype:
        wide = layers[0].a if len(layers) == 1 else torch.cat([layer.a for layer in layers])
        down, ups = wide.to(x.dtype), tuple(layer.b.to(x.dtype) for layer in layers)
        ctx.sums = None
    else:
        down, ups, ctx.sums = adapters.rounded
    kept, scale = None, adapters.scaling
    if adapters.dropout:
        kept, growth = draw(rows, adapters.dropout)
        scale *= growth
    low = (down @ (rows if kept is None else rows * numbers(kept, rows.dtype)).t()).t()
    ctx.spans = [
        slice(*span) for span in pairwise(accumulate((len(layer.a) for layer in layers), initial=0))
    ]
    outputs = []
    for layer, up, span in zip(layers, ups, ctx.spans, strict=True):
        y = product(rows, layer.bias, *layer.frozen).addmm_(low[:, span], up.t(), alpha=scale)
        outputs.append(y.view(*x.shape[:-1], y.shape[-1]))
    ctx.save_for_backward(
        rows, low, down, kept, *ups, *(tensor for layer in layers for tensor in layer.frozen)
    )
    ctx.scale, ctx.shape = scale, x.shape
    ctx.set_materialize_grads(False)
    return tuple(outputs)


def lora_backward(
    ctx: Any, product: Callable[..., Tensor], grads: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """Gradients of what `lora_forward` was given from x on. `product(total, d_y, *frozen)`: that of x without the
    adapter, added to the total of layers before unless that is None.

    With s the scale and D what dropout kept, y = x Wᵀ + s (x∘D) Aᵀ Bᵀ, so that
        dx = dy W + s (dy B) A ∘ D        dA = s (dy B)ᵀ (x∘D)        dB = s dyᵀ ((x∘D) Aᵀ)
    `dy B` is made once, for both dx and dA, of all layers together; it and dB are made lying, `[r, tokens]` and
    `[r, out]`: MKL takes 2 to 7 times as long for products of 8 columns as of 8 rows. `x∘D` is made anew, which costs
    less than keeping it. W is frozen and has no gradient; dx is left out where nothing below is trained, as in a first
    layer. Sums over tokens in dA and dB are fp32 only after the product: that is what the matrix unit adds up in
    anyway. Where an optimizer keeps sums of them, they are added there at once.
    """
    rows, low, down, kept, *others = ctx.saved_tensors
    number = len(ctx.spans)
    ups, frozen = others[:number], others[number:]
    width = len(frozen) // number
    d_x, d_lows, d_bs = None, list[Tensor](), list[Tensor | None]()
    for i, (grad, up, span) in enumerate(zip(grads, ups, ctx.spans, strict=True)):
        if grad is None:
            d_lows.append(torch.zeros_like(low[:, span]).t())
            d_bs.append(None)
            continue
        d_y = grad.reshape(-1, grad.shape[-1])
        d_lows.append(up.t() @ d_y.t())
        d_bs.append((low[:, span].t() @ d_y).t())
        if ctx.needs_input_grad[0]:
            d_x = product(d_x, d_y, *frozen[i * width : (i + 1) * width])
    d_low = d_lows[0] if number == 1 else torch.cat(d_lows)
    if d_x is not None:
        if kept is None:
            d_x.addmm_(d_low.t(), down, alpha=ctx.scale)
        else:
            d_x.add_((d_low.t() @ down).mul_(numbers(kept, d_y.dtype)), alpha=ctx.scale)
        d_x = d_x.view(ctx.shape)
    d_down = d_low @ (rows if kept is None else rows * numbers(kept, rows.dtype))
    found: list[Tensor | None] = []
    for i, (d_b, span) in enumerate(zip(d_bs, ctx.spans, strict=True)):
        found += [
            *(_summed(ctx, 2 * i + j, d) for j, d in enumerate((d_down[span], d_b))),
            *(None,) * (1 + width),
        ]
    return d_x, None, *found


def _summed(ctx: Any, number: int, gradient: Tensor | None) -> Tensor | None:
    if gradient is None or ctx.sums is None:
        return None if gradient is None else gradient.float().mul_(ctx.scale)
    ctx.sums[number].opened().add_(gradient, alpha=ctx.scale)
    return None


def _layers(flat: Sequence[Any], number: int) -> Iterator[Layer]:
    width = len(flat) // number
    for start in range(0, len(flat), width):
        a, b, bias, *frozen = flat[start : start + width]
        yield Layer(a, b, bias, tuple(frozen))


def flattened(layers: Sequence[Layer]) -> Iterator[Tensor | None]:
    """Layers as a function of autograd takes them: tensor by tensor."""
    for layer in layers:
        yield from (layer.a, layer.b, layer.bias, *layer.frozen)


def _times(rows: Tensor, bias: Tensor | None, w: Tensor) -> Tensor:
    return times(rows, w, bias)


def _times_transposed(total: Tensor | None, d_y: Tensor, w: Tensor) -> Tensor:
    return add_times(total, d_y, w.t())


class _LoraLinears(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, adapters: Adapters, *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        return lora_forward(ctx, _times, x, adapters, *flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return lora_backward(ctx, _times_transposed, grads)


def lora_linears(x: Tensor, layers: Sequence[Layer], adapters: Adapters) -> tuple[Tensor, ...]:
    """Outputs of frozen linear layers with their adapters for the same input. Dropout is drawn once for all of them;
    of each, `frozen` is its weight `[in, out]`."""
    found = _LoraLinears.apply(x, adapters, *flattened(layers))  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], found)
