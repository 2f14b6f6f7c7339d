"""The hot path on a CUDA device, against plain transformers on the CPU, and a real run that is killed and goes on.

    scripts/test tests/gpu

Everything here is skipped without a GPU. The rest of the suite takes a GPU too where there is one; this is what only a
GPU has.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kubetune.batching.batch import collate
from kubetune.data.prepared.micro_batches import pack
from kubetune.kernels.attention import varlen
from kubetune.kernels.attention.blockwise import Rule, block_attention
from kubetune.kernels.attention.joined import joined_attention
from kubetune.kernels.pointwise import Kernels
from kubetune.models import compiled_layers
from kubetune.models.acceleration import recompute_activations
from kubetune.models.adapters import fp8
from kubetune.models.fused_forwards import swap_forwards
from kubetune.models.learner import Learner
from kubetune.models.padding_free import choose_attention
from kubetune.tasks.causal_lm import TASK
from tests import toy
from tests.architectures import (
    PROMISED,
    build_model,
    random_rows,
    reference_gradients,
    relative_error,
    save_model,
    take_gradients,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = torch.device("cuda")
EXACT = 1e-5
# bf16 keeps eight bits; over three layers the gradient of plain transformers in bf16 is off by about 2 %.
HALF = 0.05
CU_SEQLENS = (0, 3, 300, 340, 1500)


@pytest.fixture
def fused() -> Kernels:
    """Return pointwise kernels compiled, by Triton on a GPU."""
    kernels = Kernels()
    kernels.compile()
    return kernels


def gradients_on_gpu(
    model: Any, rows: list[tuple[Any, Any]], kernels: Kernels | None = None
) -> dict[str, Tensor]:
    """Return the gradients by kubetune's own way, in packed batches, back on the CPU and in fp32."""
    route = choose_attention(model)
    assert route.padding_free, route.why_not
    lengths = np.array([len(ids) for ids, _ in rows])
    labels = sum(int(trained[1:].sum()) for _, trained in rows)
    task = Learner(model, route, kernels=kernels or Kernels())
    for group in pack(np.arange(len(rows)), lengths, 350):
        TASK.backward(task, collate([rows[i] for i in group]).to(DEVICE), 1.0 / labels)
    return {name: gradient.float().cpu() for name, gradient in take_gradients(model).items()}


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", PROMISED)
def test_gradients_equal_those_of_the_cpu(name: str, lora: bool) -> None:
    model = build_model(name, PROMISED[name], lora=lora)
    rows = random_rows()
    _, exact = reference_gradients(model, rows)
    assert relative_error(gradients_on_gpu(model.to(DEVICE), rows), exact) <= EXACT


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\.", r"ignore::UserWarning:torch\.")
@pytest.mark.parametrize("name", PROMISED)
def test_half_precision_takes_the_varlen_kernel_and_every_cheaper_forward(
    name: str, fused: Kernels
) -> None:
    """Compiled norms, SwiGLU, rotary embeddings and cross-entropy, and a layer that recomputes."""
    model = build_model(name, PROMISED[name])
    rows = random_rows()
    _, exact = reference_gradients(model, rows)
    model = model.to(DEVICE, torch.bfloat16)
    recompute_activations(model, 1)
    swap_forwards(model, fused, ExitStack())
    assert relative_error(gradients_on_gpu(model, rows, fused), exact) <= HALF


@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\.", r"ignore::UserWarning:torch\.")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
def test_compiled_layers_are_exact_and_need_no_other_graph(
    name: str, recompute: bool, fused: Kernels
) -> None:
    """Recomputed layers run in a thread of autograd's own there, under what that thread takes for the settings."""
    model = build_model(name, PROMISED[name])
    batches = [random_rows(), random_rows((50, 90, 7), seed=1)]
    exact = [reference_gradients(model, rows)[1] for rows in batches]
    model = model.to(DEVICE)
    swap_forwards(model, fused, ExitStack())
    if recompute:
        recompute_activations(model)

    def learn() -> tuple[float, float]:
        norm = float(
            torch.cat(
                [g.flatten() for g in gradients_on_gpu(model, batches[0], fused).values()]
            ).norm()
        )
        return norm, norm

    layers = compiled_layers.compile_layers(model)
    assert layers is not None
    compiled_layers.warm_up(layers, learn)
    assert layers.is_on
    learn()  # pointwise functions around the layers are tried once before they are compiled
    graphs = compiled_layers.graphs()
    gradients = [gradients_on_gpu(model, rows, fused) for rows in batches]
    assert compiled_layers.graphs() == graphs
    assert max(map(relative_error, gradients, exact)) <= EXACT


@pytest.mark.parametrize("rule", [Rule(0.2), Rule(0.2, window=7), Rule(0.2, causal=False)])
def test_varlen_attention_equals_the_exact_one(rule: Rule) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(CU_SEQLENS[-1], heads, 64, device=DEVICE, dtype=torch.bfloat16)
        for heads in (4, 2, 2)
    )
    if not varlen.varlen_fits(q, v):
        pytest.skip("this torch has no varlen attention with windows")
    weight = torch.randn(CU_SEQLENS[-1], 4, 64, device=DEVICE)
    results = []
    for run, dtype in ((varlen.varlen_attention, torch.bfloat16), (_block, torch.float32)):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out = run(*inputs, CU_SEQLENS, rule).float()
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert float((ours.float() - theirs.float()).norm()) <= 0.02 * float(theirs.float().norm())


def _block(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], rule: Rule) -> Tensor:
    return block_attention(q, k, v, None, cu_seqlens, rule)


def test_shared_beginnings_are_joined_to_the_exact_attention() -> None:
    torch.manual_seed(0)
    cu_seqlens = (0, 200, 430, 435, 900, 1100, 1200)
    parents = (-1, 0, 1, 1, 0, -1)
    q, k, v = (
        torch.randn(cu_seqlens[-1], heads, 64, device=DEVICE, dtype=torch.bfloat16)
        for heads in (4, 2, 2)
    )
    if not varlen.varlen_fits(q, v):
        pytest.skip("this torch has no varlen attention that gives log-sum-exps")
    weight = torch.randn(cu_seqlens[-1], 4, 64, device=DEVICE)
    results = []
    for run, dtype in ((joined_attention, torch.bfloat16), (_shared_block, torch.float32)):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out = run(*inputs, cu_seqlens, parents, 0.2).float()
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert float((ours.float() - theirs.float()).norm()) <= 0.02 * float(theirs.float().norm())


def _shared_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[int, ...],
    parents: tuple[int, ...],
    scale: float,
) -> Tensor:
    return block_attention(q, k, v, None, cu_seqlens, Rule(scale), parents)


def test_layers_in_8_bit_floats_are_near_the_exact_ones() -> None:
    if torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    model = build_model("qwen3", PROMISED["qwen3"], dtype=torch.bfloat16).to(DEVICE)
    rows = random_rows()
    exact = gradients_on_gpu(model, rows)
    assert fp8.round_layers(model, Kernels())
    rounded = gradients_on_gpu(model, rows)
    assert 0 < relative_error(rounded, exact) <= 0.25


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = toy.make_inputs(tmp_path_factory.mktemp("gpu"))
    save_model(folder / "wide", "qwen3", hidden_size=128, intermediate_size=256, head_dim=32)
    return folder


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"compile": True},
        {"compile": "layers"},
        {"gradient_checkpointing": True},
        {"async_save": True},
        {"parallelism": "fsdp"},
    ],
    ids=["plain", "compiled", "compiled layers", "recomputed", "async_save", "fsdp"],
)
def test_a_killed_run_goes_on_as_if_nothing_had_been(
    inputs: Path, tmp_path: Path, training: dict[str, Any]
) -> None:
    """On the same GPU, bit by bit. Where this fails, `kubetune verify-resume` says the same of a user's own run."""
    config = toy.make_config(inputs, training, model=str(inputs / "wide"))
    whole = toy.finished(tmp_path / "whole", config)
    killed = toy.make_run(tmp_path / "killed", config)
    assert toy.train(killed, environ={"KUBETUNE_FAULT": "signal 9:commit.written:2"}) == [-9]
    assert toy.train(killed) == [0]
    assert toy.digests(killed) == toy.digests(whole)


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_quantised_base_learns(inputs: Path, tmp_path: Path, quantization: str) -> None:
    pytest.importorskip("bitsandbytes")
    config = toy.make_config(
        inputs, {"num_train_epochs": 4}, model=str(inputs / "wide"), quantization=quantization
    )
    losses = toy.losses(toy.finished(tmp_path / "run", config))
    assert np.mean(losses[-7:]) < np.mean(losses[:7]) - 0.1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus_do_what_one_does(inputs: Path, tmp_path: Path) -> None:
    """Over NCCL, in fp32: only the order of sums differs."""
    config = toy.make_config(inputs, model={"path": str(inputs / "wide"), "dtype": "float32"})
    losses_of_one = toy.losses(toy.finished(tmp_path / "one", config))
    two = toy.losses(toy.finished(tmp_path / "two", config, world_size=2))
    assert two == pytest.approx(losses_of_one, abs=1e-4)
