"""The forecast beside what was measured: the time that is paid for, and nothing made up where nothing is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kubetune.config.load import load_config
from kubetune.plan import actuals
from kubetune.plan.costs import Costs, DataTotals, DeviceFacts, RunWeights, costs_of, read_kept
from kubetune.plan.plan import make_plan

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


def kept(folder: Path, *overrides: str) -> Costs:
    """Return a forecast of 3.6 million tokens on two processes, as the event of a start keeps it."""
    words = [
        f"model={folder}",
        "data.train=org/d",
        "compute.gpus_per_node=0",
        "compute.processes=2",
    ]
    config = load_config(None, overrides=[*words, *overrides])
    data = DataTotals(tokens=3_600_000, longest=None)
    device = DeviceFacts(gpu=None, memory_bytes=None)
    costs = costs_of(config, make_plan(config), data, device, RunWeights.of(config, {}))
    older = event("start", 1, forecast=replace(costs, bill=None).kept())
    written = json.loads(json.dumps([older, event("resume", 2, forecast=costs.kept())]))
    forecast = read_kept(written)
    assert forecast == costs
    return forecast


def compared(forecast: Costs | None, price: float | None) -> dict[str, Any]:
    events = [event("launch", 0), event("start", 1)]
    return actuals.compare(
        forecast,
        peak_memory_bytes=10**9,
        step_seconds=1800.0,
        events=events,
        until="2026-11-20T10:45:00.000Z",
        world_size=2,
        price_per_gpu_hour=price,
    )


def test_the_forecast_of_the_last_start_is_compared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    stated = ["compute.tokens_per_second=1000", "compute.price_per_gpu_hour=2"]
    forecast = kept(tmp_path, *stated)
    rated = compared(forecast, 2.0)
    hours = rated["hours"]
    keys = ("forecast", "low", "high", "step_hours", "total_hours", "relative_error")
    assert [hours[key] for key in keys] == [0.5, 0.5, 0.5, 0.5, 0.75, 0.0]
    price = rated["price"]
    assert (price["forecast"], price["steps"], price["total"]) == (2.0, 2.0, 3.0)
    assert forecast.memory is not None
    assert rated["memory"]["forecast_bytes"] == forecast.memory.allocated_bytes > 0
    line = actuals.line(rated)
    assert line.startswith(
        "time 45 min, 30 min of it in steps (forecast 30 min); peak memory 954 MiB"
    )
    assert line.endswith("; price 3.00, 2.00 of it for the steps (forecast 2.00)")


def test_what_nobody_could_forecast_is_not_made_up(tmp_path: Path) -> None:
    forecast = kept(tmp_path / "not-here")
    assert forecast.memory is None
    assert forecast.bill is not None
    assert forecast.bill.hours is None
    assert forecast.bill.source.startswith("unknown: ")
    unknown = compared(forecast, None)
    assert unknown["price"] is None
    line = "time 45 min, 30 min of it in steps; peak memory 954 MiB"
    assert actuals.line(unknown) == line
    # A start that was cut off before its event has kept none, and what is damaged counts as none.
    assert read_kept([event("launch", 0)]) is None
    damaged = {**forecast.kept(), "bill": {"tokens": "many"}}
    assert read_kept([event("start", 1, forecast=damaged)]) is None
    assert actuals.line(compared(None, None)) == line
