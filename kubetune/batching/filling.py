"""Packed batches of few different lengths, where a new length costs more than some unused tokens.

Example: 200 tokens become 200 (a multiple of 8), 201 become 208. The 7 tokens behind are a sequence of
their own, or several, none longer than the batch's longest.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from kubetune.batching.batch import Batch


def filled_up(batch: Batch) -> Batch:
    """Return the batch with unused sequences behind its own, so that there are few different lengths.

    These are 16 for each power of two, at most a sixteenth more tokens. The new sequences repeat the
    batch's first token, and are no longer than its longest sequence.
    """
    tokens = batch.num_tokens
    longest = int(np.diff(batch.cu_seqlens).max())
    step = 1 << max(0, tokens.bit_length() - 5)
    added = -tokens % step
    if not added:
        return batch
    total = tokens + added
    segments = batch.segments
    if segments is not None:
        segments = F.pad(segments, (0, added))
    positions = torch.from_numpy(np.arange(added) % longest)  # torch takes a tenth of a millisecond
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, batch.input_ids[:1].expand(added)]),
        position_ids=torch.cat([batch.position_ids, positions]),
        cu_seqlens=(*batch.cu_seqlens, *range(tokens + longest, total, longest), total),
        segments=segments,
    )
