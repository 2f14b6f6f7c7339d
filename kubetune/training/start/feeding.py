"""The batches of a run, and whether the beginnings that its rows share are computed once."""

from __future__ import annotations

from functools import partial

from kubetune.base import logs
from kubetune.batching.feed import Feed
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import Prepared
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models import fsdp, prefix_sharing
from kubetune.models.learner import Learner
from kubetune.planning.plan import Plan

STEPS = 4
"""So many are looked at, to see whether rows begin alike."""

LEAST_SHARE = 0.02
"""Of the tokens, what must be spared for sharing to be taken up: batches of like rows are less even ones."""


def make_feed(config: Config, plan: Plan, data: Prepared, world: World, learner: Learner) -> Feed:
    """The batches of a run. All ranks call it."""
    feed = partial(
        Feed,
        data.train,
        plan,
        config.training.seed,
        world,
        padding_free=learner.route.padding_free,
        even=fsdp.is_sharded(learner.model),
    )
    if config.data.share_prefixes is False or not config.data.packing or not _may_share(config):
        return feed()
    sharing = feed(shares=True)
    steps = [sharing.step_tokens(step) for step in range(min(STEPS, plan.num_steps))]
    share = 1 - sum(computed for computed, _ in steps) / max(1, sum(tokens for _, tokens in steps))
    if share < LEAST_SHARE:
        return feed()
    said = f"beginnings that rows share, {share:.0%} of the tokens, are computed"
    reasons = process_group.gather(prefix_sharing.why_not(learner), world)
    if reason := next((reason for reason in reasons if reason), ""):
        logs.DATA.info("%s again for each row, since the model does not let them be shared: %s", said, reason)
        return feed()
    logs.DATA.info("%s once", said)
    return sharing


def _may_share(config: Config) -> bool:
    """Tasks whose rows may: KTO sets answers beside questions that are not theirs, sequence by sequence."""
    return config.task == "causal_lm" or (config.task == "preference" and config.preference.loss != "kto")
