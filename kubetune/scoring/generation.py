"""Batched generation: prompts to new tokens, by transformers' own `generate` with its key-value cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from kubetune.data.text.tokenizer import Tokenizer


def generate(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    *,
    streamer: BaseStreamer | None = None,
) -> list[list[int]]:
    """New ids for each prompt, without what follows the first end token.

    Prompts of several lengths are padded on the left and masked, so that all go on from their last token; models whose
    state runs over the padding must be given those of one length. `settings`: arguments of transformers' `generate`.
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
        **settings,
    )
    return [until_end(row, ends) for row in out[:, longest:].tolist()]


def greedy(max_new_tokens: int) -> dict[str, Any]:
    """Settings of answers that are the likeliest token each time."""
    return {"max_new_tokens": max_new_tokens, "do_sample": False}


def until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """The ids before the first of `ends`."""
    return ids[: next((n for n, id in enumerate(ids) if id in ends), len(ids))]
