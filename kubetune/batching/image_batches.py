"""The images of a micro-batch: read ahead by threads, laid end to end, with the positions their tokens have."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from kubetune.batching.batch import Batch, collate
from kubetune.batching.extra_inputs import Pictures
from kubetune.data.prepared.rows import Rows
from kubetune.data.vision.image_processor import ImageProcessor, ImageRef, Picture, Upright
from kubetune.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_AHEAD = 32
"""Images held in memory before they are asked for: one of 1,024 tokens takes 24 MiB."""


class PictureReader:
    """Reads, decodes and cuts images in threads, which Pillow and NumPy let run beside the training."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor
        self._waiting: dict[ImageRef | bytes, Future[Picture | Upright]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def look_ahead(self, images: Iterable[ImageRef]) -> None:
        """Begin to read what will be asked for soon."""
        for image in images:
            if len(self._waiting) >= MOST_AHEAD:
                return
            if image not in self._waiting:
                self._waiting[image] = self._submit(image)

    def read(self, images: Sequence[ImageRef | bytes]) -> list[Picture | Upright]:
        """The images, named or given as bytes, in order.

        Raises DataError where one is not what it was when the data were prepared.
        """
        futures = {
            image: self._waiting.pop(image) if image in self._waiting else self._submit(image)
            for image in images
        }
        return [futures[image].result() for image in images]

    def _submit(self, image: ImageRef | bytes) -> Future[Picture | Upright]:
        if self._pool is None:
            self.processor.import_libraries()
            self._pool = ThreadPoolExecutor(
                min(4, len(os.sched_getaffinity(0))), thread_name_prefix="images"
            )
        if isinstance(image, bytes):
            return self._pool.submit(self.processor.process, image)
        return self._pool.submit(self.processor.read, image)


def picture_reader(rows: Rows) -> PictureReader | None:
    """A reader of the images of `rows`; None where rows have none."""
    return PictureReader(rows.processor) if rows.processor is not None else None


def collate_pictured(
    rows: Sequence[tuple[NDArray[np.uint32], NDArray[np.bool_]]],
    pictures: Sequence[Sequence[Picture | Upright]],
    processor: ImageProcessor,
    samples: Sequence[int] = (),
) -> Batch:
    """Lay sequences and the images of each end to end, some of which may have none.

    With half as many `pictures` as sequences, as of pairs, two sequences in turn have the same. Raises DataError when a
    row has more or fewer tokens for images than the vision tower will make features.
    """
    batch = collate(rows, samples)
    pictures = [own for own in pictures for _ in range(len(rows) // len(pictures))]
    if not processor.is_grid:
        return _whole(batch, pictures, processor)
    merge, positions = processor.merge_size, []
    grids = [[cast(Picture, picture) for picture in own] for own in pictures]
    for number, ((ids, _), own) in enumerate(zip(rows, grids, strict=True)):
        is_image = ids == processor.placeholder.token
        features = sum(down * across // merge**2 for _, (_, down, across) in own)
        if int(is_image.sum()) != features:
            name = f"row {samples[number * len(samples) // len(rows)]}" if samples else "a row"
            raise DataError(
                f"{name} has {int(is_image.sum()):,} tokens for images of {features:,} features"
            )
        positions.append(
            grid_positions(
                is_image, [(down // merge, across // merge) for _, (_, down, across) in own]
            )
        )
    everything = [picture for own in grids for picture in own]
    return replace(
        batch,
        pictures=Pictures(
            positions=torch.from_numpy(np.concatenate(positions, 1)),
            is_image=batch.input_ids == processor.placeholder.token,
            pixel_values=torch.from_numpy(np.concatenate([p.pixel_values for p in everything]))
            if everything
            else None,
            grids=torch.tensor([p.grid for p in everything]) if everything else None,
            counts=tuple(map(len, pictures)),
        ),
    )


def _whole(batch: Batch, pictures: Sequence[Sequence[Any]], processor: ImageProcessor) -> Batch:
    """Sequences with the images of each as the model's own processor makes them."""
    is_image = batch.input_ids == processor.placeholder.token
    firsts = accumulate(batch.label_counts, initial=0)
    inputs = tuple(
        processor.whole.look(
            [picture.image for picture in own],
            is_image[start:stop],
            int(batch.rows[first]) + 1 - start if labels else stop - start,
        )
        for own, (start, stop), first, labels in zip(
            pictures, pairwise(batch.cu_seqlens), firsts, batch.label_counts, strict=False
        )
    )
    positions, counts = batch.position_ids.expand(3, -1), tuple(map(len, pictures))
    return replace(
        batch,
        pictures=Pictures(positions=positions, is_image=is_image, counts=counts, inputs=inputs),
    )


def grid_positions(
    is_image: NDArray[np.bool_], grids: Sequence[tuple[int, int]]
) -> NDArray[np.int64]:
    """Positions `[3, tokens]` in time, down and across of one sequence, as Qwen-VL counts them (arXiv 2409.12191).

    Text moves on by one in all three; an image stays at one time, and after it all go on from its longer side.
    `grids`: tokens down and across of each image, in order.
    """
    places = np.zeros((3, len(is_image)), np.int64)
    at = now = 0
    for down, across in grids:
        begin = at + int(np.argmax(is_image[at:]))
        places[:, at:begin] = np.arange(now, now + begin - at)
        now += begin - at
        at = begin + down * across
        places[0, begin:at] = now
        places[1, begin:at] = now + np.repeat(np.arange(down), across)
        places[2, begin:at] = now + np.tile(np.arange(across), down)
        now += max(down, across)
    places[:, at:] = np.arange(now, now + len(is_image) - at)
    return places


def image_inputs(batch: Batch) -> dict[str, Tensor]:
    """The images of a batch as transformers' models take them; nothing where it has none.

    Of a model whose images are no grids it is of one sequence.
    """
    pictures = batch.pictures
    if pictures is not None and pictures.inputs:
        (inputs,) = pictures.inputs
        return inputs
    if pictures is None or pictures.pixel_values is None or pictures.grids is None:
        return {}
    return {
        "pixel_values": pictures.pixel_values,
        "image_grid_thw": pictures.grids,
        "mm_token_type_ids": pictures.is_image.int()[None],
    }
