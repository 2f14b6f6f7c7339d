"""Every trained tensor moves, on every rank, or the run says which does not: seeded faults, and what only waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention

from kubetune.distributed.process_group import World
from kubetune.training import worker
from kubetune.training.movement import FIRST_STEPS, Movement
from kubetune.training.optimizer.adam_step import AdamSettings
from kubetune.training.optimizer.adamw import FlatAdamW
from kubetune.training.optimizer.adamw_sharded import ShardedAdamW
from tests import toy
from tests.ranks import started, wait_all

slow = pytest.mark.slow
FULL: dict[str, Any] = {"lora": None}
LORA: dict[str, Any] = {"lora": {"r": 4}}
HERE = World(0, 0, 1, torch.device("cpu"))


def normal(run_dir: str) -> int:
    return worker.main([run_dir])


def detached(run_dir: str) -> int:
    """Be a rank whose first layer's keys do not reach the loss."""

    def cut(module: nn.Module, _: object, result: torch.Tensor) -> torch.Tensor:
        return result.detach() if module in keys else result

    keys: set[nn.Module] = set()
    plain_init = LlamaAttention.__init__

    def init(self: Any, config: Any, layer_idx: int) -> None:
        plain_init(self, config, layer_idx)
        if layer_idx == 0:
            self.k_proj.register_forward_hook(cut)
            keys.add(self.k_proj)

    LlamaAttention.__init__ = init  # type: ignore[method-assign]
    return worker.main([run_dir])


def without_a_gradient(run_dir: str, optimizer: type[FlatAdamW], name: str, lost_on: int) -> int:
    """Be a rank, of which one loses the gradient of its part of the tensors with this in their names."""
    plain = optimizer.reduce_gradient

    def reduce(self: FlatAdamW, world: World) -> float:
        norm = plain(self, world)
        for full_name, (_, span) in zip(self.layout, self.parts, strict=True):
            if world.rank == lost_on and name in full_name:
                self.gradient[span].zero_()
        return norm

    optimizer.reduce_gradient = reduce  # type: ignore[method-assign]
    return worker.main([run_dir])


def with_slices_elsewhere(run_dir: str) -> int:
    """Be a rank whose slices FSDP keeps where they were, so that the optimizer updates others, as it once was."""
    plain = ShardedAdamW.__init__

    def init(self: ShardedAdamW, model: nn.Module, settings: AdamSettings) -> None:
        plain(self, model, settings)
        for parameter, span in self.parts:
            value = self.master[span].clone()
            parameter._local_tensor = value.view_as(parameter._local_tensor)  # type: ignore[attr-defined]
            self.master[span].copy_(value)
        self.master = self.master.clone()
        self.copies.clear()

    ShardedAdamW.__init__ = init  # type: ignore[method-assign]
    return worker.main([run_dir])


def log_after(
    rank: Any,
    run_dir: Path,
    inputs: Path,
    training: dict[str, Any],
    world_size: int,
    *faults: Any,
    **sections: Any,
) -> str:
    config = toy.make_config(inputs, training, logging={"level": "DEBUG"}, **sections)
    toy.make_run(run_dir, config, world_size)
    with started(rank, world_size, str(run_dir), *faults) as ranks:
        assert wait_all(ranks) == [0] * world_size, toy.log_of(run_dir)
    return toy.log_of(run_dir)


@pytest.mark.parametrize(
    ("sections", "parallelism", "world_size", "steps"),
    [
        pytest.param(LORA, "ddp", 1, 2, id="lora"),
        pytest.param(FULL, "fsdp", 3, 1, id="full, sharded unevenly", marks=slow),
        pytest.param({"lora": {"r": 4, "use_dora": True}}, "ddp", 1, 2, id="dora", marks=slow),
        pytest.param(FULL, "ddp", 2, 1, id="full", marks=slow),
        pytest.param(LORA, "fsdp", 2, 2, id="lora, sharded", marks=slow),
        pytest.param({**FULL, "dtype": "bfloat16"}, "fsdp", 2, 1, id="bf16", marks=slow),
        pytest.param({**FULL, "dtype": "bfloat16"}, "ddp", 1, 1, id="bf16, one", marks=slow),
    ],
)
def test_all_move_in_the_first_steps(
    inputs: Path,
    tmp_path: Path,
    sections: dict[str, Any],
    parallelism: str,
    world_size: int,
    steps: int,
) -> None:
    training = {"parallelism": parallelism, "per_device_train_batch_size": 1}
    sections = dict(sections)
    dtype = sections.pop("dtype", "auto")
    sections["model"] = {"path": str(inputs / "model"), "dtype": dtype}
    log = log_after(normal, tmp_path / "run", inputs, training, world_size, **sections)
    unit = "step" if steps == 1 else "steps"
    assert f"have moved, on every rank, after {steps} {unit}\n" in log
    assert "not moved" not in log
    assert "does not compute" not in log


def test_a_tensor_that_does_not_reach_the_loss_is_named(inputs: Path, tmp_path: Path) -> None:
    """Weight decay moves it, which teaches it nothing."""
    log = log_after(detached, tmp_path / "run", inputs, {"weight_decay": 0.1}, 1, **FULL)
    assert log.count("have not moved") == 1
    named = "not moved in 10 steps: model.layers.*.self_attn.k_proj.weight (1)."
    assert f"1 of 21 trained tensors have {named}" in log


@pytest.mark.parametrize(
    ("sections", "parallelism", "optimizer", "named"),
    [
        (FULL, "fsdp", ShardedAdamW, "1 of 21 trained tensors"),
        pytest.param(LORA, "fsdp", FlatAdamW, "2 of 28 trained tensors", marks=slow),
    ],
    ids=["full", "lora"],
)
def test_a_part_that_gets_no_gradient_on_a_rank_is_named_with_it(
    inputs: Path,
    tmp_path: Path,
    sections: dict[str, Any],
    parallelism: str,
    optimizer: type[FlatAdamW],
    named: str,
) -> None:
    training = {"parallelism": parallelism}
    faults = (optimizer, "layers.1.mlp.up_proj", 1)
    log = log_after(without_a_gradient, tmp_path / "run", inputs, training, 2, *faults, **sections)
    assert f"{named} have not moved in 10 steps: " in log
    assert ".layers.*.mlp.up_proj." in log
    assert "on rank 1)" in log


def test_weights_that_the_model_does_not_compute_with_are_named(
    inputs: Path, tmp_path: Path
) -> None:
    training = {"parallelism": "fsdp"}
    log = log_after(with_slices_elsewhere, tmp_path / "run", inputs, training, 2, **FULL)
    assert "the model does not compute with the weights that are trained: " in log


NOTHING = "nothing was learnt in 2 steps: none had a gradient of the loss and a learning rate"


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.experts = nn.ModuleList([nn.Linear(2, 2, bias=False)])


def steps_of(
    caplog: pytest.LogCaptureFixture,
    gradients: list[float],
    rate: float = 0.1,
    measured: dict[str, float] | None = None,
) -> str:
    """Return what is said of steps in which the first tensor has these gradients, and the expert none."""
    caplog.clear()
    caplog.set_level("INFO")
    model = Toy()
    optimizer = FlatAdamW(model.named_parameters(), AdamSettings())
    movement = Movement(model, optimizer, HERE)
    for gradient in gradients:
        assert model.first.weight.grad is not None
        model.first.weight.grad.fill_(gradient)
        norm = optimizer.gradient_norm()
        with movement.watching(norm, rate, measured or {}):
            optimizer.update(rate)
    movement.conclude()
    return caplog.text


def test_an_expert_without_a_token_is_spoken_of_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = steps_of(caplog, [1.0] * (FIRST_STEPS + 3))
    assert "have not moved" not in text
    assert (
        "1 trained tensor got no data in 13 steps, so that they are as before: experts.*.weight (1)"
        in text
    )


def test_steps_without_a_gradient_or_a_rate_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    text = steps_of(caplog, [0.0, 0.0, 1.0])
    assert text == ""
    text = steps_of(caplog, [0.0, 0.0])
    assert NOTHING in text


def test_a_rate_of_zero_moves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert NOTHING in steps_of(caplog, [1.0, 1.0], rate=0.0)


def test_equal_rewards_teach_nothing_where_routers_have_a_gradient(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert NOTHING in steps_of(caplog, [1.0, 1.0], measured={"zero_variance": 1.0})
    assert NOTHING not in steps_of(caplog, [1.0, 1.0], measured={"zero_variance": 0.5})
