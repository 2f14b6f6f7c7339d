"""Releases of torch without the private names that make our code faster: a run learns the same, and says what it lacks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.utils import _http
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from transformers import AutoModelForSequenceClassification, LlamaConfig

from kubetune.data.reading import hub
from kubetune.kernels import pointwise
from kubetune.kernels.attention import blockwise, joined
from kubetune.kernels.attention.blockwise import Rule
from kubetune.models import attention_hooks, compiled_layers, fsdp
from kubetune.models.adapters import fp8
from kubetune.models.mixtures import stacked_experts
from kubetune.rundir.tracking.tensorboard_tracker import TensorBoardSink
from kubetune.rundir.tracking.tracker_queue import TrackedRun
from kubetune.training import worker
from kubetune.training.optimizer import adam_step, adamw_sharded, occurring_rows, weight_copies
from kubetune.training.optimizer.adam_step import AdamSettings
from kubetune.training.optimizer.adamw import FlatAdamW
from tests import toy
from tests.ranks import started, wait_all

GONE = "_gone_in_this_release"
FULL: dict[str, Any] = {"lora": None}
SHORT = {"max_steps": 4, "eval_steps": 4, "save_steps": 4, "learning_rate": 1e-3}


def worker_without_names(arguments: Sequence[str]) -> int:
    """Be a rank of a release of torch in which the names have other names."""
    adam_step.FUSED_STEP = None
    weight_copies.COPY_ALL = None
    adamw_sharded.STATE = GONE
    blockwise.SOFTMAX_BACKWARD = None
    return worker.main(arguments)


def trained(run_dir: Path, config: Any, main: Callable[[Sequence[str]], int], ranks: int) -> Path:
    """Train a run by `main` in each rank, and return its directory."""
    toy.make_run(run_dir, config, ranks)
    with started(main, ranks, [str(run_dir)]) as processes:
        codes = wait_all(processes, toy.SECONDS)
    assert codes == [0] * ranks, toy.log_of(run_dir)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize(("parallelism", "ranks"), [("ddp", 1), ("fsdp", 2)])
def test_a_run_without_them_learns_the_same(
    tmp_path: Path, inputs: Path, parallelism: str, ranks: int
) -> None:
    config = toy.make_config(inputs, {**SHORT, "parallelism": parallelism}, **FULL)
    with_names = trained(tmp_path / "with", config, worker.main, ranks)
    without = trained(tmp_path / "without", config, worker_without_names, ranks)
    assert "has no fused AdamW" not in toy.log_of(with_names)
    assert "cannot move slices" not in toy.log_of(with_names)
    assert "has no fused AdamW" in toy.log_of(without)
    assert ("cannot move slices" in toy.log_of(without)) == (parallelism == "fsdp")
    toy.require_like(without, with_names)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_plain_step_is_the_fused_one(decay: float) -> None:
    settings = AdamSettings(weight_decay=decay)
    generator = torch.Generator().manual_seed(0)
    optimizers = []
    for _ in range(2):
        optimizers.append(FlatAdamW([("w", nn.Parameter(torch.ones(4, 5)))], settings))
    fused, plain = optimizers
    for step in range(1, 6):
        gradient = torch.randn(20, generator=generator)
        for optimizer in optimizers:
            optimizer.gradient.copy_(gradient)
        buffers = plain._buffers(slice(0, 20))
        adam_step.plain_step(buffers, step, 1e-2, settings, decay)
        fused.update(1e-2)
        for name in ("master", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(getattr(plain, name), getattr(fused, name))


def test_rows_of_a_sparse_gradient_add_up_to_the_same() -> None:
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[2, 0, 2]]),
        torch.tensor([[1.0], [2.0], [3.0]]),
        (4, 1),
        check_invariants=True,
    )

    def summed(gradient: Any) -> list[float]:
        places, values = occurring_rows._rows_of(gradient)
        total: list[float] = torch.zeros(4, 1).index_add_(0, places, values)[:, 0].tolist()
        return total

    public = SimpleNamespace(coalesce=gradient.coalesce)
    assert summed(gradient) == summed(public) == [2.0, 0.0, 4.0, 0.0]


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -0.2])])
def test_attention_has_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch, sinks: Tensor | None
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(7, 2, 4, requires_grad=True) for _ in range(3)]

    def gradients() -> tuple[Tensor, ...]:
        out = blockwise.block_attention(*inputs, sinks, (0, 5, 7), Rule(0.5))
        return torch.autograd.grad(out.square().sum(), inputs)

    expected = gradients()
    monkeypatch.setattr(blockwise, "SOFTMAX_BACKWARD", None)
    for ours, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_long_rows_with_shared_beginnings_go_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    torch.manual_seed(0)
    monkeypatch.setattr(attention_hooks, "LONG_SHARED", 4)
    q, k, v = (torch.randn(9, 2, 8) for _ in range(3))
    layout = ((0, 4, 7, 9), (-1, 0, 0))
    expected = attention_hooks.shared_attention(q, k, v, None, layout, Rule(0.3))

    joined.is_available.cache_clear()
    monkeypatch.setattr(joined, "FLASH_ON_CPU", GONE)
    monkeypatch.delattr(joined, "joined_attention")
    output = attention_hooks.shared_attention(q, k, v, None, layout, Rule(0.3))
    torch.testing.assert_close(output, expected)
    assert "no attention kernel by a name that is known here" in caplog.text
    joined.is_available.cache_clear()


def test_products_of_8_bits_are_the_same_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 32).to(torch.float8_e4m3fn)
    weight = torch.randn(48, 32).to(torch.float8_e4m3fn)
    arguments = (x, torch.rand(16, 1), weight, torch.rand(48, 1), torch.bfloat16)
    expected = fp8._product(*arguments)
    monkeypatch.setattr(fp8, "SCALED_MM", None)
    torch.testing.assert_close(fp8._product(*arguments), expected, rtol=2e-2, atol=2e-2)


def test_a_new_head_is_drawn_as_transformers_draws_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9
    )
    model = AutoModelForSequenceClassification.from_config(config)
    fsdp._draw(3, model, {"score.weight"})
    expected = model.score.weight.detach().clone()
    nn.init.zeros_(model.score.weight)
    monkeypatch.setattr(fsdp, "INIT_WEIGHTS", GONE)
    fsdp._draw(3, model, {"score.weight"})
    assert torch.equal(model.score.weight, expected)
    assert "the new head is drawn by initializer_range" in caplog.text


def test_any_error_leads_back_from_a_compiler_whose_errors_are_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.exc", None)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", None)
    assert pointwise.compiler_errors() == (Exception,)
    assert compiled_layers.graphs() == 0


def test_experts_that_do_not_say_how_they_compute_are_left_to_transformers() -> None:
    module = nn.Module()
    for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"):
        assert not stacked_experts.is_described(module)
        setattr(module, name, True)
    assert stacked_experts.is_described(module)


@pytest.mark.parametrize(("asked", "seconds"), [("30", 30.0), ("soon", 0.0), ("", 0.0)])
def test_a_wait_that_the_hub_asks_for_is_read_without_its_client(
    monkeypatch: pytest.MonkeyPatch, asked: str, seconds: float
) -> None:
    monkeypatch.delattr(_http, "_parse_retry_after")
    response = SimpleNamespace(status_code=503, headers={"retry-after": asked})
    assert hub._wait_asked_for(response) == seconds


def test_curves_are_written_by_another_thread_of_tensorboard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = TrackedRun("a", tmp_path, "causal_lm", "lora", "model", {})
    sink = TensorBoardSink(run, "name: a\n", 0)

    def opened(*arguments: Any, **settings: Any) -> SummaryWriter:
        writer = SummaryWriter(*arguments, **settings)
        events = writer.file_writer.event_writer
        names = ("add_event", "flush", "close", "get_logdir")
        writer.file_writer.event_writer = SimpleNamespace(
            **{name: getattr(events, name) for name in names}
        )
        return writer

    sink._open = opened
    with caplog.at_level(logging.INFO):
        sink.begin()
    assert "does not tell of a full disk" in caplog.text
    sink.send([(1, 2.0, {"loss": 3.0})])
    for _, part in sink.closing("FINISHED"):
        part()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in file.read_bytes()
