"""Functions that keep the sequences of a packed batch apart, beside transformers' own of one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from kubetune.kernels.delta_rule import chunks_of, delta_rule
from kubetune.kernels.short_convolution import short_convolution
from tests.run.test_recurrences import Doubled

CU_SEQLENS = tuple(accumulate((37, 5, 1, 70, 2, 64), initial=0))


def require_near(inputs: Sequence[Tensor], own: Callable[..., Tensor], alone: Callable[..., Tensor]) -> None:
    """Output and gradients are as near to those in float64 as the ones of the sequences one by one."""

    def all_of(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        given = [each.detach().to(dtype).requires_grad_() for each in inputs]
        found = function(*given)
        weights = torch.linspace(-1, 1, found.numel(), dtype=dtype).view_as(found)
        return [each.detach() for each in (found, *torch.autograd.grad(found, given, weights))]

    with Doubled():
        truths = all_of(alone, torch.float64)
    for ours, other, truth in zip(all_of(own, torch.float32), all_of(alone, torch.float32), truths, strict=True):
        assert ours.dtype == other.dtype
        off, other_off = (float((each.double() - truth).norm()) for each in (ours, other))
        assert off <= 1.25 * other_off + 1e-7 * float(truth.norm())


@pytest.mark.parametrize(("key_heads", "size", "most"), [(2, 32, 1.0), (4, 16, 2.0)])
def test_the_delta_rule_starts_anew_at_each_sequence(key_heads: int, size: int, most: float) -> None:
    torch.manual_seed(0)
    total = CU_SEQLENS[-1]
    q, k = (torch.randn(total, key_heads, 16) for _ in range(2))
    v, decay, rate = torch.randn(total, 4, 24), -3 * F.softplus(torch.randn(total, 4)), most * torch.rand(total, 4)

    def alone(*inputs: Tensor) -> Tensor:
        parts = [[each[None, start:stop] for each in inputs] for start, stop in pairwise(CU_SEQLENS)]
        rule = theirs.torch_chunk_gated_delta_rule
        return torch.cat([rule(*part, use_qk_l2norm_in_kernel=True)[0][0] for part in parts])

    require_near((q, k, v, decay, rate), lambda *each: delta_rule(*each, chunks_of(CU_SEQLENS, size, q.device)), alone)


@pytest.mark.parametrize("silu", [False, True])
def test_a_short_convolution_sees_its_own_sequence_alone(silu: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in ((CU_SEQLENS[-1], 12), (12, 4), (12,))]

    def alone(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts = [x[None, start:stop].mT for start, stop in pairwise(CU_SEQLENS)]
        activation = "silu" if silu else None
        return torch.cat([theirs.causal_conv1d_fn(part, weight, bias, activation=activation)[0].t() for part in parts])

    require_near(inputs, lambda *each: short_convolution(*each, CU_SEQLENS, silu=silu), alone)


@pytest.mark.parametrize("key_heads", [2, 4])
def test_float32_is_rounded_as_where_sequences_are_alone(key_heads: int) -> None:
    """Models make what kernels round otherwise tenfold; so a packed batch must not round otherwise."""
    torch.manual_seed(0)
    widths, total = [key_heads * 16, key_heads * 16, 64], CU_SEQLENS[-1]
    x, weight = torch.randn(total, sum(widths)), torch.randn(sum(widths), 4)
    decay, rate = -3 * F.softplus(torch.randn(total, 4)), 2 * torch.rand(total, 4)

    def heads(filtered: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (-1, 16)) for part in filtered.split(widths, -1)]

    found = short_convolution(x, weight, None, CU_SEQLENS, silu=True)
    packed = delta_rule(*heads(found), decay, rate, chunks_of(CU_SEQLENS, 64, x.device))
    for start, stop in pairwise(CU_SEQLENS):
        alone = theirs.causal_conv1d_fn(x[None, start:stop].mT, weight, activation="silu").mT
        numbers = {"g": decay[None, start:stop], "beta": rate[None, start:stop]}
        made = theirs.torch_chunk_gated_delta_rule(*heads(alone), **numbers, use_qk_l2norm_in_kernel=True)[0][0]
        for ours, other in ((found[start:stop], alone[0]), (packed[start:stop], made)):
            assert float((ours - other).norm()) <= 2e-8 * float(other.norm())
