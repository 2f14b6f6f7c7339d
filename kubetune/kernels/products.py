"""Products of matrices in fp32 on CPUs, by the library that is faster there.

torch asks MKL, which on processors of other makers than Intel leaves AVX-512 unused; oneDNN, which torch brings too,
uses what it finds: on Zen 5 it multiplies twice as fast. Everything else is torch's own product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kubetune.base import allocator

LEAST = 2**22
"""Multiplications of a product that pay for oneDNN, which makes code for each new size in about a millisecond."""
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
    if x.device.type != "cpu" or not x.dtype == w.dtype == torch.float32 or torch.compiler.is_compiling():
        return False
    return is_mkl_narrow() and len(x) * w.numel() >= LEAST


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
