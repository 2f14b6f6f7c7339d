"""The forecast beside what was measured: the time that is paid for, and nothing made up where nothing is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kubetune.config.load import load_config
from kubetune.plan import actuals
from kubetune.plan.forecast import forecast
from kubetune.plan.model_shapes import read_weights
from kubetune.plan.plan import make_plan
from kubetune.plan.rank_work import RankWork

LLAMA = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512,
}  # fmt: skip


def event(kind: str, minute: int, **facts: Any) -> dict[str, Any]:
    return {"time": f"2026-11-20T10:{minute:02}:00.000Z", "event": kind, **facts}


@pytest.mark.parametrize(
    ("events", "minutes"),
    [
        ([event("launch", 0), event("start", 1)], 30),
        (
            [
                event("launch", 0),
                event("start", 1),
                event("exit", 5),
                event("launch", 20),
                event("resume", 21),
            ],
            15,
        ),
        # Cut off without a word: until it was last seen alive, else until it was last heard of.
        (
            [
                event("launch", 0),
                event("start", 1),
                event("launch", 20, last_seen="2026-11-20T10:09:00.000Z"),
            ],
            19,
        ),
        ([event("launch", 0), event("start", 1), event("launch", 20)], 11),
        ([event("launch", 0, node=0), event("launch", 1, node=1), event("exit", 3, node=1)], 30),
        ([event("start", 2)], 28),
        ([], 0),
    ],
)
def test_devices_are_held_from_each_launch_to_its_end(
    events: list[dict[str, Any]], minutes: int
) -> None:
    assert actuals.held_seconds(events, "2026-11-20T10:30:00.000Z") == minutes * 60


def plan_facts(model: str, *overrides: str) -> dict[str, Any]:
    words = [
        f"model={model}",
        "data.train=org/d",
        "compute.gpus_per_node=0",
        "compute.processes=2",
        *overrides,
    ]
    config = load_config(None, overrides=words)
    return actuals.compare(
        config,
        make_plan(config),
        tokens=3_600_000,
        peak_memory_bytes=10**9,
        step_seconds=1800.0,
        events=[event("launch", 0), event("start", 1, device="CPU")],
        until="2026-11-20T10:45:00.000Z",
    )


def test_hours_and_price_are_compared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    stated = ["compute.tokens_per_second=1000", "compute.price_per_gpu_hour=2"]
    rated = plan_facts(str(tmp_path), *stated)
    hours = rated["hours"]
    price = rated["price"]
    keys = ("forecast", "step_hours", "total_hours", "relative_error")
    assert [hours[key] for key in keys] == [0.5, 0.5, 0.75, 0.0]
    assert (price["forecast"], price["steps"], price["total"]) == (2.0, 2.0, 3.0)
    config = load_config(
        None, overrides=[f"model={tmp_path}", "data.train=x/y", "compute.processes=2"]
    )
    weights = read_weights(str(tmp_path), {})
    assert weights is not None
    expected = forecast(RankWork.of(config, make_plan(config)), weights)
    assert expected is not None
    assert rated["memory"]["forecast_bytes"] == expected.peak_bytes
    memory, time, cost = actuals.tell(rated)
    assert memory.startswith("peak memory 954 MiB, forecast ")
    assert time == "time 30 min in steps, 45 min in all"
    assert (
        cost == "price 3.00, 2.00 of it for the steps, forecast 2.00 (+0%), at 2 a device and hour"
    )


@pytest.mark.parametrize(
    ("measured", "busy", "words"),
    [
        (0.9, False, ""),
        (0.26, True, ""),
        (1.1, False, "; the forecast for the steps was 30 min"),
        (1.1, True, "; the forecast for the steps was 30 min, and the machine was busy"),
        # What was faster than the forecast was not slowed down by anybody.
        (0.2, True, "; the forecast for the steps was 30 min"),
    ],
)
def test_a_forecast_is_named_only_where_it_was_far_off(
    measured: float, busy: bool, words: str
) -> None:
    hours = {"forecast": 0.5, "step_hours": measured, "total_hours": 2.0, "busy": busy}
    memory = {"forecast_bytes": None}
    (line,) = actuals.tell({"memory": memory, "hours": hours, "price": None})
    assert line.partition(" in all")[2] == words


def test_what_nobody_could_forecast_is_not_made_up() -> None:
    unknown = plan_facts("org/not-here")
    assert unknown["memory"] == {
        "forecast_bytes": None,
        "measured_bytes": 10**9,
        "relative_error": None,
    }
    assert unknown["hours"]["forecast"] is None
    assert unknown["price"] is None
    assert list(actuals.tell(unknown)) == ["time 30 min in steps, 45 min in all"]
