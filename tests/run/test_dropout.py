"""Dropout in adapters: its mask and gradient, and what seeds it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kubetune.config.schema import LoraConfig
from kubetune.kernels import lora
from kubetune.kernels.dropout import draw, numbers, seed
from kubetune.models import fsdp
from kubetune.models.adapters.lora import add_lora
from kubetune.models.adapters.shared_input import is_plain_lora
from kubetune.models.fused_forwards import swap_forwards
from kubetune.models.learner import Learner
from kubetune.models.padding_free import Route
from tests.architectures import PROMISED, build_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_is_ones_and_zeros(dtype: torch.dtype) -> None:
    kept, _ = draw(torch.ones(100, 100), 0.3)
    assert torch.equal(numbers(kept, dtype), kept.to(dtype))


def test_seeding_is_that_of_torch_and_keeps_no_stack_of_every_step() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(4)
    kept = len(torch.cuda._queued_calls)
    seed(7, torch.device("cpu"))
    assert torch.equal(torch.rand(4), wanted)
    assert len(torch.cuda._queued_calls) == kept


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

    results = []
    for forward in (plain, fused):
        inputs = [t.clone().requires_grad_() for t in (x, a, b)]
        torch.manual_seed(1)
        out = forward(*inputs)
        results.append([out, *torch.autograd.grad((out * goal).sum(), inputs)])
    for theirs, ours in zip(*results, strict=True):
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


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_as_before_once_it_was_asked(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(fsdp, "close", closed.append)
    model = nn.Linear(2, 2).train(training)
    learner = Learner(model, Route(padding_free=True))

    def fail() -> None:
        with learner.asked():
            raise RuntimeError(f"training: {model.training}")

    with pytest.raises(RuntimeError, match="training: False"):
        fail()
    assert model.training is training
    assert closed == [model]
