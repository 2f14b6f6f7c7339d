"""Compiled pointwise functions: taken from the second step on, and only where they give what the plain ones give."""

from __future__ import annotations

import shutil
import signal
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kubetune import errors
from kubetune.data.text.class_labels import Labels
from kubetune.distributed.process_group import World
from kubetune.kernels import pointwise
from kubetune.kernels.pointwise import Kernels, can_compile
from kubetune.models.acceleration import Workload, wants_compile
from kubetune.models.model_spec import ModelSpec
from kubetune.rundir import metrics
from kubetune.tasks import task_of
from kubetune.training.stop import StopRequest
from tests import reviews, toy
from tests.pictures import save_seeing_model, write_questions


def example() -> tuple[Tensor, Tensor, float, float, float]:
    """Return what a cross-entropy over 5 rows and 11 words gets."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 11, generator=generator), torch.arange(5), 0.5, 1.0, 0.0


def compile_to(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    monkeypatch.setattr(torch, "compile", lambda plain, dynamic: function)


def test_a_compiled_function_takes_over_where_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_to(monkeypatch, compiled := lambda *args: pointwise.cross_entropy(*args))
    expected = pointwise.cross_entropy(*example())
    kernels = Kernels()
    others = Kernels()
    assert kernels["cross_entropy"] is pointwise.cross_entropy
    kernels.compile()
    for ours, plain in zip(kernels["cross_entropy"](*example()), expected, strict=True):
        assert torch.equal(ours, plain)
    assert kernels["cross_entropy"] is compiled
    assert others["cross_entropy"] is pointwise.cross_entropy  # of another run in the same process


def wrong(*args: Any) -> Any:
    loss, gradient = pointwise.cross_entropy(*args)
    return loss, gradient * 1.001


def failing(*args: Any) -> Any:
    from torch._dynamo.exc import Unsupported

    raise Unsupported("no such loop", case_name="test")


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\.", r"ignore::UserWarning:torch\.")
def test_a_stop_leaves_the_compiler_and_the_run_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may take longer than the grace time, within which there has to be a checkpoint."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = StopRequest().install()
    made = list[str]()
    stop.defer()

    def signalling_backend(graph: Any, inputs: Any) -> Any:
        made.append("begun")
        signal.raise_signal(signal.SIGTERM)
        made.append("done")
        return graph.forward

    plain = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **options: plain(function, **options, backend=signalling_backend),
    )
    monkeypatch.setitem(pointwise._PLAIN, "sum", lambda x: x + x)
    monkeypatch.setitem(pointwise._PLAIN, "product", lambda x: x * x)
    try:
        kernels = Kernels()
        kernels.compile()
        assert kernels["sum"](torch.ones(2)).tolist() == [2, 2]
        assert kernels["product"](torch.ones(2)).tolist() == [1, 1]
    finally:
        torch.compiler.set_stance("default")
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stop.requested
    assert made == ["begun"]
    reason = "backend='signalling_backend' raised: CompilingStopped: the run is to stop"
    message = f"<lambda> runs without torch.compile: {reason}"
    assert [
        record.getMessage() for record in caplog.records if record.name == "kubetune.MODEL"
    ] == [message]


@pytest.mark.parametrize(
    ("function", "reason"), [(wrong, "its result differs"), (failing, "no such loop")]
)
def test_one_that_differs_or_cannot_be_compiled_stays_plain(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    function: Callable[..., Any],
    reason: str,
) -> None:
    compile_to(monkeypatch, function)
    kernels = Kernels()
    kernels.compile()
    expected = pointwise.cross_entropy(*example())
    for ours, plain in zip(kernels["cross_entropy"](*example()), expected, strict=True):
        assert torch.equal(ours, plain)
    assert kernels["cross_entropy"] is pointwise.cross_entropy
    assert f"cross_entropy runs without torch.compile: {reason}" in caplog.text


def test_a_run_without_a_compiler_says_that_kernels_stay_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Only where they would be compiled: not in a run too short to earn it back."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    caplog.set_level("INFO", "kubetune")
    model = torch.nn.Linear(8, 8)
    for device, needed in (("cpu", "C++ compiler (g++)"), ("cuda", "C compiler (gcc)")):
        caplog.clear()
        assert not wants_compile("auto", model, Workload(total_tokens=1000), torch.device(device))
        assert not caplog.messages
        assert not wants_compile("auto", model, Workload(total_tokens=10**15), torch.device(device))
        (message,) = caplog.messages
        assert f"kernels stay plain, which is slower: there is no {needed}" in message
    (tmp_path / "gcc").touch(0o755)
    assert can_compile(torch.device("cuda")) is None
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python.h" in str(can_compile(torch.device("cuda")))


# For a run that compiles kernels on a machine that does much else.
PATIENCE = 600.0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("step", [1, 6])
def test_a_compiled_run_starts_plain_and_goes_on_bit_for_bit(tmp_path: Path, step: int) -> None:
    inputs = toy.make_inputs(tmp_path / "inputs")
    plain = toy.losses(
        toy.finished(tmp_path / "plain", toy.make_config(inputs, {"compile": False}))
    )
    config = toy.make_config(inputs, {"compile": True})
    whole = toy.finished(tmp_path / "whole", config, seconds=PATIENCE)
    compiled = toy.losses(whole)
    assert compiled[0] == plain[0]
    assert compiled != plain
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert "pointwise kernels are compiled after the first step" in toy.log_of(whole)
    (compiling,) = (event for event in metrics.read_events(whole) if event["event"] == "compile")
    assert compiling["step"] == 1
    assert compiling["seconds"] > 0
    cut = toy.make_run(tmp_path / "cut", config)
    stopped = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM:d}:step:{step}:0"}
    assert toy.train(cut, environ=stopped, seconds=PATIENCE) == [errors.PREEMPTED]
    assert toy.train(cut, seconds=PATIENCE) == [0]
    assert toy.digests(cut) == toy.digests(whole)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("kind", "setting", "is_planned"),
    [
        ("qwen3", "auto", True),
        ("bert", "auto", False),
        ("bert", True, True),
        ("vision", "auto", False),
    ],
)
def test_auto_compiles_neither_an_encoder_nor_a_model_that_sees(
    kind: str, setting: bool | str, is_planned: bool, tmp_path: Path
) -> None:
    if kind == "vision":
        save_seeing_model(tmp_path / "model")
        write_questions(tmp_path, "train", 16)
        write_questions(tmp_path, "eval", 8)
        config = toy.make_config(tmp_path, {"compile": setting}, task="vision_language")
    else:
        config = reviews.make_config(reviews.make_inputs(tmp_path, kind), {"compile": setting})
    labels = None if kind == "vision" else Labels("single_label_classification", ("bad", "good"))
    learner = task_of(config.task_name).build(
        ModelSpec.of(config), config.training, World(), Workload(10**12, labels)
    )
    assert learner.kernels.is_planned == is_planned
    learner.undo.close()
