"""LoRA layers computed together: as PEFT's own, wherever their input is the same, and by the weights of the moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from kubetune.models.adapters import shared_input
from kubetune.training.optimizer.adam_step import AdamSettings
from kubetune.training.optimizer.adamw import FlatAdamW


class Crossed(nn.Module):
    """Queries of one input, keys and values of another; the names are those of layers that mostly share it."""

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(24, 32),
            nn.Linear(24, 16),
            nn.Linear(24, 16),
        )
        self.shares = shares

    def forward(self, x: Tensor) -> Tensor:
        other = x if self.shares else x.flip(0)
        return torch.cat([self.q_proj(x), self.k_proj(other), self.v_proj(other)], -1)


def adapted(*, shares: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    lora = LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
    )
    model = get_peft_model(Crossed(shares=shares).to(dtype), lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def learn(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, the gradient of the input, and the gradients of the adapters."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    inputs = x.clone().requires_grad_()
    y = model(inputs)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    assert inputs.grad is not None
    return [
        t.detach().clone()
        for t in (y, inputs.grad, *(p.grad for p in model.parameters() if p.requires_grad))
    ]  # type: ignore[union-attr]


@pytest.mark.parametrize("shares", [True, False])
def test_layers_named_alike_give_what_pefts_own_do_whether_they_share_their_input_or_not(
    shares: bool,
) -> None:
    theirs = adapted(shares=shares)
    ours = adapted(shares=shares)
    names = list(ours.state_dict())
    assert shared_input.swap(ours) == 3
    assert list(ours.state_dict()) == names
    (shared,) = shared_input.shared_inputs(ours.modules())
    x = torch.randn(5, 7, 24)
    for _ in range(2):
        for actual, expected in zip(learn(ours, x), learn(theirs, x), strict=True):
            assert float((actual - expected).norm()) <= 1e-6 * float(expected.norm())
        assert shared.goes_alone is not shares
        assert not shared.waiting
    optimizer = FlatAdamW(ours.named_parameters(), AdamSettings())
    optimizer.mirror(shared_input.copies(ours, optimizer.collected))
    for actual, expected in zip(learn(ours, x), learn(theirs, x), strict=True):
        assert float((actual - expected).norm()) <= 1e-6 * float(expected.norm())


def test_an_output_that_nothing_comes_of_has_no_gradient() -> None:
    theirs = adapted()
    ours = adapted()
    shared_input.swap(ours)
    results = []
    for model in (theirs, ours):
        x = torch.ones(1, 3, 24, requires_grad=True)
        model(x)[..., :32].sum().backward()
        layer = model.get_submodule("base_model.model.q_proj")
        results.append(
            [x.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]
        )
    for theirs_, ours_ in zip(*results, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_rounded_once_a_step_are_those_of_the_step(dtype: torch.dtype) -> None:
    """Bit by bit those that are cast in each forward, after updates and after a checkpoint is read."""
    once = adapted(dtype=dtype)
    every_time = adapted(dtype=dtype)
    x = torch.randn(2, 9, 24, dtype=dtype)
    optimizers = []
    for model in (once, every_time):
        shared_input.swap(model)
        optimizers.append(FlatAdamW(model.named_parameters(), AdamSettings()))
    first = {name: tensor.clone() for name, tensor in optimizers[0].state().items()}
    optimizers[0].mirror(shared_input.copies(once, optimizers[0].collected))
    for step in range(4):
        ours, theirs = (learn(model, x) for model in (once, every_time))
        for actual, expected in zip(ours, theirs, strict=True):
            assert (
                torch.equal(actual, expected)
                if dtype == torch.float32
                else torch.allclose(actual, expected, 1e-2, 1e-3)
            )
        assert torch.equal(ours[0], theirs[0])
        for optimizer in optimizers:
            optimizer.load(first) if step == 2 else optimizer.update(1e-2)


def test_a_table_of_a_step_takes_no_more_than_the_adapters_in_half_precision() -> None:
    model = adapted(dtype=torch.bfloat16)
    shared_input.swap(model)
    optimizer = FlatAdamW(model.named_parameters(), AdamSettings())
    copies = list(shared_input.copies(model, optimizer.collected))
    assert {id(parameter) for parameter, _ in copies} == {
        id(p) for p in model.parameters() if p.requires_grad
    }
    assert sum(copy.numel() * copy.element_size() for _, copy in copies) == 2 * optimizer.size
