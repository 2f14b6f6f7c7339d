"""Rules of sharing beginnings, prefixes.py, as far as they need no numpy: which runs may, and what is too little."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubetune.config.schema import Config

GRAIN = 16
"""Tokens; what rows share beyond a number of whole grains is computed for each."""
LEAST_SHARE = 0.02
"""Of the tokens, what must be spared for sharing to be taken up: batches of like rows are less even ones."""


def may_share(config: Config) -> bool:
    """Readiness of a run to share beginnings, as far as its config says.

    KTO sets answers beside questions that are not theirs, one by one; labelled texts and images have no such batches.
    """
    data, task = config.data, config.task
    is_text = task in ("causal_lm", "reward_model") or (
        task == "preference" and config.preference.loss != "kto"
    )
    return is_text and not config.sees and data.packing and data.share_prefixes is not False


def sparable(rows: Sequence[Sequence[Sequence[int]]]) -> int:
    """Tokens that all rows in one batch would spare: whole grains that each shares with the one before it, sorted."""
    ordered = sorted([list(ids) for sequences in rows for ids in sequences])
    alike = (
        takewhile(lambda both: both[0] == both[1], zip(*two, strict=False))
        for two in pairwise(ordered)
    )
    return sum(sum(1 for _ in pairs) // GRAIN * GRAIN for pairs in alike)
