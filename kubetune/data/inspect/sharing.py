"""Share of a run's tokens that lies in beginnings which other rows of a step have too, as plans and checks tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kubetune.data.prepared.spared import LEAST_SHARE, may_share, sparable

if TYPE_CHECKING:
    from kubetune.config.schema import Config


def spared_share(config: Config, rows: Sequence[Sequence[Sequence[int]]]) -> float:
    """Share of the tokens of such rows, each given by its sequences, that one process would not compute again.

    0 where it is too little to be taken up.
    """
    if not (may_share(config) and rows):
        return 0.0
    whole = sum(len(ids) for sequences in rows for ids in sequences)
    if sparable(rows) < LEAST_SHARE * whole:
        return 0.0
    import numpy as np  # only where it is needed: a check of a small file is done before it would be imported

    from kubetune.data.prepared.prefixes import split_shared

    found = [[np.array(ids, np.uint32) for ids in sequences] for sequences in rows]
    training = config.training
    batch, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps or 1
    in_step = training.global_batch_size or batch * steps
    if (tokens := training.global_batch_tokens) is not None:
        tokens = batch * steps * config.data.max_length if tokens == "packed" else tokens
        in_step = max(1, round(int(tokens) * len(rows) / max(1, whole)))
    computed = 0
    for ids in np.split(np.arange(len(rows)), range(in_step, len(rows), in_step)):
        computed += split_shared(ids, found.__getitem__, 1, batch * config.data.max_length)[1]
    share = 1 - computed / max(1, whole)
    return share if share >= LEAST_SHARE else 0.0
