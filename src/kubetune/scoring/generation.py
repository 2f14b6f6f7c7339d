"""Batched generation: prompts to new tokens, by transformers' own `generate` with its key-value cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.generation.streamers import BaseStreamer

from kubetune.batching.image_batches import PictureReader, collate_pictured, image_inputs
from kubetune.data.reading.images import ImageRef
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.errors import ModelError

# Keys of a generation_config that act without sampling too, and the values with which they change nothing.
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
    """Return new ids for each prompt, without what follows the first end token.

    Prompts of several lengths are padded on the left, so that all continue from their last token:

        ids     pad pad  a   b          mask    0 0 1 1
                 c   d   e   f                  1 1 1 1

    Models with a state that runs over the padding must be given prompts of one length. `settings`: arguments of
    transformers'
    `generate`. `images` of each prompt are read by `reader`; if they are no grids, a prompt with some is a batch of
    its own. Raise ModelError if logits are not finite.
    """
    device = next(model.parameters()).device
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), tokenizer.pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1

    # Models that see have other inputs next to the ids.
    inputs: dict[str, Tensor] = {}
    if reader is not None and any(images):
        inputs = _image_inputs(prompts, images, reader, longest, device)

    processors = [partial(_require_finite, model), *settings.get("logits_processor", ())]
    settings = {**settings, "logits_processor": processors}
    out = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        eos_token_id=list(tokenizer.eos_ids),
        pad_token_id=tokenizer.pad_id,
        streamer=streamer,
        **inputs,
        **settings,
    )
    return [until_end(row, tokenizer.eos_ids) for row in out[:, longest:].tolist()]


def _require_finite(model: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Return the logits of the next tokens. Raise ModelError if some are no numbers, as from weights that overflow."""
    # Tokens that other processors rule out are at -inf.
    if bool((scores.isnan() | scores.isposinf()).any()):
        raise ModelError(
            f"model {model.name_or_path}: its logits are not finite, so that no answer means anything. Its weights are "
            f"damaged, or its values leave the range of {str(model.dtype).removeprefix('torch.')}: get the weights "
            "again, or set model.dtype to float32"
        )
    return scores


def _image_inputs(
    prompts: Sequence[Sequence[int]],
    images: Sequence[Sequence[ImageRef | bytes]],
    reader: PictureReader,
    longest: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the images of prompts as the model's code takes them."""
    rows = []
    pictures = []
    for prompt, of_prompt in zip(prompts, images, strict=True):
        # Nothing is trained here, but a row of a batch says it of each token.
        is_trained = np.zeros(len(prompt), bool)
        rows.append((np.asarray(prompt, np.uint32), is_trained))
        pictures.append(reader.read(of_prompt))

    inputs = image_inputs(collate_pictured(rows, pictures, reader.processor).to(device))
    if len(prompts) > 1:
        # The kinds of tokens lie end to end, and generation wants them padded on the left.
        kinds = inputs["mm_token_type_ids"][0].split([len(prompt) for prompt in prompts])
        padded = [functional.pad(kind, (longest - len(kind), 0)) for kind in kinds]
        inputs["mm_token_type_ids"] = torch.stack(padded)

    return inputs


def greedy(max_new_tokens: int) -> dict[str, Any]:
    """Return the settings of answers that are the likeliest token each time."""
    return {"max_new_tokens": max_new_tokens, "do_sample": False}


def acting_settings(model: Any) -> dict[str, Any]:
    """Return what a model's generation_config changes in answers that are called greedy, by key."""
    acting = {}
    for key, neutral in _NEUTRAL.items():
        # A model may leave a setting out, or set it to what it is anyway.
        value = getattr(model.generation_config, key, None)
        if value not in (None, neutral, []):
            acting[key] = value
    return acting


def until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Return the ids before the first of `ends`."""
    # A row that ends before others of its batch continues with padding.
    for place, token in enumerate(ids):
        if token in ends:
            return ids[:place]
    return ids
