"""FLOPs that MFU counts, against what PyTorch itself counts in the forward and backward of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import flops
from benchmarks.models import SHAPES
from kubetune.config.load import load_config
from kubetune.config.schema import LoraConfig
from kubetune.plan.flops import planned_cost
from kubetune.plan.linears import Trainable
from kubetune.plan.model_shapes import Weights, shapes_of
from kubetune.rundir.throughput import throughput, throughput_line
from kubetune.training import learner_flops as measured_flops
from kubetune.training.gpu_specs import stated_tflops
from tests.architectures import MIXTURE, PROMISED, build_model

LENGTH = 24


def counted(model: Any) -> dict[str, int]:
    """Return the FLOPs of matrix products in one forward and backward, as PyTorch counts them, for a single sequence."""
    ids = torch.arange(LENGTH)[None] + 3
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    return {str(name): count for name, count in counts.items()}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("lora", [False, True])
def test_linear_flops_equal_what_pytorch_counts(kind: str, lora: bool) -> None:
    model = build_model(kind, PROMISED[kind], lora=lora)
    cost = measured_flops.cost_of(model, has_vocabulary=True)
    products = sum(
        count for name, count in counted(model).items() if "mm" in name and "bmm" not in name
    )
    # Every token has a logit in this plain forward. With LoRA nobody computes the gradient of the first layer's
    # inputs, which are frozen embeddings; the count keeps it.
    expected = LENGTH * (cost.token + cost.label)
    assert products == pytest.approx(expected, rel=0.12 if lora else 1e-9)
    assert products <= expected


def test_a_frozen_weight_costs_two_thirds_of_a_trained_one() -> None:
    model = build_model("llama", PROMISED["llama"], lora=False)
    full = measured_flops.cost_of(model, has_vocabulary=True)
    frozen = measured_flops.cost_of(model.requires_grad_(False), has_vocabulary=True)
    assert frozen.token == pytest.approx(full.token * 4 / 6)
    assert frozen.label == pytest.approx(full.label * 4 / 6)


def test_of_experts_only_those_visited_count() -> None:
    costs = [
        measured_flops.cost_of(build_model("mixtral", {**MIXTURE, "num_experts_per_tok": visited}, lora=False),
                           has_vocabulary=True).token
        for visited in (1, 2)
    ]  # fmt: skip
    expert = 3 * MIXTURE["hidden_size"] * MIXTURE["intermediate_size"]
    assert costs[1] - costs[0] == pytest.approx(6 * expert * MIXTURE["num_hidden_layers"])


@pytest.mark.parametrize(
    ("kind", "lora"),
    [("llama", False), ("llama", True), ("gpt2", False), ("gpt2", True), ("mixtral", False)],
)
def test_a_plan_counts_what_a_run_counts(kind: str, lora: bool) -> None:
    shape = MIXTURE if kind == "mixtral" else PROMISED[kind]
    plain, model = (build_model(kind, shape, lora=adapted) for adapted in (False, lora))
    weights = Weights(
        {name: tuple(p.shape) for name, p in plain.named_parameters()}, plain.config.to_dict(), True
    )
    config = load_config(None, overrides=["model=m/m", "data.train=x/y"])
    if lora:
        adapter_config = next(iter(model.peft_config.values()))
        targets = tuple(sorted(adapter_config.target_modules))
        config = config.model_copy(
            update={"lora": LoraConfig(r=adapter_config.r, target_modules=targets)}
        )
    assert planned_cost(
        Trainable(config.lora, config.sight), weights, has_vocabulary=True
    ) == measured_flops.cost_of(model, has_vocabulary=True)


def test_benchmarks_count_what_a_plan_counts() -> None:
    shape = SHAPES["qwen3-8b"]
    sizes = {**vars(shape), "model_type": "qwen3"}
    config = load_config(None, overrides=["model=m/m", "data.train=x/y", "lora.r=16"])
    cost = planned_cost(
        Trainable(config.lora, config.sight),
        Weights(shapes_of(sizes), sizes, False),
        has_vocabulary=True,
    )
    assert cost is not None
    assert flops.training_flops(shape, "all-linear", [3, 3], 4) == cost.of(6, 12, 4)


def test_the_peak_is_stated_or_measured() -> None:
    device = torch.device("cpu")
    assert measured_flops.peak_of(device, torch.float32, 989.0) == (989.0, "compute.peak_tflops")
    peak, source = measured_flops.peak_of(device, torch.float32, None)
    assert 1e-4 < peak < 1e3
    assert source.startswith("measured: a 512 × 512 float32 product")


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
        ("NVIDIA GB200", 2500), ("NVIDIA L40", 181), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("Tesla T4", 65),
        ("Tesla V100-PCIE-16GB", 112), ("Tesla V100-SXM2-16GB", 125), ("Tesla V100S-PCIE-32GB", 130),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GeForce RTX 4090", None),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_its_own_name(name: str, tflops: float | None) -> None:
    assert stated_tflops(name) == tflops


def test_mfu_is_the_share_of_the_peak_of_all_devices() -> None:
    start = {
        "event": "start",
        "flops_per_token": 1e9,
        "peak_tflops": 2.0,
        "peak_source": "compute.peak_tflops",
    }
    facts = throughput([{"event": "launch"}, start], 6000, 3000, 3.0, world_size=2)
    assert facts is not None
    assert (facts["tokens_per_second"], facts["trained_tokens_per_second"]) == (2000, 1000)
    assert facts["tflops_per_device"] == pytest.approx(1.0)
    assert facts["mfu"] == pytest.approx(0.5)
    line = "2,000 tokens/s without padding, 1,000 trained; MFU 50 %: 1 of the 2 TFLOP/s that compute.peak_tflops says"
    assert throughput_line(facts) == line
    bare = throughput([{"event": "launch"}], 6000, 3000, 3.0, world_size=2)
    assert bare is not None
    assert throughput_line(bare) == "2,000 tokens/s without padding, 1,000 trained"


def test_a_share_above_the_peak_is_left_out() -> None:
    """Such as of a peak that was measured while another program computed."""
    start = {
        "event": "start",
        "flops_per_token": 1e9,
        "peak_tflops": 0.5,
        "peak_source": "measured: a 512 × 512 float32 product",
    }
    facts = throughput([start], 6000, 3000, 3.0, world_size=2)
    assert facts is not None
    assert (facts["tflops_per_device"], facts["mfu"]) == (pytest.approx(1.0), None)
    assert throughput_line(facts) == "2,000 tokens/s without padding, 1,000 trained"
