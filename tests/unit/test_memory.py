"""The memory arithmetic: known sizes, and the direction of every decision."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.models.acceleration import recomputed_layers
from kubetune.plan.activations import expects_compiling
from kubetune.plan.forecast import Forecast, forecast
from kubetune.plan.memory import Shape, activation_bytes_per_token
from kubetune.plan.model_shapes import read_weights
from kubetune.plan.plan import make_plan
from kubetune.plan.rank_work import RankWork

QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
GIB = 2**30


def test_shape_reads_both_vocabularies():
    assert Shape.of(QWEN3_8B) == Shape(4096, 36, 12288, 4096, 1024)
    assert Shape.of({"n_embd": 64, "n_layer": 3, "n_head": 4}) == Shape(64, 3, 256, 64, 64)
    assert Shape.of({"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}) == Shape(
        64, 3, 96, 64, 64
    )
    assert Shape.of({"d_model": 64}) is None


def test_a_sharded_model_is_whole_while_it_draws_answers(tmp_path: Path) -> None:
    words = ("training.parallelism=fsdp", "lora.r=16", "data.max_length=64")
    learning, _ = planned(tmp_path, 80, *words, gpus=8)
    plan = make_plan(learning)
    # So few answers of so few tokens that their cache does not count.
    few = ("grpo.generation_batch_size=8", "grpo.max_completion_length=8")
    words = (*words, "task=grpo", "rewards=[exact_match]", *few)
    drawing, _ = planned(tmp_path, 80, *words, gpus=8)
    weights = read_weights(str(tmp_path), {})
    assert weights is not None
    most = []
    for config in (learning, drawing):
        of_run = forecast(RankWork.of(config, plan), weights, 80 * GIB)
        assert of_run is not None
        most.append(of_run.peak_bytes)
    # 16 GB of weights in bf16, less the layers that a step borrows.
    assert 10 * GIB < most[1] - most[0] < 2 * weights.parameters


def test_a_layer_keeps_what_its_operations_save():
    """4 h + 2 q + 2 kv + 3 f elements of bf16 for each of 36 layers."""
    shape = Shape.of(QWEN3_8B)
    assert shape is not None
    assert (
        activation_bytes_per_token(shape, 2)
        == 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 12288) * 36
    )


def planned(folder: Path, gib: int, *overrides: str, gpus: int = 1) -> tuple[Config, Forecast]:
    """Return the config, and the memory that `kubetune plan` forecasts on GPUs of so many GiB."""
    (folder / "config.json").write_text(
        json.dumps({**QWEN3_8B, "vocab_size": 151_936, "model_type": "qwen3"})
    )
    words = [
        f"model={folder}",
        "data.train=x/y",
        "data.max_length=4096",
        "quantization=none",
        *overrides,
    ]
    config = load_config(None, overrides=[*words, f"compute.gpus_per_node={gpus}"])
    weights = read_weights(str(folder), {})
    plan = make_plan(config)
    assert weights is not None
    memory = forecast(RankWork.of(config, plan), weights, gib * GIB)
    assert memory is not None
    return config, memory


@pytest.mark.parametrize(
    ("overrides", "gpus", "compiled"),
    [
        (["lora.r=16"], 1, True),
        (["lora.r=16", "training.compile=false"], 1, False),
        (["lora.r=16", "training.parallelism=shard_base"], 4, True),
        (["training.parallelism=fsdp"], 8, False),
    ],
    ids=["compiled", "not compiled", "gathered layers", "sharded, in full"],
)
@pytest.mark.parametrize("gib", [24, 32, 48, 80])
def test_a_run_recomputes_as_many_layers_as_its_plan_says(
    tmp_path: Path, gib: int, overrides: list[str], gpus: int, compiled: bool
) -> None:
    config, memory = planned(tmp_path, gib, *overrides, gpus=gpus)
    setting = config.training.gradient_checkpointing
    layers = recomputed_layers(setting, memory, compiled=compiled)
    # The plan prints them.
    matches = [re.search(r"(\d+) of 36 layers recomputed", part) for part in memory.parts]
    printed = [int(match[1]) for match in matches if match]
    assert printed == ([layers] if layers else [])


def test_more_layers_recompute_on_less_memory_without_a_compiler_and_beside_gathered_layers(
    tmp_path: Path,
) -> None:
    by_memory = []
    for gib in (24, 32, 80):
        memory = planned(tmp_path, gib, "lora.r=16")[1]
        assert memory.recomputed[False] >= memory.recomputed[True]
        by_memory.append(memory.recomputed[True])
    assert by_memory == sorted(by_memory, reverse=True)
    assert 0 < by_memory[0] < 36
    assert by_memory[-1] == 0
    plain = planned(tmp_path, 24, "lora.r=16", "training.compile=false")[1]
    assert plain.recomputed[False] > by_memory[0]


def test_compiling_is_expected_where_it_is_worth_it(tmp_path: Path) -> None:
    config, _ = planned(tmp_path, 80)
    plan = make_plan(config)
    weights = read_weights(str(tmp_path), {})
    assert weights is not None
    assert expects_compiling(RankWork.of(config, plan), weights.parameters), "the data are unread"
    short = make_plan(config, 10, world_size=1, device="cuda", tokens=1000)
    long = make_plan(config, 10**5, world_size=1, device="cuda", tokens=10**8)
    for data, is_compiled in ((short, False), (long, True)):
        work = RankWork.of(config, data)
        assert expects_compiling(work, weights.parameters) is is_compiled


def test_experts_count_only_as_often_as_a_token_meets_them():
    dense = Shape.of(QWEN3_8B)
    mixture = Shape.of({**QWEN3_8B, "moe_intermediate_size": 768, "num_experts_per_tok": 8})
    assert dense is not None
    assert mixture is not None
    assert mixture.intermediate == 8 * 768 < dense.intermediate


@pytest.mark.parametrize("variable", ["", "7"])
def test_of_matrix_products_only_a_few_are_kept_prepared(variable: str) -> None:
    names = ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"]
    program = (
        "import os; from kubetune.base.cpu import heap; heap.keep_memory(); "
        f"print(*map(os.environ.get, {names}))"
    )
    environ = {names[0]: variable} if variable else {}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [variable or "64", "64"]
