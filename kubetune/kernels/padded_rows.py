"""Sequences of a packed batch as rows of padded batches, for what knows of no other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kubetune.kernels.attention.blockwise import paths

CALL_TOKENS = 64
"""Tokens of padding that cost about what one more call of a module does."""


class Rows(NamedTuple):
    """Sequences of a packed batch as rows of padded ones: `batches` of places `[rows, tokens]`, and where in them, laid
    end to end, each token of the packed batch is found."""

    batches: tuple[Tensor, ...]
    places: Tensor


@lru_cache(maxsize=2)
def rows_of(cu_seqlens: tuple[int, ...], parents: tuple[int, ...], device: torch.device) -> Rows:
    """Sequences by length in padded batches, so that little is padded; one that others go on from is in their rows."""
    found = list(paths(cu_seqlens, parents))
    ends = [
        torch.cat([torch.arange(span.start, span.stop) for span in path])
        for n, path in enumerate(found)
        if n not in parents
    ]
    ends.sort(key=len, reverse=True)
    batches: list[Tensor] = []
    places = torch.empty(cu_seqlens[-1], dtype=torch.long)
    offset = 0
    for start, stop in batches_of([len(row) for row in ends]):
        rows = ends[start:stop]
        batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        for n, row in enumerate(rows):
            places[row] = offset + n * batch.shape[1] + torch.arange(len(row))
        offset += batch.numel()
        batches.append(batch.to(device))
    return Rows(tuple(batches), places.to(device))


def batches_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Boundaries of padded batches of rows in descending order of length: as few as padding is worth."""
    best = [0.0] * (len(lengths) + 1)
    cuts = [0] * (len(lengths) + 1)
    for stop in range(1, len(lengths) + 1):
        best[stop], cuts[stop] = min(
            (best[start] + CALL_TOKENS + lengths[start] * (stop - start), start)
            for start in range(stop)
        )
    found, stop = [], len(lengths)
    while stop:
        found.append((cuts[stop], stop))
        stop = cuts[stop]
    return found[::-1]
