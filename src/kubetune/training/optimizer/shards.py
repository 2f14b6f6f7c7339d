"""The optimizer's buffers on disk, whole or cut over the ranks, so that any number of ranks can resume from them.

The header of a rank's file has the stretches of the whole model's buffers that are in it; a file without them holds
all. Two ranks wrote these; a run on one rank, or on three, finds its numbers by their place in the whole buffer:

    numbers of the whole buffer   0 1 2 3 4 5 6 7 8 9 10
    optimizer-00001-of-00002      0 1 2       6 7 8            header: shards [[0, 3], [6, 3]] (start, length)
    optimizer-00002-of-00002            3 4 5       9 10       header: shards [[3, 3], [9, 2]]

`master` holds the weights, so a model is put together from the files, and needs no rank's memory. All are safetensors,
whose reading runs no code. adamw.py knows what the buffers mean.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kubetune import errors
from kubetune.rundir import shapes

OPTIMIZER = "optimizer.safetensors"
PART = "optimizer-*.safetensors"
MASTER = "master"
WEIGHTS = "model.safetensors"
# Numbers read at once: memory stays flat whatever the size of a tensor.
CHUNK = 2**24

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
    """Return the name of the file with one rank's shards."""
    return f"optimizer-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def write_part(
    path: Path,
    state: dict[str, Tensor],
    shards: Sequence[OptimizerShard],
) -> None:
    """Write one rank's buffers. `state`: flat buffers as long as all shards together, and scalars."""
    save_file(state, path, metadata={"shards": json.dumps(shards)})
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # rank 0, which makes the rest durable, may be on another machine


class _Source(NamedTuple):
    """A shard in a file."""

    start: int  # number of the whole buffer
    stop: int
    file: Any
    offset: int  # of the shard's first number in the file's buffer


def _opened(path: Path) -> Any:
    """Return a file of safetensors. Raise EnvironmentFault where it is none, or not whole."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _damaged(
            path, f"it is no whole file of safetensors: {errors.first_line(error)}"
        ) from None


def _damaged(path: Path, reason: str) -> errors.EnvironmentFault:
    return errors.EnvironmentFault(
        f"{path} is damaged ({reason}); put it back from a copy, such as a mirror's, or remove {path.parent} to go on "
        "from the checkpoint before it. Nothing was written."
    )


class Buffers:
    """The buffers in a checkpoint folder, read shard by shard. Open them with `with`."""

    def __init__(self, folder: Path) -> None:
        """Raise EnvironmentFault if a file of them is damaged, or holds what no run writes."""
        # A sharded run has a file of each rank, any other run one file.
        paths = sorted(folder.glob(PART))
        for rank, path in enumerate(paths):
            if path.name != part_name(rank, len(paths)):
                raise _damaged(path, f"{part_name(rank, len(paths))} expected in its place")
        if not paths:
            paths = [folder / OPTIMIZER]
        self._folder = folder
        self._files = []
        self._sources: list[_Source] = []  # in the order of the whole buffer
        with ExitStack() as opened:
            for path in paths:
                file = opened.enter_context(_opened(path))
                self._files.append(file)
                self._sources.extend(_sources(path, file))
                if _contents(file) != _contents(self._files[0]):
                    raise _damaged(path, f"its tensors are others than those of {paths[0].name}")
            self._stack = opened.pop_all()

        # The last shard ends where the whole buffer does, if no file is missing.
        self._sources.sort(key=lambda source: (source.start, source.stop))
        self.size = 0
        if self._sources:
            self.size = self._sources[-1].stop

    def __enter__(self) -> Buffers:
        """Raise EnvironmentFault if numbers are missing."""
        # Each shard must begin where the one before it ends.
        stop = 0
        is_whole = bool(self._sources)
        for source in self._sources:
            is_whole = source.start == stop
            if not is_whole:
                break
            stop = source.stop

        if not is_whole:
            self._stack.close()
            raise _damaged(self._folder / OPTIMIZER, f"its shards lack numbers from {stop} on")
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str, shard: OptimizerShard) -> Iterator[Tensor]:
        """Yield the numbers of one shard in pieces, each from one file."""
        at = shard.start
        stop = shard.start + shard.length
        # The last shard in the files that begins at or before it.
        index = bisect_right(self._sources, at, key=lambda source: source.start) - 1
        # Piece by piece: to the end of the shard that is wanted, of the shard in the file, or of what memory is for.
        while at < stop:
            source = self._sources[index]
            until = min(stop, source.stop, at + CHUNK)
            first = source.offset + at - source.start
            yield source.file.get_slice(name)[first : first + until - at]
            at = until
            if at == source.stop:
                index += 1

    def state(self, shards: Sequence[OptimizerShard], size: int) -> dict[str, Tensor]:
        """Return all buffers of some shards, laid end to end, and other tensors as they are.

        Raise ValueError unless the whole model's buffers have `size` numbers.
        """
        if size != self.size:
            raise ValueError(
                f"its optimizer state is of {self.size:,} parameters, and {size:,} are trained now"
            )

        first = self._files[0]
        length = sum(shard.length for shard in shards)
        buffer_shape = first.get_slice(MASTER).get_shape()
        state: dict[str, Tensor] = {}
        for name in first.keys():  # noqa: SIM118 - not a dict
            stored = first.get_slice(name)
            if stored.get_shape() != buffer_shape:  # such as `step_count`, the same in all files
                state[name] = first.get_tensor(name)
                continue
            buffer = torch.empty(length, dtype=stored[:0].dtype)
            at = 0
            for shard in shards:
                for part in self.read(name, shard):
                    buffer[at : at + len(part)] = part
                    at += len(part)
            state[name] = buffer

        return state


def _contents(file: Any) -> dict[str, tuple[str, list[int] | None]]:
    """Return the type and the shape of each tensor of a file. Buffers, which may differ in length, have no shape."""
    buffer_shape = file.get_slice(MASTER).get_shape()
    contents = {}
    for name in file.keys():  # noqa: SIM118 - not a dict
        stored = file.get_slice(name)
        shape = stored.get_shape()
        contents[name] = (stored.get_dtype(), None if shape == buffer_shape else shape)
    return contents


def _sources(path: Path, file: Any) -> Iterator[_Source]:
    """Yield the shards of a file that hold numbers. Raise EnvironmentFault where they are not what a run writes."""
    shape = file.get_slice(MASTER).get_shape() if MASTER in file.keys() else []  # noqa: SIM118 - not a dict
    if len(shape) != 1:
        raise _damaged(path, f"{MASTER}: a tensor of one axis expected")

    # A file of a whole buffer names no shards.
    shards = [[0, shape[0]]]
    text = (file.metadata() or {}).get("shards")
    if text is not None:
        shards = _parsed(path, text)

    offset = 0
    for start, length in shards:
        if length:
            yield _Source(start, start + length, file, offset)
        offset += length
    if offset != shape[0]:
        raise _damaged(path, f"shards: {shape[0]:,} numbers expected, {offset:,} found")


def _parsed(path: Path, text: str) -> list[list[int]]:
    """Return start and length of each shard that a header names. Raise EnvironmentFault where it names none."""
    try:
        shards = json.loads(text)
        problem = shapes.problem_of_header("optimizer shards", shards)
    except ValueError as error:
        problem = str(error)
    except RecursionError:
        problem = "it is nested too deeply"
    if problem is not None:
        raise _damaged(path, f"shards: {problem}")
    return list(shards)


def write_weights(
    folder: Path,
    layout: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    others: Mapping[str, Tensor],
) -> None:
    """Write `model.safetensors`, put together from the parts in a checkpoint folder.

    `layout`: shapes of the trained parameters, in the order of the buffers; they are written as `dtype`. `others`: other
    tensors that the model saves. The library safetensors would need all of it in memory at once.
    """
    # The header: of each tensor its type, shape and place.
    tensors = [(name, shape, dtype) for name, shape in layout.items()]
    tensors += [(name, tensor.shape, tensor.dtype) for name, tensor in others.items()]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape, kind in tensors:
        end = begin + math.prod(shape) * kind.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[kind],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end

    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers after it are aligned

    with Buffers(folder) as buffers, open(folder / WEIGHTS, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        # The numbers, in the order of the header.
        start = 0
        for shape in layout.values():
            shard = OptimizerShard(start, math.prod(shape))
            for part in buffers.read(MASTER, shard):
                file.write(bytes_of(part.to(dtype)))
            start += shard.length
        for tensor in others.values():
            file.write(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor of any shape and type, in the order of its numbers."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
