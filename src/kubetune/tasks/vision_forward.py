"""A forward of a model that sees: over a packed batch with its images, and of one sequence by the model's own code."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from kubetune.batching.batch import Batch
from kubetune.batching.image_batches import image_inputs
from kubetune.models.padding_free import backbone, varlen_kwargs


def hidden_states(
    lm: Any,
    batch: Batch,
    *,
    padding_free: bool,
) -> Tensor:
    """Return final hidden states `[tokens, hidden]` of one packed batch; `padding_free`: inside `packed(...)`."""
    arguments: dict[str, Any] = {}
    if padding_free:
        assert batch.pictures is not None, "prepared rows of this task have them"
        # The first row is for the mask, the others for the rotary embedding.
        rows = torch.cat([batch.position_ids[None], batch.pictures.positions])
        arguments["position_ids"] = rows[:, None]
        # As for text alone: a lone sequence needs no borders.
        if len(batch.cu_seqlens) > 2:
            arguments |= varlen_kwargs(batch.cu_seqlens, batch.input_ids.device)

    arguments |= image_inputs(batch)
    out = backbone(lm)(input_ids=batch.input_ids[None], use_cache=False, **arguments)
    return cast(Tensor, out[0][0])


def plain_logits(model: Any, batch: Batch) -> Tensor:
    """Return logits `[tokens, vocabulary]` of a single sequence by the model's own code."""
    out = model(input_ids=batch.input_ids[None], use_cache=False, **image_inputs(batch))
    return cast(Tensor, out.logits[0])
