"""The optimizer's buffers in files: cut over any number of ranks, read at any other, and put together as a model."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from kubetune import errors
from kubetune.training.optimizer import shards
from kubetune.training.optimizer.shards import Buffers, OptimizerShard

LAYOUT = {"embed": (7, 3), "norm": (5,), "bias": (1,)}
SIZE = 27
WHOLE: dict[str, Tensor] = {
    "master": torch.arange(float(SIZE)) / 8,
    "exp_avg": -torch.arange(float(SIZE)),
    "step_count": torch.tensor(4.0),
}


def cut(world_size: int, rank: int) -> list[OptimizerShard]:
    """Return a rank's rows of each parameter, as FSDP deals them: some ranks may get none."""
    pieces = []
    start = 0
    for rows, *rest in LAYOUT.values():
        width = (rest or [1])[0]
        rows_per_rank = -(-rows // world_size)
        first = min(rows, rank * rows_per_rank)
        last = min(rows, (rank + 1) * rows_per_rank)
        pieces.append(OptimizerShard(start + first * width, (last - first) * width))
        start += rows * width
    return pieces


def part(held: list[OptimizerShard]) -> dict[str, Tensor]:
    def of(buffer: Tensor) -> Tensor:
        return torch.cat([buffer[start : start + length] for start, length in held])

    return {name: of(tensor) if tensor.dim() else tensor for name, tensor in WHOLE.items()}


def write(folder: Path, world_size: int) -> None:
    for rank in range(world_size):
        held = cut(world_size, rank)
        shards.write_part(folder / shards.part_name(rank, world_size), part(held), held)


@settings(max_examples=40)
@given(written=st.integers(1, 9), read=st.integers(1, 9), chunk=st.integers(1, SIZE))
def test_what_some_ranks_wrote_any_number_of_ranks_read(
    written: int, read: int, chunk: int
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "CHUNK", chunk)
        write(Path(name), written)
        for rank in range(read):
            with Buffers(Path(name)) as buffers:
                state = buffers.state(cut(read, rank), SIZE)
            assert state.keys() == WHOLE.keys()
            for key, tensor in part(cut(read, rank)).items():
                assert torch.equal(state[key], tensor), key


def test_a_file_of_all_of_it_is_read_in_pieces(tmp_path: Path) -> None:
    save_file(WHOLE | {"scale": torch.ones(3)}, tmp_path / shards.OPTIMIZER)
    with Buffers(tmp_path) as buffers:
        state = buffers.state(cut(2, 1), SIZE)
    assert torch.equal(state["exp_avg"], part(cut(2, 1))["exp_avg"])
    assert torch.equal(state["scale"], torch.ones(3))


@pytest.mark.parametrize("lost", range(3))
def test_the_file_of_a_rank_must_not_be_missing(tmp_path: Path, lost: int) -> None:
    write(tmp_path, 3)
    (tmp_path / shards.part_name(lost, 3)).unlink()
    with pytest.raises(errors.EnvironmentFault, match=r"is damaged \(optimizer-\d{5}-of-0000\d"):
        Buffers(tmp_path)


FOREIGN: tuple[Any, ...] = (
    None, True, False, 7, -1, 0.0, 12.0, 0.5, "0", "12", "text", [], {}, [[]], [{}], 10**400, 2**63, math.nan,
)  # fmt: skip


def changed(value: Any) -> Iterator[Any]:
    """Yield a list again and again, each time with one part of another type or size, or without it."""
    yield from FOREIGN
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield value[:index] + value[index + 1 :]
            for other in changed(inner):
                yield [*value[:index], other, *value[index + 1 :]]


def test_shards_of_other_types_or_places_are_refused_in_words(tmp_path: Path) -> None:
    """Every part of the list in the header: other types, sizes, offsets and counts."""
    write(tmp_path, 2)
    path = tmp_path / shards.part_name(0, 2)
    tensors = load_file(path)
    whole = json.loads(json.dumps(cut(2, 0)))
    wrong = [json.dumps(variant) for variant in changed(whole) if variant not in (whole, None)]
    assert len(wrong) > 80
    for text in [*wrong, "", "[", "[" * 200_000, "[[0, 1e999]]"]:
        save_file(tensors, path, {"shards": text})
        with (
            pytest.raises(errors.EnvironmentFault, match=r"is damaged.*put it back"),
            Buffers(tmp_path) as buffers,
        ):
            pytest.fail(f"{text} was read, to {buffers.size}")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"master": None}, "master: a tensor of one axis expected"),
        ({"master": torch.tensor(1.0)}, "master: a tensor of one axis expected"),
        ({"master": torch.zeros(3, 4)}, "master: a tensor of one axis expected"),
        ({"master": torch.zeros(2)}, "shards: 2 numbers expected"),
        ({"exp_avg": None}, "its tensors are others"),
        ({"exp_avg": torch.zeros(2)}, "its tensors are others"),
        ({"exp_avg": torch.zeros(12, dtype=torch.int8)}, "its tensors are others"),
        ({"step_count": torch.zeros(2)}, "its tensors are others"),
        ({"another": torch.zeros(2)}, "its tensors are others"),
    ],
)
def test_a_part_with_other_tensors_is_refused(
    changes: dict[str, Tensor | None], reason: str, tmp_path: Path
) -> None:
    write(tmp_path, 2)
    path = tmp_path / shards.part_name(1, 2)
    tensors: dict[str, Tensor | None] = {**load_file(path), **changes}
    rest = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(rest, path, {"shards": json.dumps(cut(2, 1))})
    with pytest.raises(errors.EnvironmentFault, match=reason):
        Buffers(tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.EnvironmentFault, match=r"optimizer\.safetensors is damaged"):
        Buffers(tmp_path)


def test_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 2)
    with (
        pytest.raises(ValueError, match="of 27 parameters, and 28 are trained now"),
        Buffers(tmp_path) as buffers,
    ):
        buffers.state([OptimizerShard(0, 28)], 28)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_put_together_from_the_parts(tmp_path: Path, dtype: torch.dtype) -> None:
    write(tmp_path, 4)
    others = {"table": torch.tensor([[True, False]]), "count": torch.tensor(5)}
    shards.write_weights(tmp_path, LAYOUT, dtype, others)
    weights = load_file(tmp_path / shards.WEIGHTS)
    parts = dict(zip(LAYOUT, WHOLE["master"].split([21, 5, 1]), strict=True))
    assert weights.keys() == {*LAYOUT, *others}
    for name, shape in LAYOUT.items():
        assert torch.equal(weights[name], parts[name].view(shape).to(dtype)), name
    for name, tensor in others.items():
        assert torch.equal(weights[name], tensor), name
