"""Packed batches of few different lengths, where a new one costs more than some tokens that nobody looks at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from kubetune.batching.batch import Batch


def filled_up(batch: Batch) -> Batch:
    """The batch with sequences behind its own that nobody looks at, so that batches have few different lengths: at most
    a sixteenth more tokens, 16 values for each power of two. They repeat its first token, and are no longer than its
    longest sequence."""
    tokens, longest = batch.num_tokens, int(np.diff(batch.cu_seqlens).max())
    step = 1 << max(0, tokens.bit_length() - 5)
    if not (added := -tokens % step):
        return batch
    cu_seqlens = (
        *batch.cu_seqlens,
        *range(tokens + longest, tokens + added, longest),
        tokens + added,
    )
    positions = torch.from_numpy(np.arange(added) % longest)  # torch takes a tenth of a millisecond
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, batch.input_ids[:1].expand(added)]),
        position_ids=torch.cat([batch.position_ids, positions]),
        cu_seqlens=cu_seqlens,
        segments=None if batch.segments is None else F.pad(batch.segments, (0, added)),
    )
