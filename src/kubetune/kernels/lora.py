"""Frozen linear layers with LoRA adapters, forward and backward written out; those that share their input as one.

Adapters are kept in fp32, the arithmetic is in the dtype of the input. Example: q, k and v with adapters of rank 2, for
5 tokens of 8 numbers. The A matrices see the same input, so they are stacked and multiplied once:

    down = [A_q; A_k; A_v]   [6, 8]    rows 0:2 are A_q, 2:4 A_k, 4:6 A_v
    low  = x downᵀ           [5, 6]    columns 0:2 are x A_qᵀ, 2:4 x A_kᵀ, 4:6 x A_vᵀ
    y_q  = x W_q + s low[:, 0:2] B_qᵀ, and so for k and v

and in the backward, where `d_low` lies as `[6, 5]`:

    d_low  = [B_qᵀ dy_qᵀ; B_kᵀ dy_kᵀ; B_vᵀ dy_vᵀ]
    d_down = s d_low x       [6, 8]    rows 0:2 are dA_q, 2:4 dA_k, 4:6 dA_v
    dx     = dy_q W_qᵀ + dy_k W_kᵀ + dy_v W_vᵀ + s d_lowᵀ down
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from kubetune.kernels.cross_entropy import GradientSum
from kubetune.kernels.dropout import draw, numbers


class AdapterCopies(NamedTuple):
    """Adapters of layers with the same input, in the dtype of the arithmetic; an optimizer keeps them up to date."""

    down: Tensor  # [all ranks, in] the A of each layer, below each other
    ups: tuple[Tensor, ...]  # the B of each layer, [out, rank]
    sums: tuple[GradientSum, ...] = ()  # the optimizer's, of A and B of each layer in turn


class Adapters(NamedTuple):
    """Everything that the adapters of layers with the same input have in common."""

    scaling: float
    dropout: float = 0.0  # probability, of the adapters' input
    layers: int = 1  # number of layers
    copies: AdapterCopies | None = None


class Layer(NamedTuple):
    """A frozen linear layer with its adapter."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    bias: Tensor | None  # [out]
    frozen: tuple[Tensor, ...]  # the weight, as the layer's product takes it


def lora_forward(
    ctx: Any,
    product: Callable[..., Tensor],
    x: Tensor,
    adapters: Adapters,
    *flat: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return `product(x, bias, *frozen) + s (x Aᵀ) Bᵀ` of each layer.

    Kept for the backward: x, x Aᵀ and which numbers of x dropout has kept in front of Aᵀ, in a byte each.
    """
    rows = x.reshape(-1, x.shape[-1])  # [tokens, in]
    layers = list(_layers(flat, adapters.layers))

    # 1. The adapters in the dtype of x: the optimizer's copies, or new ones.
    copies = adapters.copies
    if copies is None or copies.down.dtype != x.dtype:
        copies = _copy(layers, x.dtype)

    # Dropout's 1 / (1 - p) is a number for all, so it goes into the scale and not into each input.
    scale = adapters.scaling
    mask = None
    if adapters.dropout:
        mask, growth = draw(rows, adapters.dropout)
        scale *= growth

    # 2. x Aᵀ of all layers in one product, made lying and turned (see `lora_backward`).
    low = (copies.down @ _masked(rows, mask).t()).t()

    # 3. The frozen product of each layer, with the adapter's part added to it in place.
    ctx.ranks = []  # columns of `low` of each layer
    outputs = []
    first = 0
    for layer, up in zip(layers, copies.ups, strict=True):
        ranks = slice(first, first + len(layer.a))
        first = ranks.stop
        ctx.ranks.append(ranks)
        y = product(rows, layer.bias, *layer.frozen).addmm_(low[:, ranks], up.t(), alpha=scale)
        outputs.append(y.view(*x.shape[:-1], y.shape[-1]))

    # 4. Kept for the backward. An output that nobody uses gets no gradient of zeros (`grad is None` there).
    frozen = [tensor for layer in layers for tensor in layer.frozen]
    ctx.save_for_backward(rows, low, copies.down, mask, *copies.ups, *frozen)
    ctx.scale = scale
    ctx.shape = x.shape
    ctx.sums = copies.sums
    ctx.set_materialize_grads(False)
    return tuple(outputs)


def _copy(layers: Sequence[Layer], dtype: torch.dtype) -> AdapterCopies:
    """Return copies for one forward, of adapters that no optimizer copies."""
    # One layer needs no stacking, which would be a copy.
    if len(layers) == 1:
        down = layers[0].a
    else:
        down = torch.cat([layer.a for layer in layers])
    ups = tuple(layer.b.to(dtype) for layer in layers)
    return AdapterCopies(down.to(dtype), ups)


def _masked(rows: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return rows
    return rows * numbers(mask, rows.dtype)


def lora_backward(
    ctx: Any,
    product: Callable[..., Tensor],
    grads: Sequence[Tensor | None],
) -> tuple[Any, ...]:
    """Return the gradients of the arguments of `lora_forward`, from x on.

    `product(total, d_y, *frozen)` is the gradient of x without the adapter, added to `total` unless that is None.
    With s the scale and D the mask of dropout, y = x Wᵀ + s (x∘D) Aᵀ Bᵀ, so that
        dx = dy W + s (dy B) A ∘ D        dA = s (dy B)ᵀ (x∘D)        dB = s dyᵀ ((x∘D) Aᵀ)
    """
    # `dy B` is made once, for both dx and dA. It and dB are made lying, `[rank, tokens]` and `[rank, out]`: products of
    # 8 columns take CPUs 2 to 7 times as long as those of 8 rows. x∘D is made again, which costs less than keeping it.
    # W is frozen. dx is left out if nothing below is trained, as in a first layer. Sums over tokens are rounded to
    # the dtype of the arithmetic: matrix units add up in fp32 anyway.
    rows, low, down, mask, *others = ctx.saved_tensors

    # The rest is [B of each layer | frozen tensors of the first layer, of the second, …], as the forward saved them.
    number_of_layers = len(ctx.ranks)
    ups = others[:number_of_layers]
    frozen = others[number_of_layers:]
    width = len(frozen) // number_of_layers  # tensors of each frozen weight

    # 1. For each layer, `dy B` and dB, and its frozen part of dx.
    d_x = None
    d_lows = []
    d_bs: list[Tensor | None] = []
    for number, ranks in enumerate(ctx.ranks):
        grad = grads[number]
        if grad is None:  # nobody used the output
            d_lows.append(torch.zeros_like(low[:, ranks]).t())
            d_bs.append(None)
            continue
        d_y = grad.reshape(-1, grad.shape[-1])
        d_lows.append(ups[number].t() @ d_y.t())
        d_bs.append((low[:, ranks].t() @ d_y).t())
        if ctx.needs_input_grad[0]:
            d_x = product(d_x, d_y, *frozen[number * width : (number + 1) * width])

    # 2. For all layers together, the adapters' part of dx, and dA.
    d_low = d_lows[0] if number_of_layers == 1 else torch.cat(d_lows)
    if d_x is not None:
        d_x = _with_adapters(d_x, d_low, down, mask, ctx.scale).view(ctx.shape)
    d_down = d_low @ _masked(rows, mask)

    # 3. In the order of the arguments: a, b, bias and the frozen tensors of each layer.
    no_gradients = [None] * (1 + width)  # of bias and frozen weight
    gradients = []
    for number, ranks in enumerate(ctx.ranks):
        d_a = _summed(ctx, 2 * number, d_down[ranks])
        d_b = _summed(ctx, 2 * number + 1, d_bs[number])
        gradients += [d_a, d_b, *no_gradients]

    return d_x, None, *gradients


def _with_adapters(
    d_x: Tensor,
    d_low: Tensor,
    down: Tensor,
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Add to the gradient of x, in place, what comes through the adapters."""
    if mask is None:
        return d_x.addmm_(d_low.t(), down, alpha=scale)
    # The same numbers that the forward dropped get no gradient.
    of_adapters = (d_low.t() @ down).mul_(numbers(mask, d_low.dtype))
    return d_x.add_(of_adapters, alpha=scale)


def _summed(ctx: Any, number: int, gradient: Tensor | None) -> Tensor | None:
    """Return a gradient in fp32, or add it to the optimizer's sum and return None."""
    if gradient is None:
        return None
    if not ctx.sums:
        return gradient.float().mul_(ctx.scale)
    # Added to the optimizer's sum: autograd would make a tensor for each micro-batch, and add that.
    ctx.sums[number].opened().add_(gradient, alpha=ctx.scale)
    return None


def _layers(flat: Sequence[Any], number: int) -> Iterator[Layer]:
    width = len(flat) // number
    # All layers of one call have as many tensors, since they are of one kind.
    for start in range(0, len(flat), width):
        a, b, bias, *frozen = flat[start : start + width]
        yield Layer(a, b, bias, tuple(frozen))


def flattened(layers: Sequence[Layer]) -> Iterator[Tensor | None]:
    """Yield the tensors of layers one by one, as a function of autograd takes them."""
    for layer in layers:
        yield from (layer.a, layer.b, layer.bias, *layer.frozen)


def _times(rows: Tensor, bias: Tensor | None, w: Tensor) -> Tensor:
    if bias is None:
        return rows @ w
    return torch.addmm(bias, rows, w)


def _times_transposed(
    total: Tensor | None,
    d_y: Tensor,
    w: Tensor,
) -> Tensor:
    if total is None:
        return d_y @ w.t()
    return total.addmm_(d_y, w.t())


class _LoraLinears(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        adapters: Adapters,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        return lora_forward(ctx, _times, x, adapters, *flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return lora_backward(ctx, _times_transposed, grads)


def lora_linears(
    x: Tensor,
    layers: Sequence[Layer],
    adapters: Adapters,
) -> tuple[Tensor, ...]:
    """Return the outputs of frozen linear layers with their adapters, for the same input.

    Dropout is drawn once for all of them. `frozen` of a layer is its weight `[in, out]`.
    """
    outputs = _LoraLinears.apply(x, adapters, *flattened(layers))  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], outputs)
