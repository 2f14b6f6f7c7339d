"""Frozen layers in 8-bit floats: near the exact layer in both directions, gated by the loss, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.kernels.pointwise import Kernels
from kubetune.models.adapters import fp8, shared_input
from tests import toy
from tests.architectures import save_model

NEAR = 0.06  # e4m3 keeps four bits; over a row the errors average out to about 3 %


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float(
        (ours.detach().float() - theirs.detach().float()).norm() / theirs.detach().float().norm()
    )


def adapted_layer() -> Any:
    torch.manual_seed(0)
    model = get_peft_model(
        nn.Sequential(nn.Linear(64, 96)).bfloat16(),
        LoraConfig(r=4, target_modules=["0"], init_lora_weights=False),
    )
    return model.get_submodule("base_model.model.0")


def test_near_the_exact_layer_in_both_directions() -> None:
    exact = adapted_layer()
    rounded = adapted_layer()
    assert fp8.round_layers(rounded, Kernels()) == 1
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    x[3] *= 1000  # a row with outliers harms no other row
    result = {}
    for layer in (exact, rounded):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(torch.ones_like(y))
        a = layer.lora_A["default"].weight
        b = layer.lora_B["default"].weight
        result[layer] = (y[:3], y[4:], leaf.grad, a.grad, b.grad)
    differences = [
        difference(ours, theirs)
        for ours, theirs in zip(result[rounded], result[exact], strict=True)
    ]
    assert all(0 <= value < NEAR for value in differences), differences
    assert differences[0] > 0  # it was rounded


def test_layers_of_odd_width_are_left_alone() -> None:
    model = get_peft_model(nn.Sequential(nn.Linear(60, 96)), LoraConfig(r=4, target_modules=["0"]))
    assert fp8.round_layers(model, Kernels()) == 0
    with pytest.raises(errors.ConfigError, match="multiples of 16"):
        fp8.adopt(model, Kernels(), torch.device("cpu"), lambda: 1.0)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = toy.make_inputs(tmp_path_factory.mktemp("fp8"))
    save_model(folder / "wide", "qwen2", hidden_size=64, intermediate_size=128, head_dim=16)
    return folder


def config_of(inputs: Path, **training: Any) -> Config:
    lora = {"r": 8, "dropout": 0.0, "target_modules": "all-linear"}
    model = {"path": str(inputs / "wide"), "dtype": "bfloat16"}
    return toy.make_config(
        inputs,
        {"max_steps": 4, "save_steps": 2, "eval_steps": 2, **training},
        lora=lora,
        model=model,
    )


@pytest.mark.slow
def test_a_run_learns_about_the_same_and_resumes_bit_by_bit(inputs: Path, tmp_path: Path) -> None:
    plain = toy.losses(toy.finished(tmp_path / "plain", config_of(inputs)))
    whole = toy.finished(tmp_path / "whole", config_of(inputs, fp8=True))
    assert toy.losses(whole) == pytest.approx(plain, rel=0.02)
    assert toy.losses(whole) != plain
    resumed = toy.make_run(tmp_path / "resumed", config_of(inputs, fp8=True))
    assert toy.train(resumed, environ={"KUBETUNE_FAULT": "signal 9:commit.written:1"}) == [-9]
    assert toy.train(resumed) == [0]
    assert toy.digests(resumed) == toy.digests(whole)


@pytest.mark.parametrize(
    ("after", "message"), [(2.1, r"to 2\.1000, by 5\.0%; 1% is allowed"), (float("nan"), "nan")]
)
def test_the_gate_refuses_a_model_that_changes(after: float, message: str) -> None:
    losses = iter([2.0, after])
    with pytest.raises(errors.ConfigError, match=message):
        fp8.adopt(adapted_layer(), Kernels(), torch.device("cpu"), lambda: next(losses))


def test_what_it_cannot_be_combined_with_is_said_at_once(inputs: Path) -> None:
    with pytest.raises(
        ValueError, match=r"training\.fp8 does not work with lora\.dropout"
    ) as caught:
        toy.make_config(inputs, {"fp8": True}, lora={"r": 4, "dropout": 0.1}, quantization="8bit")
    assert "training.fp8 does not work with quantization: 8bit" in str(caught.value)
    with pytest.raises(ValueError, match="full fine-tuning"):
        toy.make_config(inputs, {"fp8": True}, lora=None)


def test_layers_of_one_input_round_it_once_and_give_what_each_alone_gives() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(64, 64),
                nn.Linear(64, 32),
                nn.Linear(64, 32),
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    result = []
    rounded = []
    for together in (True, False):
        torch.manual_seed(0)
        settings = LoraConfig(
            r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False
        )
        model = get_peft_model(Attention().bfloat16(), settings)
        if together:
            assert shared_input.swap(model) == 3
        kernels = Kernels()
        assert fp8.round_layers(model, kernels) == 3
        calls: list[int] = []
        plain = kernels.forms["round_rows"]
        kernels.forms["round_rows"] = lambda x, calls=calls, plain=plain: (
            calls.append(1),
            plain(x),
        )[1]
        x = torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
        y = model(x)
        rounded.append(len(calls))
        y.backward(torch.ones_like(y))
        result.append([y, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
    assert rounded == [1, 3]
    assert all(difference(ours, theirs) < 5e-3 for ours, theirs in zip(*result, strict=True))
