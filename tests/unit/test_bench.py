"""`kubetune bench`: what follows from rows that were measured, where it is kept, and who takes it from there."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks import table
from benchmarks.results import read_results
from kubetune.cli import main
from kubetune.cli.local import bench
from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.distributed.process_group import World
from kubetune.models.sharded_base import base_shards
from kubetune.plan import measured
from kubetune.plan.model_shapes import read_weights, shapes_of
from kubetune.plan.plan import make_plan
from kubetune.plugins.diagnostics.bench import auto_verdict, cases, inputs, measure
from kubetune.rundir import metrics
from kubetune.rundir.machine import slug
from kubetune.training.start import auto_settings
from tests.tiny import pretend_weights

FAST = 10**15


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def rows(**speeds: float) -> dict[str, dict[str, object]]:
    names = {
        "plain": "LoRA, bfloat16",
        "single": "LoRA, float32",
        "compiled": "LoRA, bfloat16, compiled",
        "layers": "LoRA, bfloat16, compiled layers",
        "fp8": "LoRA, bfloat16, compiled, fp8",
        "alone": "LoRA, bfloat16, one sequence at a time",
    }
    outcome = {"losses": [2.0], "compile_seconds": 60.0, "parameters": 4 * 10**9}
    return {
        f"4B {names[key]}": {"tokens_per_second": speed, **outcome} for key, speed in speeds.items()
    }


def test_the_faster_is_chosen_where_both_were_measured() -> None:
    choice = auto_verdict.choices(
        rows(plain=100, compiled=120, layers=150, fp8=180, alone=50), ["8B", "4B"]
    )
    assert choice.pop("why").startswith(
        "4B LoRA, bfloat16, compiled layers: 150 tokens/s, LoRA, bfloat16: 100; "
    )
    # Of 18,000 tokens, 180 s without compiling are 120 s and 60 s of compiling with it.
    assert choice.pop("compile_from") == pytest.approx(4.0 * 4e9 * 18_000)
    assert choice == {"compile": "layers", "fp8": True, "attention": "padding_free"}
    choice = auto_verdict.choices(rows(plain=100, compiled=101, single=90), ["4B"])
    assert choice.pop("why")
    assert choice == {"compile": False}
    assert auto_verdict.choices({"4B LoRA, bfloat16": {"failed": "out of memory"}}, ["4B"]) == {
        "why": ""
    }


def test_cases_that_compute_the_same_must_begin_with_the_same_loss() -> None:
    timings = rows(plain=100, compiled=120, fp8=180)
    assert auto_verdict.disagreements(timings) == []
    timings["4B LoRA, bfloat16, compiled"]["losses"] = [2.1]
    (message,) = auto_verdict.disagreements(timings)
    assert (
        message
        == "4B LoRA, bfloat16, compiled: the first loss is 2.1000, and 2.0000 of 4B LoRA, bfloat16"
    )


def test_every_case_is_a_run_that_can_be_planned(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    for case in (*cases.on_gpu(), *cases.on_cpu()):
        flags = {"model.path": "m", "data.train": str(tmp_path / "rows.jsonl"), **case.settings}
        make_plan(load_config(None, flags=flags), 100, world_size=1)
    assert inputs.parameters_of("8B") == pytest.approx(8.19e9, rel=0.01)
    assert inputs.parameters_of("0.6B") == pytest.approx(0.596e9, rel=0.01)


@pytest.mark.slow
def test_what_cannot_be_measured_is_a_row(tmp_path: Path) -> None:
    """Real processes: one whose model cannot be made, one that takes too long; then no time is left."""
    wanted = [cases.Case("tiny", "LoRA", {})]
    (row,) = (row for _, row in measure.measure(wanted, tmp_path, "cpu", 0.0))
    assert row == {"failed": "left out: the 0 minutes were over"}
    assert measure._run(["sh", "-c", "echo first; echo last; exit 3"], 60.0) == (3, "last")
    assert measure._run(["sh", "-c", "kill -9 $$"], 60.0)[1].startswith(
        "killed, as the kernel does"
    )
    assert measure._run(["sleep", "600"], 0.1) == (-9, "took longer than 0 s")
    (tmp_path / "tiny").touch()  # in the way of the model's folder
    (row,) = (row for _, row in measure.measure(wanted, tmp_path, "cpu", 60.0))
    assert row["failed"].startswith("its weights could not be made: ")


def test_models_of_random_weights_are_whole(tmp_path: Path) -> None:
    inputs.write_model("tiny", tmp_path)
    weights = read_weights(str(tmp_path), {})
    assert weights is not None
    assert weights.stated
    assert weights.shapes == shapes_of(cases.SHAPES["tiny"])
    inputs.write_rows(tmp_path / "rows.jsonl", 5, 2000)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all(line["prompt"] and line["completion"] for line in lines)


def config_of(folder: Path, **changes: object) -> Config:
    (folder / "config.json").write_text(json.dumps(cases.SHAPES["42M"]))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    flags = {
        "model.path": str(folder),
        "data.train": str(folder / "rows.jsonl"),
        "lora.r": 8,
        **changes,
    }
    return load_config(None, flags=flags)


def test_runs_take_what_was_measured_and_keep_it(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kubetune")
    config = config_of(cache)
    world = World()
    plan = make_plan(config, 10, world_size=1)

    def decided(
        tokens: float = FAST, run: str = "new", config: Config = config
    ) -> dict[str, object]:
        config = auto_settings.decide(config, plan, cache / run, world, tokens)
        return auto_settings.as_event(config.model, config.training)

    assert decided() == {"attention": "auto", "compile": "auto"}
    assert "because it" not in caplog.text
    measured.keep(None, compile="layers", fp8=True, attention="sdpa", why="it was faster")
    assert decided() == {"attention": "sdpa", "compile": "layers"}
    assert (
        "attention auto -> sdpa, compile auto -> layers, because it was faster (measured on 2"
        in caplog.text
    )
    assert "training.fp8: true would be faster here" in caplog.text
    assert decided(tokens=1000) == {
        "attention": "sdpa",
        "compile": False,
    }  # no work that compiling is worth for
    parameters = read_weights(str(cache), {}).parameters
    measured.keep(None, compile=True, compile_from=4.0 * parameters * 1000)
    assert [decided(tokens=n)["compile"] for n in (999, 1000)] == [False, True]
    stated = config_of(cache, **{"model.attention": "padding_free", "training.compile": True})
    assert decided(config=stated) == {"attention": "padding_free", "compile": True}
    # A run that was begun goes on as it began, also where nothing was decided by then.
    for name in ("begun", "older"):
        (cache / name).mkdir()
    metrics.record_event(cache / "begun", "start", step=0, attention="auto", compile=False)
    assert decided(run="begun") == {"attention": "auto", "compile": False}
    metrics.record_event(cache / "older", "start", step=0)
    assert decided(run="older") == {"attention": "auto", "compile": "auto"}


def test_choices_that_are_damaged_or_of_another_torch_choose_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured.keep(None, compile=False, why="w")
    measured.keep("NVIDIA H100", compile="layers", why="g")
    assert (measured.read(None).compile, measured.read("NVIDIA H100").compile) == (False, "layers")
    measured.keep(None, attention="sdpa", why="d")
    assert measured.read(None).compile is False
    monkeypatch.setattr(measured, "version", lambda name: "0")
    assert measured.read(None) == measured.Choices()
    monkeypatch.setattr(measured, "version", version)
    for text in ("{", '{"a": 1}', "[]"):
        measured.place().write_text(text)
        assert measured.read(None) == measured.Choices()


def test_plan_says_what_was_measured(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs.write_model("tiny", cache)
    pretend_weights(cache)
    (cache / "rows.jsonl").write_text('{"prompt": "t7 t8", "completion": " t9"}\n' * 4)
    command = [
        "plan",
        "--model",
        str(cache),
        "--data",
        str(cache / "rows.jsonl"),
        "--lora",
        "compute.gpus_per_node=0",
    ]
    measured.keep(None, compile=False, why="it is faster")
    assert main(command) == 0
    stdout = capsys.readouterr().out
    assert "training.compile: auto -> false, because it is faster (measured on 2" in stdout
    assert "model.dtype: auto -> float32, because KUBETUNE_CPU_DTYPE says so" in stdout


def test_a_busy_machine_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (17.0, 0.0, 0.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert bench._is_busy()
    assert "17.0 processes on 2 cores" in capsys.readouterr().out
    monkeypatch.setattr("os.getloadavg", lambda: (0.4, 17.0, 17.0))
    assert not bench._is_busy()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_whole_benchmark_becomes_tables_and_choices(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    # A case that takes a busy machine long is not what is tested here.
    monkeypatch.setitem(measure.MOST_SECONDS, "cpu", 3600.0)
    output = cache / "here.json"
    assert main(["bench", "--shape", "tiny", "--minutes", "600", "-o", str(output)]) == 0
    report = json.loads(output.read_text())
    speeds = {row["case"]: row.get("tokens_per_second") for row in report["measurements"]}
    assert all(speeds.values()), report
    assert report["disagreements"] == []
    assert "attention" in report["choices"]
    assert measured.read(None) == measured.Choices()  # of a tiny model nothing is kept
    assert "| tiny LoRA, bfloat16 |" in table.render(read_results(output))
    assert slug(report["machine"])


def test_what_gathering_ahead_brings_is_said_where_both_ran() -> None:
    results = {
        f"8B {cases.PARTS}": {"tokens_per_second": 120},
        f"8B {cases.PARTS_LATE}": {"tokens_per_second": 100},
    }
    assert auto_verdict.overlap(results, ["4B", "8B"], "cuda") == (
        "gathering the next layer ahead: 1.20 times the speed (8B)"
    )
    assert "on a CPU this means nothing" in str(auto_verdict.overlap(results, ["8B"], "cpu"))
    assert auto_verdict.overlap(results, ["4B"], "cuda") is None
    assert cases.GATHER_LATE == base_shards.GATHER_LATE
    assert {case.ranks for case in cases.on_gpu(4)} == {1, 4}
    assert {case.ranks for case in cases.on_gpu(1)} == {1}
