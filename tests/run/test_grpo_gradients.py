"""Loss and gradient of each loss type of `task: grpo`: those of plain torch, on any ranks, in copies and in slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from kubetune.config.schema import Config, GrpoConfig
from kubetune.distributed.process_group import World, sum_numbers
from kubetune.models import fsdp
from kubetune.models.acceleration import Workload
from kubetune.models.model_spec import ModelSpec
from kubetune.tasks.grpo import objective
from kubetune.tasks.grpo import task as grpo
from kubetune.training.rollouts import answer_rows
from tests import toy
from tests.ranks import run_ranks
from tests.run.test_grpo import plain_loss, rows_of

slow = pytest.mark.slow

Settings = tuple[dict[str, Any], ...]

OFF_POLICY: dict[str, Any] = {"num_iterations": 2}
# Of these no other test compares the gradient.
ONLY_HERE: Settings = (
    {"loss_type": "grpo", "delta": 1.3, "kl_estimator": "k2", "beta": 0.1, **OFF_POLICY},
    {"loss_type": "dapo", "importance_sampling_correction": "geometric_mask", "beta": 0.1},
    {"loss_type": "bnpo", **OFF_POLICY},
    {"loss_type": "luspo", "importance_sampling_level": "sequence", **OFF_POLICY},
    {"loss_type": "vespo", "importance_sampling_correction": "token_truncate", **OFF_POLICY},
)
# tests/run/test_grpo.py compares these loss types on one rank.
ALSO_ON_ONE_RANK: Settings = (
    {"loss_type": "grpo", "beta": 0.1, "temperature": 0.8},
    {"loss_type": "dr_grpo", "importance_sampling_correction": "sequence_truncate", **OFF_POLICY},
    {"loss_type": "dapo", "epsilon_high": 0.4, **OFF_POLICY},
    {"loss_type": "cispo", "beta": 0.1, **OFF_POLICY},
    {"loss_type": "sapo", **OFF_POLICY},
    {"loss_type": "gspo", **OFF_POLICY},
)
ALL = (*ONLY_HERE, *ALSO_ON_ONE_RANK)


def differences(
    world: World, config: Config, all_settings: Settings
) -> list[tuple[str, float, float]]:
    """Return by how much loss and gradient differ from plain torch at most, for each setting and split."""
    spec = ModelSpec.of(config)
    learner = grpo.TASK.build(spec, config.training, world, Workload(0))
    assert fsdp.is_sharded(learner.model) == (config.training.parallelism == "fsdp")
    model = AutoModelForCausalLM.from_pretrained(spec.model.path, attn_implementation="eager")
    names = [name for name, _ in model.named_parameters()]
    results = []
    for settings in all_settings:
        of_run = GrpoConfig.model_validate(settings)
        rows = rows_of(of_run)
        model.train().zero_grad()
        expected = plain_loss(model, of_run, rows)
        expected.backward()
        wanted = {name: parameter.grad for name, parameter in model.named_parameters()}

        labels = sum(len(row.answer.ids) for row in rows)
        divisor = objective.divisor(of_run, len(rows), labels)
        mine = rows[world.rank :: world.size]
        of_settings = replace(learner, grpo=of_run)
        for size, shares in ((9, False), (9, True), (2, True), (1, False)):
            learner.model.zero_grad()
            # As many as the first rank has, so that slices are in step: of nine rows, two ranks have five and four.
            number = -(-len(rows[:: world.size]) // size)
            loss = 0.0
            for place in range(number):
                part = mine[place * size : (place + 1) * size]
                batch = answer_rows.batch_of(part, labels, divisor, share_prefixes=shares)
                values = grpo.TASK.backward(of_settings, batch, 1 / divisor)
                loss += float(values[0])
            (loss,) = sum_numbers([loss], world)
            of_loss = abs(loss - expected.item())
            parameters = dict(learner.lm.named_parameters())
            of_gradient = max(_difference(parameters[name], wanted[name], world) for name in names)
            results.append((f"{settings} {size} {shares}", of_loss, of_gradient))
    return results


def _difference(parameter: Any, wanted: Any, world: World) -> float:
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()  # the ranks have added theirs up
    elif world.size > 1:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
    return float((gradient - wanted).abs().max())


@pytest.mark.parametrize(
    ("parallelism", "ranks", "all_settings"),
    [
        pytest.param("ddp", 1, ALL, marks=slow),
        pytest.param("ddp", 2, ALL, marks=slow),
        pytest.param("ddp", 3, ALL, marks=slow),
        ("fsdp", 2, ONLY_HERE),
        pytest.param("fsdp", 2, ALSO_ON_ONE_RANK, marks=slow),
        pytest.param("fsdp", 3, ALL, marks=slow),
    ],
    ids=["ddp-1", "ddp-2", "ddp-3", "fsdp-2", "fsdp-2-more", "fsdp-3"],
)
def test_every_loss_and_gradient_is_that_of_plain_torch(
    inputs: Path, parallelism: str, ranks: int, all_settings: Settings
) -> None:
    config = toy.make_config(
        inputs, {"parallelism": parallelism}, task="grpo", rewards=["exact_match"], lora=None
    )
    (results, *_) = run_ranks(differences, ranks, config, all_settings)
    assert len(results) == 4 * len(all_settings)
    for name, of_loss, of_gradient in results:
        assert of_loss <= 1e-6, name
        assert of_gradient <= 1e-6, name
