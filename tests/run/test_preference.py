"""Preference tuning: each loss that of plain torch at any split, the reference asked once, runs resumable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kubetune.config.schema import Config, PreferenceConfig
from kubetune.distributed.process_group import World
from kubetune.tasks import causal_lm, preference
from tests import toy
from tests.preferences import LOSSES, draw, plain_loss, work_of

ROWS = 8
ONE = World()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").train()


def measured(model: Any, folder: Path, settings: PreferenceConfig, size: int) -> tuple[list[float], torch.Tensor]:
    """Loss and metrics of a step in micro-batches of `size`, and the whole gradient."""
    learner = causal_lm.ready(model, Config.model_validate({"model": str(folder / "model"), "data": {"train": "none"}}))
    learner = replace(learner, preference=settings)
    assert learner.route.padding_free
    work = preference.completed(learner, work_of(draw(ROWS), size, settings), ONE)
    model.zero_grad()
    parts = [preference.backward(learner, batch, 1 / work.divisor) for batch in work.batches]
    return torch.stack(parts).sum(0).tolist(), gradient_of(model)


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_plain_torch_however_the_batch_is_split(folder: Path, name: str) -> None:
    settings = PreferenceConfig.model_validate({"loss": name, **LOSSES[name]})
    model = loaded(folder)
    expected = plain_loss(model, draw(ROWS), settings)
    expected.backward()
    gradient = gradient_of(model)
    assert gradient.norm() > 0.1
    for size in (8, 4, 2, 1):
        (loss, *_), found = measured(loaded(folder), folder, settings, size)
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        assert float((found - gradient).norm()) <= 1e-6 * float(gradient.norm())
