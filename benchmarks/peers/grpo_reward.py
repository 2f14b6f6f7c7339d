"""The reward of benchmarks.grpo, in TRL's form, which kubetune takes too."""

from __future__ import annotations

from collections import Counter
from typing import Any


def alike(completions: list[Any], command: list[str], **_: Any) -> list[float]:
    """Return the share of words that an answer and the right command have in common."""
    rewards = []
    for completion, right in zip(completions, command, strict=True):
        mine = Counter(completion[0]["content"].split())
        wanted = Counter(right.split())
        rewards.append(2 * (mine & wanted).total() / max(1, mine.total() + wanted.total()))
    return rewards
