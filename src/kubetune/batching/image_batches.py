"""The images of a micro-batch: read ahead by threads, laid end to end, and the positions of their tokens."""

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
from kubetune.data.reading.images import ImageRef
from kubetune.data.vision.image_processor import ImageProcessor, Picture, Upright
from kubetune.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.data.prepared.rows import TrainedIds

# Images that are read ahead. One of 1,024 tokens takes 24 MiB.
MOST_AHEAD = 32


class PictureReader:
    """Reads, decodes and cuts images in threads. Pillow and NumPy release the lock, so training runs meanwhile."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor
        self._waiting: dict[ImageRef | bytes, Future[Picture | Upright]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def look_ahead(self, images: Iterable[ImageRef]) -> None:
        """Start to read images that will soon be needed."""
        for image in images:
            # What is read ahead waits in memory until its batch comes.
            if len(self._waiting) >= MOST_AHEAD:
                return
            if image not in self._waiting:
                self._waiting[image] = self._submit(image)

    def read(self, images: Sequence[ImageRef | bytes]) -> list[Picture | Upright]:
        """Return the images, which are references or bytes, in order.

        Raise DataError for an image that has changed since the data were prepared.
        """
        # An image that occurs twice is read once.
        futures = {}
        for image in images:
            if image in self._waiting:
                futures[image] = self._waiting.pop(image)
            elif image not in futures:
                futures[image] = self._submit(image)

        return [futures[image].result() for image in images]

    def _submit(self, image: ImageRef | bytes) -> Future[Picture | Upright]:
        # Threads start with the first image, since a run may have none.
        if self._pool is None:
            self.processor.import_libraries()
            # More would take cores from the training itself.
            threads = min(4, len(os.sched_getaffinity(0)))
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="images")
        if isinstance(image, bytes):
            return self._pool.submit(self.processor.process, image)
        return self._pool.submit(self.processor.read, image)


def picture_reader(rows: Rows) -> PictureReader | None:
    """Return a reader of the images of `rows`, None if they can have none."""
    if rows.processor is None:
        return None
    return PictureReader(rows.processor)


def collate_pictured(
    rows: Sequence[TrainedIds],
    pictures: Sequence[Sequence[Picture | Upright]],
    processor: ImageProcessor,
    samples: Sequence[int] = (),
) -> Batch:
    """Lay sequences and the images of each end to end. A sequence may have no image.

    `pictures` has an entry for each row of data: for one sequence, or for both sequences of a pair. Raise DataError if
    a row's tokens for images are not as many as the features that the vision tower will make.
    """
    batch = collate(rows, samples)

    # Both sequences of a pair have the same prompt, and with it the same images.
    sequences_per_row = len(rows) // len(pictures)
    images_of = []  # [sequences] the images of each
    for of_row in pictures:
        images_of.extend([of_row] * sequences_per_row)
    if not processor.is_grid:
        return _with_processed_images(batch, images_of, processor)

    positions = []
    all_images: list[Picture] = []
    for number, (ids, _) in enumerate(rows):
        images = [cast(Picture, image) for image in images_of[number]]
        is_image = ids == processor.placeholder.token

        grids = _token_grids(images, processor.merge_size)
        features = sum(down * across for down, across in grids)
        tokens = int(is_image.sum())
        if tokens != features:
            name = "a row"
            if samples:
                name = f"row {samples[number // sequences_per_row]}"
            raise DataError(f"{name} has {tokens:,} tokens for images of {features:,} features")
        positions.append(grid_positions(is_image, grids))
        all_images += images

    result = Pictures(
        positions=torch.from_numpy(np.concatenate(positions, 1)),
        is_image=batch.input_ids == processor.placeholder.token,
        counts=tuple(len(images) for images in images_of),
    )
    if all_images:
        pixel_values = np.concatenate([image.pixel_values for image in all_images])
        result = replace(
            result,
            pixel_values=torch.from_numpy(pixel_values),
            grids=torch.tensor([image.grid for image in all_images]),
        )

    return replace(batch, pictures=result)


def _token_grids(images: Sequence[Picture], merge: int) -> list[tuple[int, int]]:
    """Return how many tokens each image has down and across.

    The vision tower makes one feature of merge × merge patches, and each feature has a token.
    """
    grids = []
    for image in images:
        _, patches_down, patches_across = image.grid
        grids.append((patches_down // merge, patches_across // merge))
    return grids


def _with_processed_images(
    batch: Batch,
    images_of: Sequence[Sequence[Any]],
    processor: ImageProcessor,
) -> Batch:
    """Return the batch with what the model's own processor makes of each sequence's images."""
    is_image = batch.input_ids == processor.placeholder.token

    first_labels = list(accumulate(batch.label_counts, initial=0))
    inputs = []
    for number, (start, stop) in enumerate(pairwise(batch.cu_seqlens)):
        # The prompt ends at the first label. A sequence without labels is all prompt.
        prompt_tokens = stop - start
        if batch.label_counts[number]:
            prompt_tokens = int(batch.rows[first_labels[number]]) + 1 - start
        images = [image.image for image in images_of[number]]
        inputs.append(processor.whole.look(images, is_image[start:stop], prompt_tokens))

    # Positions are those of text: the processor's own model knows no grids.
    pictures = Pictures(
        positions=batch.position_ids.expand(3, -1),
        is_image=is_image,
        counts=tuple(len(images) for images in images_of),
        inputs=tuple(inputs),
    )
    return replace(batch, pictures=pictures)


def grid_positions(
    is_image: NDArray[np.bool_], grids: Sequence[tuple[int, int]]
) -> NDArray[np.int64]:
    """Return positions `[3, tokens]` in time, down and across, as Qwen-VL counts (arXiv 2409.12191).

    A token of text is one further in all three. An image stays at one time, and the text after it continues from the
    image's longer side. `grids`: tokens down and across of each image, in order.

    Example: two tokens of text, an image of 2 × 3 tokens, one token of text:

        time     0 1   2 2 2 2 2 2   5
        down     0 1   2 2 2 3 3 3   5
        across   0 1   2 3 4 2 3 4   5
    """
    positions = np.zeros((3, len(is_image)), np.int64)
    token = 0  # the next token
    position = 0  # its position
    for down, across in grids:
        # The text before the image.
        first = token + int(np.argmax(is_image[token:]))
        positions[:, token:first] = np.arange(position, position + first - token)
        position += first - token
        # The image, row by row.
        token = first + down * across
        positions[0, first:token] = position
        positions[1, first:token] = position + np.repeat(np.arange(down), across)
        positions[2, first:token] = position + np.tile(np.arange(across), down)
        position += max(down, across)

    positions[:, token:] = np.arange(position, position + len(is_image) - token)
    return positions


def image_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return the images of a batch as arguments of transformers' models; none if it has no images."""
    pictures = batch.pictures
    # Results of a model's own processor cannot be packed, so such a batch has one sequence.
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
