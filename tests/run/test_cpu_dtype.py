"""What `model.dtype: auto` means on a CPU: a plain rule, alike on all ranks, kept to the run's end."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.base import logs
from kubetune.base.cpu import processor
from kubetune.cli import main
from kubetune.config.schema import Config
from kubetune.distributed.process_group import World
from kubetune.result.inference.evaluate_run import evaluate_run
from kubetune.rundir import checkpoints, metrics
from kubetune.training.start import cpu_dtype
from tests import toy
from tests.ranks import run_ranks

PINNED = processor.PINNED
FULL = {"lora": None, "data": {"max_length": 64}}


def starts(run_dir: Path) -> list[dict[str, object]]:
    return [
        event for event in metrics.read_events(run_dir) if event["event"] in ("start", "resume")
    ]


def chosen_on(world: World, config: Config, run_dir: Path) -> str:
    """Return what a rank chooses. Each has another processor: the first has instructions for bfloat16."""
    os.environ.pop(PINNED, None)
    processor.CPU_INFO = run_dir / f"cpuinfo-{world.rank}"
    processor.CPU_INFO.write_text(
        "flags\t\t: fpu avx512_bf16\n" if world.rank == 0 else "flags\t: fpu\n"
    )
    logs.configure("INFO", run_dir, world.rank)
    return cpu_dtype.decide(config.model.dtype, run_dir, world, 4096)


def test_two_ranks_take_what_suits_the_first(inputs: Path, tmp_path: Path) -> None:
    assert run_ranks(chosen_on, 2, toy.make_config(inputs), tmp_path) == ["bfloat16", "bfloat16"]
    reason = "auto -> bfloat16, because this processor has instructions for it (avx512_bf16)"
    assert reason in toy.log_of(tmp_path)
    assert "model.dtype: auto" not in toy.log_of(tmp_path, 1)


def test_a_narrow_model_is_trained_in_float32(inputs: Path, tmp_path: Path) -> None:
    run_dir = toy.make_run(
        tmp_path / "run", toy.make_config(inputs, {"max_steps": 1, "eval_steps": 1})
    )
    assert toy.train(run_dir, environ={PINNED: ""}) == [0]
    assert "auto -> float32, because the model is narrow: its hidden size is 64" in toy.log_of(
        run_dir
    )
    assert [event["dtype"] for event in starts(run_dir)] == ["float32"]


@pytest.mark.parametrize(
    ("cpu_info", "width", "dtype"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\n", 512, "bfloat16"),
        ("flags\t\t: fpu avx512f amx_bf16\n", None, "bfloat16"),
        ("flags\t\t: fpu avx512f avx512_bf16\n", 511, "float32"),
        ("flags\t\t: fpu avx2 avx512f\n", 4096, "float32"),
        ("Features\t: fp asimd bf16\n", 4096, "float32"),
        ("", 4096, "float32"),
    ],
)
def test_bfloat16_is_for_wide_models_and_processors_with_instructions_for_it(
    cpu_info: str,
    width: int | None,
    dtype: str,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(PINNED)
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    if cpu_info:
        (tmp_path / "cpuinfo").write_text(cpu_info)
    config = toy.make_config(inputs)
    assert cpu_dtype.decide(config.model.dtype, tmp_path, World(), width) == dtype
    assert cpu_dtype.decide("float16", tmp_path, World(), width) == "float16"


def test_what_is_pinned_must_be_one_of_two(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PINNED, "fp8")
    with pytest.raises(
        errors.ConfigError, match="KUBETUNE_CPU_DTYPE is 'fp8'; expected float32 or bfloat16"
    ):
        cpu_dtype.decide("auto", tmp_path, World())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("began", "later"),
    [("bfloat16", "float32"), ("float32", "bfloat16")],
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
    assert f"model.dtype: auto -> {began}, as this run began" in toy.log_of(cut)
    assert {event["dtype"] for event in starts(cut)} == {began}
    assert toy.digests(cut) == toy.digests(whole)
    last = [line for line in metrics.read_metrics(cut) if "eval_loss" in line][-1]
    for name, value in evaluate_run(cut, "last").metrics.items():
        assert value == pytest.approx(last[name], rel=1e-6), name
    facts = json.loads((checkpoints.choose(cut, "last") / "config.json").read_text())
    assert facts["dtype"] == began


def test_a_run_that_began_on_a_gpu_chooses_anew(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PINNED, "bfloat16")
    config = toy.make_config(inputs)
    metrics.record_event(tmp_path, "start", step=0, device="NVIDIA H100", dtype="float16")
    assert cpu_dtype.decide(config.model.dtype, tmp_path, World()) == "bfloat16"
    metrics.record_event(tmp_path, "start", step=0, device="CPU", dtype="float32")
    assert cpu_dtype.decide(config.model.dtype, tmp_path, World()) == "float32"


@pytest.mark.parametrize(
    ("dtype", "cpu_info", "width", "reason"),
    [
        (
            "bfloat16",
            "flags\t: fpu avx2\n",
            4096,
            "this processor has no instructions for bfloat16",
        ),
        (
            "bfloat16",
            "flags\t: fpu avx512_bf16\n",
            64,
            "the model is narrow: its hidden size is 64",
        ),
        ("bfloat16", "flags\t: fpu avx512_bf16\n", 4096, None),
        ("float16", "flags\t: fpu avx512_bf16\n", 4096, "processors have fast products of"),
        ("float32", "flags\t: fpu avx512_bf16\n", 4096, None),
        ("auto", "flags\t: fpu avx2\n", 4096, None),
    ],
)
def test_a_dtype_that_auto_would_not_take_is_taken_with_a_word(
    dtype: str,
    cpu_info: str,
    width: int,
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    processor.CPU_INFO.write_text(cpu_info)
    remark = processor.slow_dtype(dtype, width)
    assert (remark is None) is (reason is None)
    if reason is not None:
        assert remark is not None
        assert f"model.dtype: {dtype} may be many times slower than " in remark
        assert reason in remark


def test_a_run_and_its_plan_say_that_a_dtype_is_slow_and_show_no_share_of_a_slow_peak(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is narrow, so that it holds on every processor; float16 has no peak that a share would mean."""
    model = {"path": str(inputs / "model"), "dtype": "float16"}
    config = toy.make_config(inputs, {"max_steps": 1, "eval_steps": 1}, model=model)
    run_dir = toy.finished(tmp_path / "run", config)
    said = "model.dtype: float16 may be many times slower than float32 here, because"
    assert toy.log_of(run_dir).count(f"WARNING: {said}") == 1
    (start,) = starts(run_dir)
    assert "flops_per_token" in start
    assert "peak_tflops" not in start
    assert "MFU" not in toy.log_of(run_dir)

    assert main(["plan", str(run_dir / "config.yaml"), "compute.gpus_per_node=0"]) == 0
    assert said in capsys.readouterr().out
