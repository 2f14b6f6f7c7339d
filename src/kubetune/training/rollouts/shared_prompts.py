"""Decide whether the answers to a prompt share it in a batch."""

from __future__ import annotations

from kubetune.base import logs
from kubetune.config.schema import DataConfig
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models import prefix_sharing
from kubetune.models.learner import Learner


def may_share(data: DataConfig, learner: Learner, world: World) -> bool:
    """True if answers to the same prompt share it in a batch. All ranks share or none."""
    if not data.packing or data.share_prefixes is False:
        return False
    why_not = prefix_sharing.why_not(learner)
    if learner.teacher is not None:
        why_not = why_not or prefix_sharing.why_not(learner.teacher)
    for reason in process_group.gather(why_not, world):
        if reason:
            logs.DATA.info("prompts are computed for each of their answers: %s", reason)
            return False
    logs.DATA.info("prompts are computed once for all of their answers")
    return True
