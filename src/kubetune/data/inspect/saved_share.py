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
    """Return the share of tokens, 0 to 1, that one process would save. `rows`: the sequences of each row, as token ids.

    It is 0 if the run may not share prefixes, or would save too little.
    """
    if not may_share_prefixes(task, data, preference):
        return 0.0
    total = 0
    for sequences in rows:
        total += sum(map(len, sequences))
    # A quick look first: if few tokens are repeated, nothing can be saved.
    if repeated_tokens(rows) < max(1, LEAST_SHARE * total):
        return 0.0
    # Imported here, since a check of a small file takes less time than the import of numpy.
    import numpy as np

    from kubetune.data.prepared.prefixes import split_by_prefix

    arrays = []
    for sequences in rows:
        arrays.append([np.array(ids, np.uint32) for ids in sequences])

    # Rows of a step, by whichever of three settings decides it: tokens of a step, rows of a step, or accumulation.
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
