"""A run is forecast once: each start takes the forecast that the last one kept, unless its facts differ."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.rundir import metrics
from tests import toy

MADE_AGAIN = "the forecast is made again"


def stopped(run_dir: Path, config: Config) -> None:
    """Train a run up to its third step."""
    toy.make_run(run_dir, config)
    stop = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:3"}
    assert toy.train(run_dir, environ=stop) == [errors.PREEMPTED]


def change_kept(run_dir: Path, part: str, **values: Any) -> None:
    """Change values of the forecast that the run's start has kept. `part`: of the forecast, or of its facts."""
    events = metrics.read_events(run_dir)
    for event in events:
        if event["event"] == "start":
            kept = event["forecast"]
            (kept.get(part) or kept["facts"][part]).update(values)
    lines = [json.dumps(event) + "\n" for event in events]
    (run_dir / metrics.EVENTS).write_text("".join(lines))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    inputs = toy.make_inputs(tmp_path / "toy")
    return toy.make_config(
        inputs, {"max_steps": 4}, compute={"gpus_per_node": 0, "tokens_per_second": 1000}
    )


def test_the_next_start_and_the_report_go_by_the_kept_forecast(
    config: Config, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    stopped(run_dir, config)
    # A forecast that this start would never make.
    change_kept(run_dir, "bill", hours=7.0, low_hours=7.0, high_hours=7.0, source="the kept one")
    assert toy.train(run_dir) == [0]
    log = toy.log_of(run_dir)
    assert "forecast for the steps: about 7 h" in log
    assert MADE_AGAIN not in log
    hours = json.loads((run_dir / "report.json").read_text())["actuals"]["hours"]
    assert (hours["forecast"], hours["source"]) == (7.0, "the kept one")
    plain = toy.finished(tmp_path / "plain", config)
    assert toy.digests(run_dir) == toy.digests(plain)


def test_a_forecast_of_other_facts_is_made_again_with_a_word(
    config: Config, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    stopped(run_dir, config)
    change_kept(run_dir, "bill", hours=7.0, low_hours=7.0, high_hours=7.0)
    change_kept(run_dir, "device", memory_bytes=2**40)
    change_kept(run_dir, "data", longest=10**6)
    assert toy.train(run_dir) == [0]
    log = toy.log_of(run_dir)
    assert f"{MADE_AGAIN}, for another data, device" in log
    assert "about 7 h" not in log
    newest = [event for event in metrics.read_events(run_dir) if event["event"] == "resume"][-1]
    assert newest["forecast"]["facts"]["data"]["longest"] < 10**6
