"""The batches of a run, and whether the beginnings that its rows share are computed once."""

from __future__ import annotations

from functools import partial

from kubetune.base import logs
from kubetune.batching.feed import Feed
from kubetune.config.schema import Config
from kubetune.data.prepared.prefix_rules import LEAST_SHARE, may_share_prefixes
from kubetune.data.prepared.prepare import Prepared
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models import fsdp, prefix_sharing
from kubetune.models.learner import Learner
from kubetune.plan.plan import Plan
from kubetune.training.flops import flops_of

STEPS = 4
"""So many are looked at, to see whether rows begin alike."""


def make_feed(
    config: Config, plan: Plan, data: Prepared, world: World, learner: Learner
) -> tuple[Feed, Plan]:
    """The batches of a run, and its plan with the share of the tokens that they spare. All ranks call it."""
    flops = flops_of(learner, config, data.train) if world.size > 1 else None
    feed = partial(
        Feed,
        data.train,
        plan,
        config.training.seed,
        world,
        padding_free=learner.route.padding_free,
        even=fsdp.is_sharded(learner.model),
        costs=flops,
    )
    if not may_share_prefixes(config.task, config.data, config.preference):
        return feed(), plan
    sharing = feed(shares=True)
    share = spared_share(sharing, plan)
    if share < LEAST_SHARE:
        return feed(), plan
    said = f"beginnings that rows share, {share:.0%} of the tokens, are computed"
    reasons = process_group.gather(prefix_sharing.why_not(learner), world)
    if reason := next((reason for reason in reasons if reason), ""):
        logs.DATA.info(
            "%s again for each row, since the model does not let them be shared: %s", said, reason
        )
        return feed(), plan
    logs.DATA.info("%s once", said)
    return sharing, plan.model_copy(update={"spared_share": share})


def spared_share(feed: Feed, plan: Plan) -> float:
    """Share of the tokens of the first steps that are not computed again; 0 where beginnings are not shared."""
    steps = [feed.step_tokens(step) for step in range(min(STEPS, plan.num_steps))]
    return 1 - sum(computed for computed, _ in steps) / max(1, sum(tokens for _, tokens in steps))
