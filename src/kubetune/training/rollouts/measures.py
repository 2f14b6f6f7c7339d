"""Numbers of a step's answers for the log, and their weighted rewards.

Two prompts with two answers each, two rewards of weight 1, of which the second could not judge the third answer:

    reward_table        1 0 | 1 1 | 0 NaN | 0 1        a line for each answer, a column for each reward
    weighted_rewards    1 2 | 0 1                      a line for each prompt
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kubetune.tasks.grpo.advantages import deviation, has_no_variance, summed_rewards

if TYPE_CHECKING:
    from kubetune.config.schema import RewardConfig
    from kubetune.training.rollouts.rollout_records import Group


def reward_table(groups: Sequence[Group], rewards: Sequence[RewardConfig]) -> torch.Tensor:
    """Return each answer's rewards, `[answers of all groups, rewards]`. NaN: the function could not judge the answer."""
    lines = []
    for group in groups:
        for answer in group.answers:
            line = []
            for reward in rewards:
                number = answer.rewards[reward.title]
                if number is None:
                    number = math.nan
                line.append(number)
            lines.append(line)
    return torch.tensor(lines)


def weighted_rewards(groups: Sequence[Group], rewards: Sequence[RewardConfig]) -> torch.Tensor:
    """Return the weighted sum of each answer's rewards, `[groups, answers]`. NaN: no function could judge it."""
    weights = torch.tensor([reward.weight for reward in rewards])
    sums = summed_rewards(reward_table(groups, rewards), weights)
    return sums.view(len(groups), -1)


def measures_of(groups: Sequence[Group], rewards: Sequence[RewardConfig]) -> dict[str, float]:
    """Return the numbers of a step's answers that do not depend on the loss."""
    # An answer's entropy is a mean over its tokens. Long answers count for more in that of the step.
    num_answers = 0
    num_tokens = 0
    num_cut = 0
    num_errors = 0
    entropy = 0.0  # summed over tokens
    for group in groups:
        num_errors += len(group.errors)
        for answer in group.answers:
            num_answers += 1
            num_tokens += len(answer.ids)
            num_cut += answer.is_cut
            entropy += answer.entropy * len(answer.ids)

    measures = {
        "completion_length": num_tokens / num_answers,
        "truncated": num_cut / num_answers,
        "entropy": entropy / num_tokens,
    }
    if not rewards:
        return measures

    # NaN stands for an answer that no function could judge: it is in no mean.
    sums = weighted_rewards(groups, rewards)
    measures |= {
        "reward": float(sums.nanmean()),
        "reward_std": float(deviation(sums.flatten())),
        "zero_variance": float(has_no_variance(sums).float().mean()),
        "unjudged": float(sums.isnan().float().mean()),
        "reward_errors": float(num_errors),
    }

    table = reward_table(groups, rewards)
    # The first reward says whether an answer is right: one right answer solves its prompt.
    #
    #     of the example above    1 1 | 0 0    best 1, 0    solved 0.5
    firsts = table[:, 0].view(len(groups), -1)
    best = firsts.nan_to_num(nan=-math.inf).amax(1)
    is_solved = best >= 1
    measures["solved"] = float(is_solved.float().mean())

    for column, reward in enumerate(rewards):
        values = table[:, column]
        measures[f"reward/{reward.title}"] = float(values.nanmean())
        measures[f"reward_std/{reward.title}"] = float(deviation(values))
    return measures | _logged(groups)


def _logged(groups: Sequence[Group]) -> dict[str, float]:
    """Return what reward functions logged, `logged/NAME`, as means over the groups that have it."""
    by_name: dict[str, list[float]] = {}
    for group in groups:
        for name, number in group.logged.items():
            by_name.setdefault(name, []).append(number)

    means = {}
    for name, numbers in by_name.items():
        means[f"logged/{name}"] = math.fsum(numbers) / len(numbers)
    return means
