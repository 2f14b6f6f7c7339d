"""Decide when prefixes are shared (prefixes.py says what that is): which runs may, and when it is worth it.

This file needs no numpy, so that a plan and a check of a small file do without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubetune.config.schema import DataConfig, PreferenceConfig

# Tokens; prefixes are shared in multiples of it: a few equal words are not worth a sequence of their own.
GRAIN = 16
# Prefixes are shared where that saves at least this part of the tokens: batches of like rows are less even ones.
LEAST_SHARE = 0.02


def may_share_prefixes(
    task: str,
    data: DataConfig,
    preference: PreferenceConfig,
) -> bool:
    """True if a run may share prefixes, as far as its config says.

    KTO judges answers one by one, and beside questions that are not theirs; classifiers and images have no packed
    batches in which a prefix could occur once.
    """
    if task == "preference":
        is_text = preference.loss != "kto"
    else:
        is_text = task in ("causal_lm", "distill", "reward_model")
    if not is_text or preference.images:
        return False
    return data.packing and data.share_prefixes is not False


def repeated_tokens(rows: Sequence[Sequence[Sequence[int]]]) -> int:
    """Return how many tokens would be computed once too often if all rows were in one batch.

    A row is a list of sequences. Sorted, each sequence repeats what it has in common with the one before it.
    """
    ordered = []
    for sequences in rows:
        ordered += [list(ids) for ids in sequences]
    ordered.sort()
    repeated = 0
    for before, after in pairwise(ordered):
        common = 0
        for one_token, other_token in zip(before, after, strict=False):
            if one_token != other_token:
                break
            common += 1
        repeated += common // GRAIN * GRAIN

    return repeated
