"""torch's own kernel for packed batches, on CUDA: when it can be used, and how it is called."""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from kubetune.kernels.attention.blockwise import Rule


@lru_cache(maxsize=1)
def _varlen_parameters() -> frozenset[str]:
    """Return what can be set of the kernel; nothing if this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def varlen_fits(q: Tensor, v: Tensor) -> bool:
    """True if torch's kernel can run this: half precision, one head size of at most 256, and a torch that is new enough."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return False
    if q.shape[-1] != v.shape[-1] or v.shape[-1] > 256:
        return False
    # Earlier versions of torch had the kernel without these.
    return {"window_size", "scale", "enable_gqa", "return_aux"} <= _varlen_parameters()


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[int, ...],
    rule: Rule,
) -> Tensor:
    """Return the attention within each sequence. q is `[tokens, heads, dim]`, and so is the result."""
    from torch.nn.attention.varlen import varlen_attn

    cu = on_device(cu_seqlens, q.device)
    length = longest(cu_seqlens)
    # The kernel counts neighbours, without the query itself: our window of 3 is 2 before it. -1 is all of them.
    before = rule.window - 1 if rule.window else -1
    behind = 0 if rule.causal else before

    # Queries and keys are of the same sequences, so bounds and lengths are given twice.
    output = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu,
        cu,
        length,
        length,
        scale=rule.scale,
        window_size=(before, behind),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(output, Tensor), "it returns a pair only if log-sum-exps are asked for"
    return output


@lru_cache(maxsize=8)
def on_device(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `cu_seqlens` on a device, copied there once per packed batch, not once per layer."""
    return torch.tensor(cu_seqlens, dtype=torch.int32, device=device)


def longest(cu_seqlens: tuple[int, ...]) -> int:
    """Return the length of the longest sequence of a packed batch."""
    return max(stop - start for start, stop in pairwise(cu_seqlens))
