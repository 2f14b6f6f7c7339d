"""Sequences of a packed batch as rows of padded batches, for modules that take nothing else.

Example: sequences a (3 tokens), b (2) and c (1) of one packed batch, with no shared beginnings:

    packed batch     a a a b b c           cu_seqlens 0 3 5 6
    padded batch     a a a     0 1 2       places in the packed batch; in padding 0
                     b b .     3 4 0
                     c . .     5 0 0
    places           0 1 2 3 4 6           where each packed token is in the padded batch
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kubetune.kernels.attention.blockwise import paths

# One more call of a module costs about as much as so many tokens of padding.
CALL_TOKENS = 64


class PaddedRows(NamedTuple):
    """Sequences of a packed batch as rows of padded ones."""

    batches: tuple[Tensor, ...]  # int64 [rows, tokens] places in the packed batch
    places: Tensor  # int64 [tokens] where each packed token is in the batches, laid end to end


@lru_cache(maxsize=2)
def rows_of(
    cu_seqlens: tuple[int, ...],
    parents: tuple[int, ...],
    device: torch.device,
) -> PaddedRows:
    """Return the sequences in padded batches, sorted by length, so that little is padding.

    A sequence that others continue has no row: it is in theirs.
    """
    # 1. Where the tokens of each row are in the packed batch, shared beginnings included.
    sequences = []
    for number, path in enumerate(paths(cu_seqlens, parents)):
        if number not in parents:
            sequences.append(torch.cat([torch.arange(span.start, span.stop) for span in path]))
    sequences.sort(key=len, reverse=True)

    # 2. Rows of like length go together. A token of a shared beginning is looked up in any of its rows.
    batches: list[Tensor] = []
    places = torch.empty(cu_seqlens[-1], dtype=torch.long)
    offset = 0
    for start, stop in batches_of([len(row) for row in sequences]):
        rows = sequences[start:stop]
        batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        for number, row in enumerate(rows):
            places[row] = offset + number * batch.shape[1] + torch.arange(len(row))
        offset += batch.numel()
        batches.append(batch.to(device))

    return PaddedRows(tuple(batches), places.to(device))


def batches_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the boundaries of the cheapest padded batches. `lengths` are in descending order.

    Example: lengths 100, 90, 10, 10. One batch costs 64 + 4 × 100 = 464, the two batches 0:2 and 2:4
    cost 64 + 200 and 64 + 20, 348 in all.
    """
    # costs[n]: the least cost of the first n rows; starts[n]: where the last of their batches begins.
    costs = [0]
    starts = [0]
    for stop in range(1, len(lengths) + 1):
        # The last batch of the first `stop` rows may begin at any of them.
        choices = []
        for start in range(stop):
            padded = lengths[start] * (stop - start)
            choices.append((costs[start] + CALL_TOKENS + padded, start))
        cost, start = min(choices)
        costs.append(cost)
        starts.append(start)

    # Back from the end, batch by batch.
    boundaries = []
    stop = len(lengths)
    while stop:
        boundaries.append((starts[stop], stop))
        stop = starts[stop]
    boundaries.reverse()
    return boundaries
