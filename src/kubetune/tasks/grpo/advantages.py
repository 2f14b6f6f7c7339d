"""Advantages: by how much each answer was rewarded more than the other answers to its prompt.

Two prompts with three answers each, `scale_rewards: none`:

    rewards      1 0 0.5 | 1 1 1          NaN stands for an answer that no function could judge
    means        0.5     | 1
    advantages   0.5 -0.5 0 | 0 0 0       the second group has no variance: nothing is learnt from it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, assert_never

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kubetune.config.schema.grpo import GrpoConfig

# Added to a standard deviation before it divides, as TRL has it.
EPSILON: Final = 1e-4


def summed_rewards(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the rewards `[rows, functions]` of each row, `[rows]`.

    NaN means that a function could not judge the row; a row that none could judge has NaN.
    """
    total = (rewards * weights).nansum(1)
    is_unjudged = rewards.isnan().all(1)
    return total.masked_fill(is_unjudged, torch.nan)


def deviation(values: Tensor) -> Tensor:
    """Return the unbiased standard deviation along the last dimension, past NaN; 0 of fewer than two numbers."""
    is_known = ~values.isnan()
    number = is_known.sum(-1)
    # torch.std knows no NaN.
    mean = values.nanmean(-1, keepdim=True)
    squares = torch.where(is_known, values - mean, 0.0).square().sum(-1)
    return torch.where(number > 1, (squares / (number - 1).clamp(min=1)).sqrt(), 0.0)


def advantages(settings: GrpoConfig, rewards: Tensor) -> Tensor:
    """Return the advantage of each answer of the step, `[groups, num_generations]` as the summed `rewards` are.

    An answer without a reward has none, and does not count in the mean of its group.
    """
    differences = rewards - rewards.nanmean(1, keepdim=True)
    match settings.scale_rewards:
        case "group":
            differences = differences / (deviation(rewards)[:, None] + EPSILON)
        case "batch":
            differences = differences / (deviation(rewards.flatten()) + EPSILON)
        case "none":
            pass
        case unknown:
            assert_never(unknown)
    return differences.nan_to_num(nan=0.0)


def has_no_variance(rewards: Tensor) -> Tensor:
    """Return which groups of `[groups, num_generations]` have rewards that are all alike, bool `[groups]`."""
    spread = deviation(rewards)
    return torch.isclose(spread, torch.zeros_like(spread))
