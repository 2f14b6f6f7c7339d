"""Compiled decoder layers: gradients as without, no graph for other cu_seqlens, and plain layers where it cannot be."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kubetune import errors
from kubetune.batching.batch import collate
from kubetune.config.schema import LoraConfig
from kubetune.distributed.process_group import World
from kubetune.kernels.pointwise import Kernels
from kubetune.models import acceleration, compiled_layers
from kubetune.models.acceleration import recompute_activations
from kubetune.models.adapters import fp8
from kubetune.models.adapters.lora import add_lora
from kubetune.models.fused_forwards import swap_forwards
from kubetune.models.learner import Learner
from kubetune.models.padding_free import Route, choose_attention
from kubetune.tasks.causal_lm import TASK
from tests import toy
from tests.architectures import (
    PADDING_FREE,
    PROMISED,
    build_model,
    random_rows,
    randomize_lora,
    relative_error,
    save_model,
    take_gradients,
)

# torch's compiler uses what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings(
    r"ignore::DeprecationWarning:torch\.", r"ignore::UserWarning:torch\."
)

EXACT = 1e-5
# Lengths of sequences: others, and other numbers of tokens in each, one sequence alone in the third.
PACKED_BATCHES = [(37, 5, 64), (21, 100), (50,), (7, 8, 9, 10), (33, 31, 2, 40), (64, 3)]

SHAPES = PROMISED | {
    "gemma3_text": {
        **PADDING_FREE["gemma3_text"],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
}
SHAPES["gemma3_text"]["num_hidden_layers"] = 4

compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def _plain_again() -> Iterator[None]:
    yield
    if "_dynamo" in vars(torch):
        torch._dynamo.reset()


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and guard as ever, but let PyTorch run it, which takes a tenth of the time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def learn(task: Learner, number: int, seed: int | None = 0) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and gradients of a packed batch."""
    if seed is not None:
        torch.manual_seed(seed)
    batch = collate(random_rows(PACKED_BATCHES[number], seed=number))
    loss = float(TASK.backward(task, batch, 1.0 / batch.num_labels))
    return loss, take_gradients(task.model)


def facts(task: Learner) -> tuple[float, float]:
    loss, gradients = learn(task, 0, seed=None)
    return loss, float(torch.cat([g.flatten().float() for g in gradients.values()]).norm())


def compiled(task: Learner) -> tuple[Learner, compiled_layers.CompiledLayers]:
    """Have the layers of a model compiled, by its first packed batch."""
    layers = compiled_layers.compile_layers(task.model)
    assert layers is not None
    task = replace(task, compiled_layers=layers)
    compiled_layers.warm_up(layers, lambda: facts(task))
    return task, layers


def compare(
    model: Any, tolerance: float = EXACT, *, fused: bool | None = True, recompute: int | None = 0
) -> None:
    """Compare gradients of all packed batches, plain and by compiled layers, for which the first one's graphs are enough.

    `fused`: what `swap_forwards` is told; None where it has been called.
    """
    task = Learner(model, choose_attention(model))
    assert task.route.padding_free
    expected = [learn(task, number) for number in range(len(PACKED_BATCHES))]
    if fused:
        task.kernels.compile()
    if fused is not None:
        swap_forwards(model, task.kernels if fused else None, ExitStack())
    if recompute != 0:
        recompute_activations(model, recompute)
    task, layers = compiled(task)
    assert layers.is_on
    learn(task, 1)  # pointwise functions around the layers are tried once before they are compiled
    graphs = compiled_layers.graphs()
    results = [learn(task, number) for number in range(len(PACKED_BATCHES))]
    assert compiled_layers.graphs() == graphs
    for (loss, gradients), (expected_loss, expected_gradients) in zip(
        results, expected, strict=True
    ):
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        assert relative_error(gradients, expected_gradients) <= tolerance


@pytest.mark.slow
@pytest.mark.usefixtures("without_inductor")
def test_other_sequences_need_no_other_graph() -> None:
    compare(
        build_model("llama", {**PROMISED["llama"], "num_hidden_layers": 2}, lora=False), fused=False
    )


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_gradients_are_those_of_plain_layers(name: str, lora: bool) -> None:
    compare(build_model(name, SHAPES[name], lora=lora))


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("recompute", [None, 1])
def test_layers_that_recompute_stay_exact(recompute: int | None) -> None:
    compare(build_model("llama", SHAPES["llama"]), recompute=recompute)


@pytest.mark.slow
@compiles
def test_dora_stays_exact() -> None:
    model = add_lora(
        build_model("llama", SHAPES["llama"], lora=False),
        LoraConfig(r=4, use_dora=True),
        task_type="CAUSAL_LM",
        seed=0,
    )
    randomize_lora(model)
    compare(model)


@pytest.mark.slow
@compiles
def test_layers_in_8_bit_floats_give_what_they_give_without_compiling() -> None:
    model = build_model("llama", SHAPES["llama"], dtype=torch.bfloat16)
    swap_forwards(model, None, ExitStack())
    assert fp8.round_layers(model, Kernels())
    compare(model, 0.1, fused=None)  # other roundings of bf16 flip some of 8 bits


@pytest.mark.slow
@compiles
def test_dropout_draws_by_the_seed_alike_in_layers_that_recompute() -> None:
    settings = LoraConfig(r=4, dropout=0.2, target_modules="all-linear")
    results = []
    for recompute in (0, None):
        base = build_model("llama", SHAPES["llama"], lora=False)
        model = add_lora(base, settings, task_type="CAUSAL_LM", seed=0)
        randomize_lora(model)
        task = Learner(model, choose_attention(model))
        swap_forwards(model, None, ExitStack())
        if recompute is None:
            recompute_activations(model, None)
        task, layers = compiled(task)
        assert layers.is_on
        results.append(learn(task, 1))
        assert learn(task, 1)[0] == results[-1][0]
        assert learn(task, 1, seed=1)[0] != results[-1][0]
    assert results[0][0] == pytest.approx(results[1][0], rel=EXACT)
    assert relative_error(results[0][1], results[1][1]) <= EXACT


def refusing(*_: Any) -> Any:
    raise NotImplementedError("no such loop")


def miscompiling(graph: Any, _: Any) -> Callable[..., Any]:
    return lambda *args: [
        t * 1.01 if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in graph.forward(*args)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "limit", "message"),
    [
        (refusing, 8, "no such loop"),
        (miscompiling, 8, "became"),
        ("eager", 1, "recompile limit exceeded"),
    ],
    ids=["fails", "differs", "limit"],
)
def test_layers_run_as_they_are_where_compiling_them_fails(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backend: Any,
    limit: int,
    message: str,
) -> None:
    """The last layer leaves out rows, which makes it another graph than the first: one too many for a limit of one."""
    model = build_model("llama", {**PROMISED["llama"], "num_hidden_layers": 2})
    task = Learner(model, choose_attention(model))
    swap_forwards(model, None, ExitStack())
    expected = learn(task, 1)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    from torch._dynamo import config

    with config.patch(recompile_limit=limit):
        task, layers = compiled(task)
        assert not layers.is_on
        result = learn(task, 1)
    assert result[0] == expected[0]
    assert relative_error(result[1], expected[1]) == 0.0
    assert caplog.text.count("layers run without torch.compile from now on") == 1
    assert message in caplog.text


def test_layers_whose_experts_have_adapters_are_left_out_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build_model("deepseek_v3", PADDING_FREE["deepseek_v3"])
    assert compiled_layers.compile_layers(model) is None
    assert "3 of 3 layers have adapters on stacked experts: not compiled" in caplog.text


def test_where_it_cannot_work_it_is_refused_or_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").touch()
    config = toy.make_config(tmp_path, {"compile": "layers"})
    with pytest.raises(ValueError, match=r"does not work with training\.compile: true or layers"):
        toy.make_config(tmp_path, {"compile": "layers", "parallelism": "fsdp"}, lora=None)
    model = build_model("llama", SHAPES["llama"])
    workload = acceleration.Workload(1)
    here = World(device=torch.device("cpu"))
    monkeypatch.setattr(shutil, "which", lambda _: "g++")
    acceleration.tune(Learner(model, Route(False)), config.training, workload, here)
    assert (
        "training.compile is layers, but no layer of this model is compiled: it takes one sequence"
        in caplog.text
    )
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(errors.ConfigError, match=r"training\.compile is layers, but there is no C"):
        acceleration.tune(Learner(model, Route(True)), config.training, workload, here)


# Seconds for a run that compiles: on a crowded machine the C++ compiler alone takes minutes.
PATIENCE = 900.0


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_killed_run_goes_on_bit_for_bit_with_kernels_compiled_anew(
    tmp_path: Path, dropout: float
) -> None:
    inputs = toy.make_inputs(tmp_path)
    save_model(tmp_path / "model", "qwen3")
    lora = {"r": 4, "dropout": dropout}
    config = toy.make_config(inputs, {"compile": "layers", "num_train_epochs": 1}, lora=lora)
    whole = toy.finished(tmp_path / "whole", config, seconds=PATIENCE)
    log = toy.log_of(whole)
    assert "2 layers compiled: " in log
    assert "without torch.compile" not in log
    cut = toy.make_run(tmp_path / "cut", config)
    killed = {"KUBETUNE_FAULT": f"signal {signal.SIGKILL:d}:commit.written:2"}
    assert toy.train(cut, environ=killed, seconds=PATIENCE) == [-9]
    anew = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "empty")}
    assert toy.train(cut, environ=anew, seconds=PATIENCE) == [0]
    assert toy.digests(cut) == toy.digests(whole)
    if not dropout:
        plain = toy.finished(
            tmp_path / "plain", toy.make_config(inputs, {"compile": False, "num_train_epochs": 1})
        )
        assert toy.losses(whole) == pytest.approx(toy.losses(plain), rel=1e-4)
