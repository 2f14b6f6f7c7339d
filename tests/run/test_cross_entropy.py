"""The fused cross-entropy against the plain one: value and every gradient, in chunks, for heads of every kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kubetune.kernels import cross_entropy, pointwise
from kubetune.kernels.cross_entropy import Head, LogitRule, linear_cross_entropy
from kubetune.kernels.log_probabilities import linear_log_probabilities
from kubetune.kernels.pointwise import Kernels
from kubetune.training.optimizer.adam_step import AdamSettings
from kubetune.training.optimizer.adamw import Collected, FlatAdamW

LABELS, HIDDEN, VOCABULARY, SCALE = 37, 16, 53, 0.25


class Toy(nn.Module):
    """Inputs that can be trained, and a head."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.hidden = nn.Parameter(torch.randn(LABELS, HIDDEN, generator=generator))
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, generator=generator))
        self.bias = nn.Parameter(torch.randn(VOCABULARY, generator=generator))
        self.sums: dict[nn.Parameter, Collected] = {}
        self.labels = torch.randint(VOCABULARY, (LABELS,), generator=generator)

    def head(self, rule: LogitRule) -> Head:
        sums = (self.sums.get(self.weight), self.sums.get(self.bias))
        return Head(self.weight, self.bias, rule, Kernels(), *sums)

    def fused(self, rule: LogitRule) -> Tensor:
        return linear_cross_entropy(self.hidden, self.labels, self.head(rule), SCALE)

    def logits(self, rule: LogitRule) -> Tensor:
        logits = (
            F.linear(self.hidden.float(), self.weight.float(), self.bias.float()) * rule.multiplier
        )
        return torch.tanh(logits / rule.cap) * rule.cap if rule.cap else logits

    def plain(self, rule: LogitRule) -> Tensor:
        return F.cross_entropy(self.logits(rule), self.labels, reduction="sum") * SCALE


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda *_: 5)


@pytest.mark.parametrize(
    "rule", [LogitRule(), LogitRule(multiplier=0.3), LogitRule(multiplier=2.0, cap=4.0)]
)
@pytest.mark.parametrize("collecting", [False, True], ids=["alone", "with-optimizer"])
def test_equal_to_plain_cross_entropy(rule: LogitRule, collecting: bool) -> None:
    expected = Toy()
    toy = Toy()
    optimizer = FlatAdamW(toy.named_parameters(), AdamSettings()) if collecting else None
    toy.sums = optimizer.collected if optimizer else {}
    for _ in range(2):  # gradients of several micro-batches add up
        plain = expected.plain(rule)
        fused = toy.fused(rule)
        plain.backward()
        fused.backward()
        assert fused.item() == pytest.approx(plain.item(), rel=1e-6)
    for name, parameter in toy.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected.get_parameter(name).grad, rtol=1e-5, atol=1e-6
        )
    if optimizer is not None:
        assert float(optimizer.gradient.norm()) > 0


def test_a_loss_without_gradient_adds_none_to_the_sums_of_an_optimizer() -> None:
    toy = Toy()
    optimizer = FlatAdamW(toy.named_parameters(), AdamSettings())
    toy.sums = optimizer.collected
    with torch.no_grad():
        toy.fused(LogitRule())
    assert not optimizer.gradient.any()


def test_a_trained_head_in_bf16_collects_its_gradient_in_fp32() -> None:
    expected = Toy().bfloat16()
    toy = Toy().bfloat16()
    optimizer = FlatAdamW(toy.named_parameters(), AdamSettings())
    toy.sums = optimizer.collected
    steps = 64
    for _ in range(steps):
        toy.fused(LogitRule()).backward()
    expected.plain(LogitRule()).backward()
    collected = toy.sums[toy.weight].gradient
    assert toy.weight.grad is None
    assert collected.dtype == torch.float32
    assert collected.untyped_storage().data_ptr() == optimizer.gradient.untyped_storage().data_ptr()
    assert expected.weight.grad is not None
    wanted = expected.weight.grad.float() * steps
    # What 64 additions in bf16 would lose is some per cent.
    assert float((collected - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rule", [LogitRule(), LogitRule(multiplier=0.3), LogitRule(multiplier=2.0, cap=4.0)]
)
def test_in_place_it_is_the_same_to_the_last_bit(rule: LogitRule, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(5, 301, generator=generator).to(dtype)
    labels = torch.randint(301, (5,), generator=generator)
    expected = pointwise.cross_entropy(logits.clone(), labels, SCALE, rule.multiplier, rule.cap)
    result = cross_entropy.cross_entropy_in_place(logits, labels, SCALE, rule)
    assert result[1] is logits
    for ours, plain in zip(result, expected, strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_as_wide_as_the_vocabulary_comes_and_goes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Blocks that are much larger than all others leave holes, and the heap grows from step to step."""
    rows, width, vocabulary = 64, 4, 8192
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda *_: rows)
    hidden = torch.randn(3 * rows - 7, width, dtype=dtype, requires_grad=True)
    head = Head(
        torch.randn(vocabulary, width, dtype=dtype, requires_grad=True),
        None,
        LogitRule(cap=4.0),
        Kernels(),
    )
    labels = torch.randint(vocabulary, (len(hidden),))
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        linear_cross_entropy(hidden, labels, head).backward()
    largest = max(event.self_cpu_memory_usage for event in profile.function_events)
    assert 0 < largest < rows * vocabulary * dtype.itemsize


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(multiplier=2.0, cap=4.0)])
@pytest.mark.parametrize("head", ["frozen", "trained", "with-optimizer"])
def test_log_probabilities_have_the_gradient_of_any_function_of_them(
    rule: LogitRule, head: str
) -> None:
    expected = Toy()
    toy = Toy()
    for module in (expected, toy) if head == "frozen" else ():
        module.weight.requires_grad_(False)
        module.bias.requires_grad_(False)
    if head == "with-optimizer":
        toy.sums = FlatAdamW(toy.named_parameters(), AdamSettings()).collected
    for _ in range(2):
        plain = -F.cross_entropy(expected.logits(rule), expected.labels, reduction="none")
        fused = linear_log_probabilities(toy.hidden, toy.labels, toy.head(rule))
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)
        for losses in (plain, fused):  # what a row weighs depends on the sum of several
            F.softplus(losses[:20].sum() - losses[20:].sum()).backward()
    for name, parameter in toy.named_parameters():
        wanted = expected.get_parameter(name).grad
        if wanted is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-6)
