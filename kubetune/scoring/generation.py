"""Batched generation: prompts to new tokens, by transformers' own `generate` with its key-value cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.generation.streamers import BaseStreamer

from kubetune.batching.image_batches import PictureReader, collate_pictured, image_inputs
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.data.vision.image_processor import ImageRef

_NEUTRAL: Final[Mapping[str, Any]] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
}
"""Keys of a generation_config that act without sampling too, and the values with which they change nothing."""


def generate(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    reader: PictureReader | None = None,
    images: Sequence[Sequence[ImageRef | bytes]] = (),
    *,
    streamer: BaseStreamer | None = None,
) -> list[list[int]]:
    """New ids for each prompt, without what follows the first end token.

    Prompts of several lengths are padded on the left and masked, so that all go on from their last token; models whose
    state runs over the padding must be given those of one length. `settings`: arguments of transformers' `generate`.
    `images` of each prompt are read by `reader`; where they are no grids, a prompt with some goes alone.
    """
    device, longest = next(model.parameters()).device, max(map(len, prompts))
    ids = torch.full((len(prompts), longest), tokenizer.pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    ends = tokenizer.eos_ids
    out = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        eos_token_id=list(ends),
        pad_token_id=tokenizer.pad_id,
        streamer=streamer,
        **(_seen(prompts, images, reader, longest, device) if reader is not None else {}),
        **settings,
    )
    return [until_end(row, ends) for row in out[:, longest:].tolist()]


def _seen(
    prompts: Sequence[Sequence[int]],
    images: Sequence[Sequence[ImageRef | bytes]],
    reader: PictureReader,
    longest: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """The images of prompts as the model's code takes them; nothing where there are none."""
    if not any(images):
        return {}
    rows = [(np.asarray(prompt, np.uint32), np.zeros(len(prompt), bool)) for prompt in prompts]
    seen = image_inputs(
        collate_pictured(rows, [reader.read(own) for own in images], reader.processor).to(device)
    )
    if (
        len(prompts) > 1
    ):  # what tokens are images is told of rows end to end, and asked of rows padded on the left
        kinds = seen["mm_token_type_ids"][0].split([len(prompt) for prompt in prompts])
        seen["mm_token_type_ids"] = torch.stack(
            [functional.pad(kind, (longest - len(kind), 0)) for kind in kinds]
        )
    return seen


def greedy(max_new_tokens: int) -> dict[str, Any]:
    """Settings of answers that are the likeliest token each time."""
    return {"max_new_tokens": max_new_tokens, "do_sample": False}


def acting_settings(model: Any) -> dict[str, Any]:
    """Return what a model's generation_config changes in answers that are called greedy, by key."""
    settings = model.generation_config
    values = {key: getattr(settings, key, None) for key in _NEUTRAL}
    return {
        key: value
        for key, value in values.items()
        if value is not None and value != _NEUTRAL[key] and value != []
    }


def until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """The ids before the first of `ends`."""
    return ids[: next((n for n, id in enumerate(ids) if id in ends), len(ids))]
