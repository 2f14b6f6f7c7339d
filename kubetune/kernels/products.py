"""Products of matrices in fp32 on CPUs, by the library that is faster there.

torch asks MKL, which on processors of other makers than Intel leaves AVX-512 unused; oneDNN, which torch brings too,
uses what it finds: on Zen 5 it multiplies twice as fast. Everything else is torch's own product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kubetune.base import allocator

LEAST = 2**22
"""Multiplications of a product that pay for oneDNN, which makes code for each new size in about a millisecond."""
LEAST_OF_MODULES = 2**27
"""The same of whole modules, whose rows are other in number in each micro-batch: few layers use a code again."""
STRIPE = 2048
"""Columns of a wide product at a time, which are in the cache when they are put in their place."""


def times(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x w + bias` of `x` `[rows, in]`, `w` `[in, out]` and `bias` `[out]`; for forwards and backwards written out:
    autograd sees nothing of it."""
    if not pays(x, w):
        return x @ w if bias is None else torch.addmm(bias, x, w)
    return _by_onednn(x, w, bias)


def add_times(total: Tensor | None, x: Tensor, w: Tensor) -> Tensor:
    """`x w`, added to `total` `[rows, out]` where there is one."""
    if total is None:
        return times(x, w)
    return total.add_(_by_onednn(x, w, None)) if pays(x, w) else total.addmm_(x, w)


def times_into(out: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """`x w`, written to `out` `[rows, out]`."""
    if not pays(x, w):
        return torch.mm(x, w, out=out)
    if not w.t().is_contiguous():
        return out.copy_(_by_onednn(x, w, None))
    for start in range(0, w.shape[1], STRIPE):
        span = slice(start, start + STRIPE)
        out[:, span] = _by_onednn(x, w[:, span], None)
    return out


@lru_cache(maxsize=1)
def is_mkl_narrow() -> bool:
    """Presence of AVX-512 that torch uses and MKL does not."""
    uses = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkl.is_available()
    return uses and hasattr(torch.ops.mkldnn, "_linear_pointwise") and allocator.is_mkl_narrow()


def pays(x: Tensor, w: Tensor) -> bool:
    """Test for products that are oneDNN's though torch's own would be MKL's."""
    if (
        x.device.type != "cpu"
        or not x.dtype == w.dtype == torch.float32
        or torch.compiler.is_compiling()
    ):
        return False
    return is_mkl_narrow() and len(x) * w.numel() >= LEAST


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, and its gradients: `x` `[…, in]`, `weight` `[out, in]`, `bias` `[out]`."""
    # What is compiled stays torch's own, and asks for no size.
    fits = (
        not torch.compiler.is_compiling()
        and x.dim() > 1
        and (bias is None or bias.dtype == x.dtype)
    )
    if fits and x.numel() * len(weight) >= LEAST_OF_MODULES and pays(x.flatten(0, -2), weight.t()):
        return cast(Tensor, _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x.flatten(0, -2), weight.t(), bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
        d_y = gradients[0].flatten(0, -2)
        d_x = times(d_y, weight).view(x.shape) if of_x else None
        d_weight = times(d_y.t(), x.flatten(0, -2)) if of_weight else None
        return d_x, d_weight, d_y.sum(0) if of_bias else None


def _by_onednn(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    turned = w.t()
    if not (w.is_contiguous() or turned.is_contiguous()):
        # For columns cut out of a matrix oneDNN has only a reference, a thousandth as fast.
        turned = turned.contiguous()
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, turned, bias, "none", [], ""))


if hasattr(torch.ops.mkldnn, "_linear_pointwise"):

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _flops(x: Sequence[int], w: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * x[0] * x[1] * w[0]
