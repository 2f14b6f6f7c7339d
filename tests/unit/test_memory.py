"""The memory arithmetic: known sizes, and the direction of every decision."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kubetune.planning.memory import Shape, activation_bytes_per_token, layers_to_recompute

QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
GIB = 2**30


def decide(tokens: int, device_gib: int, **changes: int) -> int:
    shape = Shape.of({**QWEN3_8B, **changes})
    assert shape is not None
    return layers_to_recompute(
        shape,
        weight_bytes=16_400_000_000,
        trained_parameters=43_600_000,
        tokens=tokens,
        element_bytes=2,
        device_bytes=device_gib * GIB,
        fused=True,
    )


def test_shape_reads_both_vocabularies():
    assert Shape.of(QWEN3_8B) == Shape(4096, 36, 12288, 4096, 1024)
    assert Shape.of({"n_embd": 64, "n_layer": 3, "n_head": 4}) == Shape(64, 3, 256, 64, 64)
    assert Shape.of({"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}) == Shape(64, 3, 96, 64, 64)
    assert Shape.of({"d_model": 64}) is None


def test_a_layer_keeps_what_its_operations_save():
    """4 h + 2 q + 2 kv + 3 f elements of bf16 for each of 36 layers."""
    shape = Shape.of(QWEN3_8B)
    assert shape is not None
    kept = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 12288) * 36
    assert activation_bytes_per_token(shape, 2, recompute=False, fused=True) == kept
    assert activation_bytes_per_token(shape, 2, recompute=True, fused=True) == kept // 36 + 36 * 4096 * 2


@pytest.mark.parametrize(
    ("tokens", "device_gib", "expected"), [(8192, 139, 0), (8192, 48, 10), (32768, 139, 9), (32768, 24, 36)]
)
def test_recompute_only_as_many_layers_as_memory_asks_for(tokens, device_gib, expected):
    assert decide(tokens, device_gib) == expected


def test_what_is_decided_fits_and_one_layer_less_would_not():
    layers = decide(32768, 139)
    shape = Shape.of(QWEN3_8B)
    assert shape is not None
    a_layer = activation_bytes_per_token(shape, 2, recompute=False, fused=True) // shape.layers
    fixed = 16_400_000_000 + 43_600_000 * 16 + 2 * GIB
    needed = [fixed + 32768 * ((36 - n) * a_layer + n * 4096 * 2) for n in (layers - 1, layers)]
    assert needed[1] <= 0.92 * 139 * GIB < needed[0]


def test_experts_count_only_as_often_as_a_token_meets_them():
    dense, mixture = Shape.of(QWEN3_8B), Shape.of({**QWEN3_8B, "moe_intermediate_size": 768, "num_experts_per_tok": 8})
    assert dense is not None
    assert mixture is not None
    assert mixture.intermediate == 8 * 768 < dense.intermediate


@pytest.mark.parametrize(("given", "expected"), [({}, "128"), ({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7"}, "7")])
def test_of_matrix_products_only_a_few_are_kept_ready(given: dict[str, str], expected: str) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    program = (
        f"import os; from kubetune.base import allocator as malloc; malloc.keep_memory(); print(os.environ[{name!r}])"
    )
    told = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == expected
