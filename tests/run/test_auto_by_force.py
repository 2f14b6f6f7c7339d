"""What `auto` chooses only on GPUs, or for large models, run here by force.

Each setting that can be `auto`, what a run on a CPU never takes of it, and where that is taken by force:

    training.async_save               beside the loop, on a GPU                   test_beside_the_loop.py
    training.gradient_checkpointing   layers recompute, on a GPU                  here
    (sharded gradients)               summed behind each micro-batch, short of    here, and ranks that would differ
                                      memory; once a step where there is room
    model.dtype                       bf16 or fp16 by what the GPU has            here
    quantization                      8 bits, on a single GPU                     here; such a run in test_quantized.py
    training.compile                  ranks of which one has no compiler          here
    model.attention, compile          as `kubetune bench` measured                test_bench.py; such runs in
                                                                                  test_compile.py, test_vision.py
    kubernetes.scheduling.gang        Kueue's or Volcano's                        test_manifests_gang.py
    resume, data.format, problem_type, share_prefixes                             decided alike on every device

Not here, since no CPU has them: kernels of CUDA behind `attention: auto`, Triton's compiler, NCCL, the size of a GPU's
memory. tests/gpu has these.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kubetune.config.schema import LoraConfig
from kubetune.distributed.process_group import World
from kubetune.kernels import pointwise
from kubetune.models import acceleration, loading, quantization
from kubetune.plan import costs, measured
from kubetune.plan.forecast import Forecast
from kubetune.plan.model_shapes import Weights
from kubetune.plan.rank_work import RankWork
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all

slow = pytest.mark.slow
LARGE = 2**40


def on_gpus(run_dir: str, device_bytes: Sequence[int]) -> int:
    """Be a rank that decides as on a GPU with so much memory, which may differ between ranks."""
    plain = costs.forecast

    def on_gpu(work: RankWork, weights: Weights, size: int | None) -> Forecast | None:
        return plain(replace(work, device="cuda"), weights, size)

    acceleration.device_bytes = lambda _: device_bytes[int(os.environ["RANK"])]
    costs.forecast = on_gpu
    return worker.main([run_dir])


SUMMED_ONCE = "gradients are kept whole and summed over the ranks once per step"
RECOMPUTED = "activations of the first 2 layers are recomputed in the backward"


@pytest.mark.parametrize(
    ("sections", "parallelism", "device_bytes", "is_short"),
    [
        pytest.param({"lora": None}, "fsdp", [LARGE, 1], True, id="one is short"),
        pytest.param({"lora": {"r": 4}}, "ddp", [1], True, id="lora", marks=slow),
        pytest.param({"lora": None}, "fsdp", [1, 1], True, id="both are short", marks=slow),
        pytest.param({"lora": None}, "fsdp", [LARGE, LARGE], False, id="room", marks=slow),
    ],
)
def test_ranks_short_of_memory_decide_alike_and_learn_the_same(
    inputs: Path,
    tmp_path: Path,
    sections: dict[str, Any],
    parallelism: str,
    device_bytes: list[int],
    is_short: bool,
) -> None:
    """Ranks that summed gradients at different times would wait for each other for ever."""
    training = {
        "parallelism": parallelism,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
    }
    world_size = len(device_bytes)
    config = toy.make_config(inputs, training, **sections)
    forced = toy.make_run(tmp_path / "forced", config, world_size)
    with started(on_gpus, world_size, str(forced), device_bytes) as ranks:
        assert wait_all(ranks) == [0] * world_size, toy.log_of(forced)
    for rank in range(world_size):
        log = toy.log_of(forced, rank)
        assert (RECOMPUTED in log) is is_short
        assert (SUMMED_ONCE in log) is (parallelism == "fsdp" and not is_short)
    toy.require_like(forced, toy.finished(tmp_path / "plain", config, world_size))


def with_one_compiler(run_dir: str) -> int:
    """Be a rank for which compiling pays, and of which only the first has a compiler."""
    missing = None if os.environ["RANK"] == "0" else "there is no C++ compiler"
    measured.compiles = lambda *_: "auto"  # type: ignore[assignment]
    acceleration.is_worth_compiling = lambda *_: True
    pointwise.can_compile = lambda _: missing
    return worker.main([run_dir])


def test_ranks_compile_all_or_none(inputs: Path, tmp_path: Path) -> None:
    """Those that compile try their kernels on a batch of all ranks."""
    config = toy.make_config(inputs, {"max_steps": 2, "eval_steps": 2, "save_steps": 2})
    run_dir = toy.make_run(tmp_path / "forced", config, 2)
    with started(with_one_compiler, 2, str(run_dir)) as ranks:
        assert wait_all(ranks) == [0, 0], toy.log_of(run_dir)
    assert "kernels stay plain, which is slower: there is no C++ compiler" in toy.log_of(run_dir, 1)
    assert "kernels are compiled" not in toy.log_of(run_dir)
    toy.require_like(run_dir, toy.finished(tmp_path / "plain", config, 2))


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_computes_in_the_16_bits_that_it_has(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bf16)
    dtype = loading.choose_dtype("auto", torch.device("cuda"))
    assert dtype is (torch.bfloat16 if has_bf16 else torch.float16)


@pytest.mark.parametrize(
    ("lora", "num_gpus", "chosen"),
    [(LoraConfig(), 1, "8bit"), (LoraConfig(), 2, "none"), (None, 1, "none")],
)
def test_a_single_gpu_keeps_a_frozen_base_in_8_bits(
    monkeypatch: pytest.MonkeyPatch, lora: LoraConfig | None, num_gpus: int, chosen: str
) -> None:
    monkeypatch.setattr(quantization, "require_bitsandbytes", lambda _: None)
    world = World(0, 0, num_gpus, torch.device("cuda"))
    assert quantization.decide("auto", lora, world) == chosen
