"""How much prefix sharing (data/prepared/prefixes.py) saves a run, as plans and checks tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kubetune.data.prepared.prefix_rules import LEAST_SHARE, may_share_prefixes, repeated_tokens

if TYPE_CHECKING:
    from kubetune.config.schema import DataConfig, PreferenceConfig, TrainingConfig


def saved_share(
    rows: Sequence[Sequence[Sequence[int]]],
    task: str,
    data: DataConfig,
    preference: PreferenceConfig,
    training: TrainingConfig,
) -> float:
    """Return the share of the tokens of such rows, lists of sequences, that one process would not compute again.

    It is 0 where the run may not share prefixes, or would save too little by it.
    """
    if not may_share_prefixes(task, data, preference):
        return 0.0
    whole = sum(len(ids) for sequences in rows for ids in sequences)
    if repeated_tokens(rows) < max(1, LEAST_SHARE * whole):
        return 0.0
    import numpy as np  # only where it is needed: a check of a small file is done before it would be imported

    from kubetune.data.prepared.prefixes import split_by_prefix

    arrays = [[np.array(ids, np.uint32) for ids in sequences] for sequences in rows]
    batch = training.per_device_train_batch_size
    steps = training.gradient_accumulation_steps or 1
    rows_per_step = training.global_batch_size or batch * steps
    tokens = training.global_batch_tokens
    if tokens == "packed":
        tokens = batch * steps * data.max_length
    if tokens is not None:
        rows_per_step = max(1, round(int(tokens) * len(rows) / whole))
    computed = 0
    for ids in np.split(np.arange(len(rows)), range(rows_per_step, len(rows), rows_per_step)):
        computed += split_by_prefix(ids, arrays.__getitem__, 1, batch * data.max_length)[1]
    share = 1 - computed / whole
    return share if share >= LEAST_SHARE else 0.0
