"""Dropout by sixteen random bits, of layers and in adapters: its share, expectation and gradient, and what seeds it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from kubetune.config.schema import LoraConfig
from kubetune.kernels import lora
from kubetune.kernels.dropout import draw, dropout, numbers, seed
from kubetune.models.adapters.lora import add_lora
from kubetune.models.adapters.shared_input import is_plain_lora
from kubetune.models.fused_forwards import swap_forwards
from tests.architectures import PROMISED, build_model


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
    assert float(kept[0].detach()) == pytest.approx(
        1 / (1 - p), rel=1e-4 if dtype == torch.float32 else 4e-3
    )
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    # Neighbours, which share a draw of 64 bits, know nothing of each other.
    dropped = (y == 0).float().flatten()
    for distance in (1, 2, 3, 4):
        both = float((dropped[:-distance] * dropped[distance:]).mean())
        assert both == pytest.approx(p * p, abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_is_ones_and_zeros(dtype: torch.dtype) -> None:
    kept, _ = draw(torch.ones(100, 100), 0.3)
    assert torch.equal(numbers(kept, dtype), kept.to(dtype))


def test_the_seed_decides() -> None:
    x = torch.ones(100, 100)
    torch.manual_seed(7)
    first, second = dropout(x, 0.3), dropout(x, 0.3)
    torch.manual_seed(7)
    assert torch.equal(dropout(x, 0.3), first)
    assert not torch.equal(first, second)


def test_seeding_is_that_of_torch_and_keeps_no_stack_of_every_step() -> None:
    torch.manual_seed(7)
    wanted, kept = torch.rand(4), len(torch.cuda._queued_calls)
    seed(7, torch.device("cpu"))
    assert torch.equal(torch.rand(4), wanted)
    assert len(torch.cuda._queued_calls) == kept


@pytest.mark.parametrize("p", [0.0, 1e-9, 1.0])
def test_the_ends_are_those_of_torch(p: float) -> None:
    x = torch.randn(100, 100)
    assert torch.equal(dropout(x, p), F.dropout(x, p) if p in (0.0, 1.0) else x)


def test_modules_drop_only_while_they_train() -> None:
    facts = BertConfig(
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = BertForSequenceClassification(facts)
    stock = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert swap_forwards(model, None, ExitStack())["dropout"] == len(stock) > 1
    x = torch.ones(128, 64)
    assert 0 < float((stock[0].train()(x) == 0).float().mean()) < 0.2
    assert torch.equal(stock[0].eval()(x), x)


@pytest.mark.parametrize("bias", [False, True])
def test_an_adapters_input_is_dropped_and_its_gradient_follows(bias: bool) -> None:
    torch.manual_seed(0)
    p, scaling = 0.3, 0.7
    x, weight, a, b = (torch.randn(*shape) for shape in ((2, 90, 64), (48, 64), (4, 64), (48, 4)))
    offset = torch.randn(48) if bias else None
    goal = torch.randn(2, 90, 48)

    def plain(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        kept, growth = draw(x.reshape(-1, 64), p)
        return F.linear(x, weight, offset) + scaling * F.linear(
            F.linear(x * kept.view(x.shape) * growth, a), b
        )

    def fused(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        layer = lora.Layer(a, b, offset, (weight.t(),))
        return lora.lora_linears(x, [layer], lora.Adapters(scaling, p))[0]

    found = []
    for forward in (plain, fused):
        inputs = [t.clone().requires_grad_() for t in (x, a, b)]
        torch.manual_seed(1)
        out = forward(*inputs)
        found.append([out, *torch.autograd.grad((out * goal).sum(), inputs)])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_a_cheaper_adapter_drops_what_pefts_own_does(training: bool) -> None:
    base = build_model("llama", PROMISED["llama"], lora=False)
    model = add_lora(base, LoraConfig(r=4, dropout=0.25), task_type="CAUSAL_LM", seed=0).train(
        training
    )
    assert swap_forwards(model, None, ExitStack())["lora"]
    layer = base.model.layers[0].self_attn.o_proj
    assert is_plain_lora(layer)
    nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(1, 90, layer.in_features)
    torch.manual_seed(1)
    ours = layer(x)
    torch.manual_seed(1)
    torch.testing.assert_close(ours, type(layer).forward(layer, x), rtol=1e-5, atol=1e-5)
    torch.manual_seed(2)
    assert torch.equal(layer(x), ours) is not training
