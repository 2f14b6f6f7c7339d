"""The optimizer's buffers on disk, whole or cut over the ranks, so that any number of ranks can go on from them.

A file of one rank says in its header which stretches of the whole model's buffers it holds; a file that says nothing
holds all. `master` holds the weights themselves, so a model is put together from it without any rank's memory.
Safetensors only: reading runs no code. What the buffers mean is known to adamw.py.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

OPTIMIZER = "optimizer.safetensors"
PART = "optimizer-*.safetensors"
MASTER = "master"
WEIGHTS = "model.safetensors"
CHUNK = 2**24
"""Numbers read at once: memory stays flat whatever the size of a tensor."""

# The names of the file format (github.com/huggingface/safetensors, "Format").
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class OptimizerShard(NamedTuple):
    """Numbers `[start, start + length)` of a flat buffer of the whole model."""

    start: int
    length: int


def part_name(rank: int, world_size: int) -> str:
    """File of one rank's shards."""
    return f"optimizer-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def write_part(path: Path, state: dict[str, Tensor], shards: Sequence[OptimizerShard]) -> None:
    """Write one rank's buffers; `state` holds flat ones of the shards' total length, and scalars."""
    save_file(state, path, metadata={"shards": json.dumps(shards)})
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # rank 0, which makes the rest durable, may be on another machine


class _Source(NamedTuple):
    """A shard in a file: where it begins in the whole buffer and in the file's."""

    start: int
    stop: int
    file: Any
    offset: int


class Buffers:
    """The buffers in a checkpoint folder, read shard by shard. Open them with `with`."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        paths = sorted(folder.glob(PART)) or [folder / OPTIMIZER]
        self._files = [self._stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        self._sources = sorted(
            (s for file in self._files for s in _sources(file)), key=lambda source: source[:2]
        )
        self.size = self._sources[-1].stop if self._sources else 0

    def __enter__(self) -> Buffers:
        """Raises ValueError when files of some rank are missing."""
        gaps = [a.stop for a, b in pairwise(self._sources) if a.stop != b.start]
        if gaps or not self._sources or self._sources[0].start:
            self._stack.close()
            raise ValueError(f"optimizer state lacks numbers from {gaps[0] if gaps else 0} on")
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str, shard: OptimizerShard) -> Iterator[Tensor]:
        """The numbers of one shard, in stretches."""
        at, stop = shard.start, shard.start + shard.length
        index = bisect_right(self._sources, at, key=lambda source: source.start) - 1
        while at < stop:
            source = self._sources[index]
            until = min(stop, source.stop, at + CHUNK)
            first = source.offset + at - source.start
            yield source.file.get_slice(name)[first : first + until - at]
            at, index = until, index + (until == source.stop)

    def state(self, shards: Sequence[OptimizerShard], size: int) -> dict[str, Tensor]:
        """All buffers of some shards, laid end to end, and what is no such buffer as it is.

        Raises ValueError unless the whole model's buffers have `size` numbers.
        """
        if size != self.size:
            raise ValueError(
                f"its optimizer state is of {self.size:,} parameters, and {size:,} are trained now"
            )
        first = self._files[0]
        shapes = {name: first.get_slice(name).get_shape() for name in first.keys()}  # noqa: SIM118 - not a dict
        state: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            if shape != shapes[MASTER]:
                state[name] = first.get_tensor(name)
                continue
            state[name] = torch.empty(
                sum(shard.length for shard in shards), dtype=first.get_slice(name)[:0].dtype
            )
            at = 0
            for part in (part for shard in shards for part in self.read(name, shard)):
                state[name][at : at + len(part)] = part
                at += len(part)
        return state


def _sources(file: Any) -> Iterator[_Source]:
    metadata = file.metadata() or {}
    shards = json.loads(metadata.get("shards") or "null")
    if shards is None:
        shards = [(0, file.get_slice(MASTER).get_shape()[0])]
    offset = 0
    for start, length in shards:
        if length:
            yield _Source(start, start + length, file, offset)
        offset += length


def write_weights(
    folder: Path,
    layout: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    others: Mapping[str, Tensor],
) -> None:
    """Put `model.safetensors` together from the parts in a checkpoint folder, and make it durable.

    `layout`: shapes of the trained parameters, in the order of the buffers; they are written as `dtype`. `others`:
    what a model saves besides. safetensors itself would want all of it in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    described = [(name, shape, dtype) for name, shape in layout.items()]
    described += [(name, tensor.shape, tensor.dtype) for name, tensor in others.items()]
    end = 0
    for name, shape, kind in described:
        begin, end = end, end + math.prod(shape) * kind.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[kind],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Buffers(folder) as buffers, open(folder / WEIGHTS, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = 0
        for shape in layout.values():
            shard = OptimizerShard(start, math.prod(shape))
            for part in buffers.read(MASTER, shard):
                file.write(_bytes(part.to(dtype)))
            start += shard.length
        for tensor in others.values():
            file.write(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
