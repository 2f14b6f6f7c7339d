"""What a teacher costs before a run: its memory, its part of the hours, and the hours of asking it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kubetune
from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.library.cost_text import lines
from kubetune.plan.cost import flops_per_token
from kubetune.plan.costs import Costs, DataTotals, DeviceFacts, RunWeights, costs_of
from kubetune.plan.model_shapes import read_weights
from kubetune.plan.plan import Plan, make_plan
from kubetune.plan.rank_work import RankWork

EMBEDDED = Path(kubetune.__file__).parent / "cli" / "local" / "embedded"
# Three layers of 4 · 128² and 3 · 128 · 384 weights, and a head of 1,189 tokens.
PARAMETERS_READ = 3 * (4 * 128**2 + 3 * 128 * 384) + 1189 * 128
ROWS = 1000
LENGTH = 63


def planned(
    ranks: int = 1, training: dict[str, Any] | None = None, **distill: Any
) -> tuple[Config, Plan]:
    settings = {"teacher": str(EMBEDDED / "model"), "lmbda": 0, **distill}
    config = load_config(
        {
            "model": str(EMBEDDED / "half_taught"),
            "data": {"train": "org/d"},
            "task": "distill",
            "distill": settings,
            "training": training or {},
            "compute": {"processes": ranks, "tokens_per_second": 1000},
        }
    )
    return config, make_plan(config, ROWS, world_size=ranks, device="cpu", tokens=ROWS * LENGTH)


def costs(config: Config, plan: Plan) -> Costs:
    data = DataTotals(ROWS * LENGTH, LENGTH)
    return costs_of(config, plan, data, DeviceFacts(None, None), RunWeights.of(config, {}))


def texts_of(config: Config, plan: Plan, forecast: Costs) -> list[tuple[str, str]]:
    return list(lines(config, plan, read_weights(config.model.path, {}), forecast, ()))


@pytest.mark.parametrize("distill", [{}, {"teacher": "self", "lmbda": 1, "teacher_prompt": "x"}])
def test_a_step_reads_its_rows_by_the_teacher_too(distill: dict[str, Any]) -> None:
    config, plan = planned(**distill)
    weights = read_weights(config.model.path, {})
    assert weights is not None
    alone = flops_per_token(RankWork.of(config, plan), weights, LENGTH)
    shape = costs(config, plan).shape
    assert shape is not None
    # A forward: 2 a weight, and 4 a pair of tokens, head of attention and layer.
    expected = 2 * PARAMETERS_READ + 4 * 128 * 3 * (LENGTH + 1) / 2
    assert shape.flops - alone == pytest.approx(expected)


def test_a_teacher_that_is_asked_once_has_hours_of_its_own() -> None:
    config, plan = planned(support="teacher_k")
    forecast = costs(config, plan)
    # The model is as large and trains all its weights, so that a step takes three times as long as reading.
    assert forecast.reference_hours == pytest.approx(ROWS * LENGTH / 1000 / 3 / 3600)
    texts = [text for _, text in texts_of(config, plan, forecast)]
    assert any(
        text.startswith("asking the teacher about every answer adds about 21 s") for text in texts
    )
    assert "at most 31 MiB, beside the prepared data and in the memory" in " ".join(texts)
    assert costs(*planned()).reference_hours is None
    # There are 1,189 tokens to compare.
    config, plan = planned(support="teacher_k", top_k=10**6)
    texts = dict(texts_of(config, plan, costs(config, plan)))
    assert texts["teacher's numbers"].startswith("at most 572 MiB, ")
    long = plan.model_copy(update={"tokens_per_epoch": 10**8})
    texts = dict(texts_of(config, long, costs(config, plan)))
    assert "above 4 GiB nothing is kept" in texts["teacher's numbers"]


def test_the_memory_of_a_teacher_is_a_part() -> None:
    forecast = costs(*planned())
    assert forecast.memory is not None
    assert forecast.memory.parts["teacher"] == 4 * 792_064
    # Each pair of ranks has a copy. Of its three layers a rank borrows two.
    forecast = costs(*planned(4, {"parallelism": "fsdp", "fsdp_size": 2}))
    assert forecast.memory is not None
    assert forecast.memory.parts["teacher"] == 4 * (792_064 // 2 + 2 * 792_064 // 3)
