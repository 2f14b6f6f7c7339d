"""torch's own kernel for packed batches, on CUDA: where it fits, and how it is called."""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from kubetune.kernels.attention.blockwise import Rule


@lru_cache(maxsize=1)
def _varlen_parameters() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def varlen_fits(q: Tensor, v: Tensor) -> bool:
    """torch's kernel wants half precision, one head size of at most 256, and a torch that can set window and scale."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    wanted = {"window_size", "scale", "enable_gqa", "return_aux"} <= _varlen_parameters()
    return half and wanted and q.shape[-1] == v.shape[-1] <= 256


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], rule: Rule
) -> Tensor:
    """Attention within each sequence, q `[tokens, heads, dim]` -> the same shape."""
    from torch.nn.attention.varlen import varlen_attn

    cu = on_device(cu_seqlens, q.device)
    back = rule.window - 1 if rule.window else -1
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu,
        cu,
        longest(cu_seqlens),
        longest(cu_seqlens),
        scale=rule.scale,
        window_size=(back, 0 if rule.causal else back),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


@lru_cache(maxsize=8)
def on_device(cu_seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    """`cu_seqlens` on a device, copied there once per packed batch, not once per layer."""
    return torch.tensor(cu_seqlens, dtype=torch.int32, device=device)


def longest(cu_seqlens: tuple[int, ...]) -> int:
    """Length of the longest sequence of a packed batch."""
    return max(stop - start for start, stop in pairwise(cu_seqlens))
