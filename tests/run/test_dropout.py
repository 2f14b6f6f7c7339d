"""Dropout by sixteen random bits: its share, its expectation, its gradient, and what decides its numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from kubetune.dropout import dropout
from kubetune.lean import make_lean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("p", [0.05, 0.1, 0.5])
def test_the_share_asked_for_is_dropped_and_the_rest_scaled(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(999, 1001, dtype=dtype, requires_grad=True)
    y = dropout(x, p)
    share = float((y == 0).float().mean())
    assert share == pytest.approx(p, abs=2e-3)  # four standard errors are 2e-3
    kept = y[y != 0]
    assert torch.equal(kept, kept[:1].expand_as(kept))
    assert float(kept[0].detach()) == pytest.approx(1 / (1 - p), rel=1e-4 if dtype == torch.float32 else 4e-3)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    # Neighbours, which share a draw of 64 bits, know nothing of each other.
    dropped = (y == 0).float().flatten()
    for distance in (1, 2, 3, 4):
        both = float((dropped[:-distance] * dropped[distance:]).mean())
        assert both == pytest.approx(p * p, abs=2e-3)


def test_the_seed_decides() -> None:
    x = torch.ones(100, 100)
    torch.manual_seed(7)
    first, second = dropout(x, 0.3), dropout(x, 0.3)
    torch.manual_seed(7)
    assert torch.equal(dropout(x, 0.3), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.0, 1e-9, 1.0])
def test_the_ends_are_those_of_torch(p: float) -> None:
    x = torch.randn(100, 100)
    assert torch.equal(dropout(x, p), F.dropout(x, p) if p in (0.0, 1.0) else x)


def test_modules_drop_only_while_they_train() -> None:
    facts = BertConfig(vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    model = BertForSequenceClassification(facts)
    stock = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert make_lean(model, fused=False)["dropout"] == len(stock) > 1
    x = torch.ones(128, 64)
    assert 0 < float((stock[0].train()(x) == 0).float().mean()) < 0.2
    assert torch.equal(stock[0].eval()(x), x)
