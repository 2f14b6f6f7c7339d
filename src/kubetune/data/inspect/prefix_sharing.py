"""How much prefix sharing (data/prepared/prefixes.py) saves a run, as plans and checks say."""

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
    total = 0
    for sequences in rows:
        total += sum(map(len, sequences))
    # A quick look first: where little is repeated, nothing can be saved.
    if repeated_tokens(rows) < max(1, LEAST_SHARE * total):
        return 0.0
    # Only here: a check of a small file is done before numpy would be imported.
    import numpy as np

    from kubetune.data.prepared.prefixes import split_by_prefix

    arrays = []
    for sequences in rows:
        arrays.append([np.array(ids, np.uint32) for ids in sequences])

    # The rows of a step, by which of the three settings it is.
    batch = training.per_device_train_batch_size
    steps = training.gradient_accumulation_steps or 1
    rows_per_step = training.global_batch_size or batch * steps
    tokens_per_step = training.global_batch_tokens
    if tokens_per_step == "packed":
        tokens_per_step = batch * steps * data.max_length
    if tokens_per_step is not None:
        rows_per_step = max(1, round(int(tokens_per_step) * len(rows) / total))

    # Only rows of the same step can share anything.
    computed = 0
    for begin in range(0, len(rows), rows_per_step):
        ids = np.arange(begin, min(begin + rows_per_step, len(rows)))
        _, num_tokens = split_by_prefix(
            ids,
            arrays.__getitem__,
            1,
            batch * data.max_length,
        )
        computed += num_tokens

    share = 1 - computed / total
    return share if share >= LEAST_SHARE else 0.0
