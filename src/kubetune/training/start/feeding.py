"""Make the batches of a run, and decide whether prefixes that its rows share are computed once."""

from __future__ import annotations

from functools import partial

from kubetune.base import logs
from kubetune.batching.feed import Feed
from kubetune.data.prepared.prefix_rules import LEAST_SHARE, may_share_prefixes
from kubetune.data.prepared.prepare import Prepared
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models import fsdp, prefix_sharing
from kubetune.models.learner import Learner
from kubetune.models.loading import check_positions
from kubetune.plan.plan import Plan
from kubetune.scoring.judge import Judge
from kubetune.training.learner_flops import flops_of
from kubetune.training.rollouts.assembly import make_rollout_feed
from kubetune.training.rollouts.rollout_feed import RolloutFeed
from kubetune.training.start.rank_start import RankStart

# The first steps, whose rows are compared.
STEPS = 4


def make_batches(
    start: RankStart, learner: Learner, judge: Judge | None
) -> tuple[Feed | RolloutFeed, Plan]:
    """Return the batches of a run: rows of its data, or answers that the model draws to their prompts; and its plan.

    All ranks call it. `judge`: of its evaluations.
    """
    spec = start.data.spec
    if start.config.draws_answers:
        # Answers go on after their prompts.
        check_positions(learner.lm, start.data.longest + start.model.grpo.max_completion_length)
        return make_rollout_feed(start, learner, judge), start.plan
    may_share = may_share_prefixes(spec.task, spec.data, spec.preference)
    seed = start.training.seed
    return make_feed(start.plan, seed, start.data, start.world, learner, may_share=may_share)


def make_feed(
    plan: Plan,
    seed: int,
    data: Prepared,
    world: World,
    learner: Learner,
    *,
    may_share: bool,
) -> tuple[Feed, Plan]:
    """Return the batches of a run, and its plan with the share of the tokens that shared prefixes save.

    All ranks call it. `may_share`: the config allows prefixes to be shared.
    """
    # Ranks wait for the slowest, so each gets rows of about equally many FLOPs.
    flops = None
    if world.size > 1:
        flops = flops_of(learner, data.train)
    # The same batches, but for how they are put together.
    feed = partial(
        Feed,
        data.train,
        plan,
        seed,
        world,
        padding_free=learner.route.padding_free,
        even=fsdp.is_sharded(learner.model),
        costs=flops,
    )
    if not may_share:
        return feed(), plan

    # Whether it pays is seen on the rows of the first steps, without running the model.
    sharing = feed(share_prefixes=True)
    share = saved_share(sharing, plan)
    if share < LEAST_SHARE:
        return feed(), plan

    line = f"prefixes that rows share ({share:.0%} of the tokens) are computed"
    # All ranks share, or none does: if one cannot, its reason is everybody's.
    why_not = prefix_sharing.why_not(learner)
    if learner.teacher is not None:
        # It reads the same batches.
        why_not = why_not or prefix_sharing.why_not(learner.teacher)
    of_ranks = process_group.gather(why_not, world)
    reasons = [reason for reason in of_ranks if reason]
    if reasons:
        logs.DATA.info(
            "%s again for each row, since the model does not let them be shared: %s",
            line,
            reasons[0],
        )
        return feed(), plan

    logs.DATA.info("%s once", line)
    return sharing, plan.model_copy(update={"saved_share": share})


def saved_share(feed: Feed, plan: Plan) -> float:
    """Return the share of the tokens of the first steps that shared prefixes save."""
    computed = 0
    tokens = 0
    for step in range(min(STEPS, plan.num_steps)):
        computed_of_step, tokens_of_step = feed.step_tokens(step)
        computed += computed_of_step
        tokens += tokens_of_step
    return 1 - computed / max(1, tokens)
