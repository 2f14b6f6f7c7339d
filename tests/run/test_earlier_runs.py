"""A second run is forecast by the first: in `kubetune plan`, where it begins, and in what is said after it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kubetune import cli
from kubetune.config.resolved import resolved
from kubetune.plan import earlier_runs
from tests import toy


def plan_lines(capsys: pytest.CaptureFixture[str], file: Path) -> dict[str, str]:
    """Return the facts of a plan by their labels, up to the blank line before what to do next."""
    assert cli.main(["plan", str(file)]) == 0
    facts, _, _ = capsys.readouterr().out.partition("\n\n")
    _headline, *labelled = facts.splitlines()
    lines = {}
    for line in labelled:
        if not line.startswith(" "):
            label, text = re.split(r"\s{2,}", line, maxsplit=1)
            lines[label] = text
    return lines


def test_the_second_run_is_forecast_by_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = toy.make_inputs(tmp_path / "toy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compute = {"gpus_per_node": 0, "price_per_gpu_hour": 36}
    config = toy.make_config(inputs, {"num_train_epochs": 1}, compute=compute)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(resolved(config)))
    lines = plan_lines(capsys, file)
    assert lines["time"].startswith(
        "unknown: no run of such a shape has ended on this machine; give compute.tok"
    )
    assert "price" not in lines

    here = {
        "XDG_CACHE_HOME": str(tmp_path / "cache")
    }  # ranks are forked from a process that was started before
    first = toy.make_run(tmp_path / "first", config)
    assert toy.train(first, environ=here) == [0]
    log = toy.log_of(first)
    assert "forecast for the steps" not in log
    (known,) = earlier_runs.read()
    report = json.loads((first / "report.json").read_text())
    assert known.tokens_per_second == report["throughput"]["tokens_per_second"]
    lines = plan_lines(capsys, file)
    pattern = r"(.+)–(.+) by 1 earlier run of this shape on this machine \(([\d,]+) tokens\)"
    assert re.fullmatch(pattern, lines["time"]), lines["time"]
    assert re.fullmatch(r"[\d.]+–[\d.]+ at 36 for each device and hour", lines["price"]), lines[
        "price"
    ]

    second = toy.make_run(tmp_path / "second", config)
    assert toy.train(second, environ=here) == [0]
    log = toy.log_of(second)
    assert "forecast for the steps: " in log
    assert "by 1 earlier run of this shape on this machine" in log
    hours = json.loads((second / "report.json").read_text())["actuals"]["hours"]
    assert hours["source"] == "1 earlier run of this shape on this machine"
    assert (hours["low"], hours["high"]) == pytest.approx(
        (hours["forecast"] / 1.1, hours["forecast"] * 1.1)
    )
    assert hours["forecast"] == pytest.approx(known.seconds / 3600, rel=0.1)
    assert len(earlier_runs.read()) == 2
