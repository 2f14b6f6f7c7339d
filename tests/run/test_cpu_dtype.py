"""What `model.dtype: auto` means on a CPU: measured where a run begins, alike on all ranks, kept to the run's end."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kubetune import errors
from kubetune.base import logs
from kubetune.config.schema import Config
from kubetune.distributed.process_group import World
from kubetune.kernels import product_speed
from kubetune.plan import measured
from kubetune.result.inference.evaluate import evaluate_run
from kubetune.rundir import checkpoints, metrics
from kubetune.training.start import cpu_dtype
from tests import toy
from tests.ranks import run_ranks

PINNED = measured.PINNED
FULL = {"lora": None, "data": {"max_length": 64}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))


def log_of(run_dir: Path, rank: int = 0) -> str:
    return (run_dir / "logs" / f"rank-{rank}.log").read_text()


def starts(run_dir: Path) -> list[dict[str, object]]:
    return [
        event for event in metrics.read_events(run_dir) if event["event"] in ("start", "resume")
    ]


def chosen_on(world: World, config: Config, run_dir: Path) -> str:
    os.environ.pop(PINNED, None)
    os.environ["XDG_CACHE_HOME"] = str(run_dir / "cache")
    logs.configure("INFO", run_dir, world.rank)
    return cpu_dtype.decide(config, run_dir, world).model.dtype


def test_two_ranks_take_what_the_first_measured(inputs: Path, tmp_path: Path) -> None:
    first, second = run_ranks(chosen_on, 2, toy.make_config(inputs), tmp_path)
    assert first == second
    said = r"auto -> (\w+), because a core multiplies matrices at ([\d.e+]+) GFLOP/s here in bfloat16, ([\d.e+]+) in float"
    found = re.search(said, log_of(tmp_path))
    assert found, log_of(tmp_path)
    assert found[1] == first
    halves, singles = float(found[2]), float(found[3])
    if not 1.19 < halves / singles < 1.21:  # what is printed is rounded
        assert (first == "bfloat16") == (halves > 1.2 * singles)
    assert "model.dtype: auto" not in log_of(tmp_path, 1)


def test_a_narrow_model_is_not_measured(inputs: Path, tmp_path: Path) -> None:
    run_dir = toy.make_run(
        tmp_path / "run", toy.make_config(inputs, {"max_steps": 1, "eval_steps": 1})
    )
    assert toy.train(run_dir, environ={PINNED: ""}) == [0]
    assert "auto -> float32, because the model is narrow: its hidden size is 64" in log_of(run_dir)
    assert [event["dtype"] for event in starts(run_dir)] == ["float32"]


@pytest.mark.parametrize(
    ("halves", "chosen"), [(0.068, "float32"), (0.15, "float32"), (0.54, "bfloat16")]
)
def test_the_faster_is_taken(
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    halves: float,
    chosen: str,
) -> None:
    caplog.set_level("INFO", "kubetune")
    monkeypatch.delenv(PINNED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(product_speed, "_series", lambda *_: {"float32": 0.135, "bfloat16": halves})
    config = toy.make_config(inputs)
    assert cpu_dtype.decide(config, tmp_path, World()).model.dtype == chosen
    # Of the machine, and so not measured again, until another torch is there.
    monkeypatch.setattr(product_speed, "of_core", lambda: ({"float32": 1.0, "bfloat16": 1.0}, True))
    assert cpu_dtype.decide(config, tmp_path / "next", World(), 4096).model.dtype == chosen
    assert "(measured on 2" in caplog.messages[-1]
    assert measured.cpu_dtype(4096) == (chosen, caplog.messages[-1].partition("because ")[2])
    monkeypatch.setattr(measured, "version", lambda name: "99.0")
    assert measured.cpu_dtype(4096) is None
    assert cpu_dtype.decide(config, tmp_path / "last", World(), 4096).model.dtype == "float32"
    stated = toy.make_config(inputs, model={"path": str(inputs / "model"), "dtype": "float16"})
    assert cpu_dtype.decide(stated, tmp_path, World()) == stated


def test_measuring_takes_few_products_where_they_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        product_speed, "SECONDS", 0.0
    )  # where they are fast, as many as that long takes
    threads = torch.get_num_threads()
    with FlopCounterMode(display=False) as counter:
        assert all(speed > 0 for speed in product_speed.of_core()[0].values())
    assert 0 < counter.get_total_flops() < 1e9
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("readings", "dtype", "is_kept"),
    [
        ([(0.1, 0.4), (0.1, 0.4)], "bfloat16", True),
        ([(0.0014, 0.09), (0.1, 0.09), (0.1, 0.1)], "float32", True),  # the first was disturbed
        ([(0.1, 0.05), (0.01, 0.05), (0.1, 0.05), (0.01, 0.05), (0.1, 0.05)], "float32", False),
    ],
)
def test_readings_that_differ_are_repeated_and_not_kept(
    readings: list[tuple[float, float]], dtype: str, is_kept: bool, inputs: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "kubetune")
    left = iter([readings[0], *readings])  # the first prepares the kernels
    monkeypatch.delenv(PINNED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        product_speed,
        "_series",
        lambda *_: dict(zip(("float32", "bfloat16"), next(left), strict=True)),
    )
    assert cpu_dtype.decide(toy.make_config(inputs), tmp_path, World()).model.dtype == dtype
    assert next(left, None) is None
    assert (measured.cpu_dtype(4096) is not None) is is_kept
    assert (
        "readings differed widely, so they hold for this run alone" in caplog.text
    ) is not is_kept


def test_an_old_reading_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PINNED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measured.keep(None, dtype="bfloat16", why="w")
    measured.keep(None, compile=False)
    assert measured.cpu_dtype(4096) is not None
    for old in (
        '"dtype_time": "2026-01-',
        '"was": "20',
    ):  # long ago, and by a version that kept no day
        written = re.sub(r'"dtype_time": "(.{8}|2026-01-)', old, measured.place().read_text())
        measured.place().write_text(written)
        assert measured.cpu_dtype(4096) is None
        assert measured.read(None).compile is False


def test_what_is_pinned_must_be_one_of_two(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PINNED, "fp8")
    with pytest.raises(
        errors.ConfigError, match="KUBETUNE_CPU_DTYPE is 'fp8'; expected float32 or bfloat16"
    ):
        cpu_dtype.decide(toy.make_config(inputs), tmp_path, World())


@pytest.mark.parametrize(
    ("began", "later"),
    [("bfloat16", "float32"), pytest.param("float32", "bfloat16", marks=pytest.mark.slow)],
)
def test_a_run_goes_on_and_is_evaluated_in_what_it_began_with(
    inputs: Path, tmp_path: Path, began: str, later: str
) -> None:
    config = toy.make_config(inputs, {"num_train_epochs": 1}, **FULL)
    whole = toy.make_run(tmp_path / "whole", config)
    assert toy.train(whole, environ={PINNED: began}) == [0]
    cut = toy.make_run(tmp_path / "cut", config)
    killed = {"KUBETUNE_FAULT": f"signal {signal.SIGKILL:d}:commit.written:2", PINNED: began}
    assert toy.train(cut, environ=killed) == [-signal.SIGKILL]
    assert toy.train(cut, environ={PINNED: later}) == [0]
    assert f"model.dtype: auto -> {began}, as this run began" in log_of(cut)
    assert {event["dtype"] for event in starts(cut)} == {began}
    assert toy.digests(cut) == toy.digests(whole)
    last = [line for line in metrics.read_metrics(cut) if "eval_loss" in line][-1]
    for name, value in evaluate_run(cut, "last").metrics.items():
        assert value == pytest.approx(last[name], rel=1e-6), name
    facts = json.loads((checkpoints.choose(cut, "last") / "config.json").read_text())
    assert facts["dtype"] == began


def test_runs_of_older_versions_go_on_in_float32(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PINNED, "bfloat16")
    config = toy.make_config(inputs)
    metrics.record_event(tmp_path, "start", step=0, device="NVIDIA H100")
    assert cpu_dtype.decide(config, tmp_path, World()).model.dtype == "bfloat16"
    metrics.record_event(tmp_path, "start", step=0, device="CPU")
    assert cpu_dtype.decide(config, tmp_path, World()).model.dtype == "float32"
