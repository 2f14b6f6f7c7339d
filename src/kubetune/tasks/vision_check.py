"""Check a model that sees before it trains: packed batches with images against the model's own code.

The sequences of the check have 7, 19 and other numbers of tokens. Those of 7 and of 19 hold an image each:

    tokens   1 2 3 [image] 4 5 6 7        its features are in the place of as many placeholder tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from kubetune import errors
from kubetune.batching.batch import Batch
from kubetune.batching.image_batches import collate_pictured
from kubetune.data.vision.image_processor import ImageProcessor, Picture, Upright
from kubetune.models.attention_hooks import CannotRunPaddingFree
from kubetune.models.padding_free import (
    FOREIGN_ERRORS,
    check_padding_free,
    packed_logits,
    require_head,
)
from kubetune.tasks import vision_forward

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Width and height of the image in a sequence of so many tokens. The check also runs sequences alone and with other words,
# so the length alone tells which of them has an image.
EXAMPLES = {7: (96, 64), 19: (64, 112)}


def require_sight(model: nn.Module, processor: ImageProcessor) -> None:
    """Raise ModelError if the model cannot look at an image as its processor prepares it.

    It cannot if the tower makes more or fewer features than the image has tokens, or if hidden states, head and rule do
    not give the logits of the model's own code.
    """
    # The shortest sequence with an image is enough.
    length = min(EXAMPLES)
    picture = _examples(processor)[length]
    row = _with_image(np.arange(1, length + 1, dtype=np.uint32), picture, processor)
    batch = collate_pictured([row], [[picture]], processor)
    hidden_states = partial(vision_forward.hidden_states, padding_free=False)
    try:
        require_head(model, batch, hidden_states, vision_forward.plain_logits)
    except FOREIGN_ERRORS as error:
        raise errors.ModelError(
            f"{processor.name} cannot look at an image as its processor prepares it: {' '.join(str(error).split())}"
        ) from error


def check_packed(model: nn.Module, processor: ImageProcessor) -> float:
    """Compare the padding-free run with the model's own attention, as `check_padding_free` does."""
    # Without a grid only the model's own code knows the positions of an image's tokens.
    if not processor.is_grid:
        raise CannotRunPaddingFree("its images are no grids of patches")
    pictures = _examples(processor)
    run_packed = partial(packed_logits, partial(vision_forward.hidden_states, padding_free=True))

    def collate(sequences: Sequence[NDArray[np.uint32]]) -> Batch:
        rows = []
        pictures_of_rows = []
        for ids in sequences:
            picture = pictures.get(len(ids))
            rows.append(_with_image(ids, picture, processor))
            pictures_of_rows.append([picture] if picture else [])

        return collate_pictured(rows, pictures_of_rows, processor)

    return check_padding_free(
        model,
        collate,
        run_packed,
        vision_forward.plain_logits,
    )


def _examples(processor: ImageProcessor) -> dict[int, Picture | Upright]:
    """Return images of noise by the length of the sequence that they belong to."""
    from PIL import Image

    # Noise: of an even image all patches give the same features, and their order would not matter.
    pictures = {}
    for length, (width, height) in EXAMPLES.items():
        noise = np.random.default_rng(length).integers(
            0,
            256,
            (height, width, 3),
            np.uint8,
        )
        # As a file, since the processor reads files: the check takes the way of the training data.
        buffer = BytesIO()
        Image.fromarray(noise).save(buffer, "PNG")
        pictures[length] = processor.process(buffer.getvalue())

    return pictures


def _with_image(
    ids: NDArray[np.uint32],
    picture: Picture | Upright | None,
    processor: ImageProcessor,
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Return ids with the image's placeholders after the third token, all of them trained."""
    token = processor.placeholder.token
    # A word that happens to be the placeholder would ask for an image.
    ids = np.where(ids == token, token - 1, ids).astype(np.uint32)
    if picture is not None:
        placeholders = [token] * processor.features(picture)
        ids = np.insert(ids, 3, placeholders).astype(np.uint32)
    return ids, np.ones(len(ids), bool)
