"""Open the rewards of a run, with its prompts as they see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.base import logs
from kubetune.batching.feed import Feed
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import raise_first
from kubetune.scoring.rewards import isolation
from kubetune.scoring.rewards.pool import RewardPool
from kubetune.training.rollouts.rewarded_prompts import rewarded_prompts, rows_of_run
from kubetune.training.rollouts.rewarding import Rewarding
from kubetune.training.start.rank_start import RankStart

if TYPE_CHECKING:
    from kubetune.scoring.rewards.models import ModelJudge


def open_rewarding(start: RankStart, prompts: Feed) -> Rewarding:
    """Return the rewards and the prompts that any step of the run asks. All ranks call it.

    Raise ConfigError for a reward that cannot be loaded, DataError for data that rewards find nothing in.
    """
    rewards = start.rewards
    rows = start.data.train
    max_steps = start.plan.num_steps
    asked = rows_of_run(prompts, max_steps, start.model.grpo, len(rows))
    by_row = rewarded_prompts(start.data.spec.splits["train"], rows, asked, rewards)
    names = [reward.title for reward in rewards]
    return Rewarding(_open_pool(start), names, by_row, start.data.tokenizer, max_steps)


def _open_pool(start: RankStart) -> RewardPool:
    """Return this rank's rewards. Raise on all ranks what keeps one of them from having them."""
    spec = start.model
    rewards = start.rewards
    pool = None
    failure = None
    judges: dict[int, ModelJudge] = {}
    try:
        for number, reward in enumerate(rewards):
            if reward.is_model:
                # Its code imports what trains reward models.
                from kubetune.scoring.rewards.models import load_judge

                judges[number] = load_judge(
                    reward,
                    start.data.tokenizer,
                    start.world.device,
                    start.data.spec.data.max_length + spec.grpo.max_completion_length,
                    local_files_only=spec.model.local_files_only,
                )
        pool = RewardPool(rewards, spec.grpo, judges)
    except errors.KubetuneError as error:
        failure = error

    # A rank that raised here alone would leave the others waiting for it.
    try:
        raise_first(process_group.gather(failure, start.world))
    except errors.KubetuneError:
        if pool is not None:
            pool.close()
        raise
    assert pool is not None, "without one this rank has a failure"
    # What the kernel of this machine does not keep reward functions from.
    if pool.refused and any(reward.is_code for reward in rewards):
        logs.DATA.warning(
            "the kernel of this machine refuses reward functions %s; grpo.require_reward_isolation ends a run here",
            isolation.consequences(pool.refused),
        )
    return pool
