"""Put together what `task: grpo` or `task: distill` draws and learns from, at the start of a run."""

from __future__ import annotations

from kubetune import errors
from kubetune.batching.feed import Feed
from kubetune.models import fsdp
from kubetune.models.learner import Learner
from kubetune.models.loading import check_positions
from kubetune.scoring.judge import Judge
from kubetune.training.rollouts.answer_windows import AnswerWindows
from kubetune.training.rollouts.drawer import Drawer
from kubetune.training.rollouts.held_out import held_out_of
from kubetune.training.rollouts.model_answers import ModelAnswers, reference_of
from kubetune.training.rollouts.rewarding import Rewarding
from kubetune.training.rollouts.rewards_of_run import open_rewarding
from kubetune.training.rollouts.rollout_digest import digest_of
from kubetune.training.rollouts.rollout_feed import RolloutFeed, drawn_steps
from kubetune.training.rollouts.self_check import (
    name_unused_settings,
    require_sampling,
    say_of_parts,
    two_prompts,
)
from kubetune.training.rollouts.servers.connecting import served_by
from kubetune.training.rollouts.servers.served_drawer import ServedDrawer
from kubetune.training.rollouts.shared_prompts import may_share
from kubetune.training.rollouts.teacher_prompts import teacher_prompts
from kubetune.training.start.rank_start import RankStart


def make_rollout_feed(start: RankStart, learner: Learner, judge: Judge | None) -> RolloutFeed:
    """Return the batches of a run that learns from drawn answers. All ranks call it. `judge`: of its evaluations.

    Raise ConfigError for a reward that cannot be loaded, DataError for data that rewards or evaluations find nothing in.
    """
    settings = start.model.grpo
    data = start.data
    world = start.world
    name_unused_settings(learner.lm, world)
    padding_free = learner.route.padding_free
    if settings.servers is None:
        say_of_parts(learner, world)
        require_sampling(learner, two_prompts(data.train, padding_free), data.tokenizer.pad_id)
    seed = start.training.seed
    shares = may_share(start.data.spec.data, learner, world)
    prompts = Feed(
        data.train,
        start.plan,
        seed,
        world,
        padding_free=padding_free,
        even=fsdp.is_sharded(learner.model),
        share_prefixes=shares,
    )
    rewarding = open_rewarding(start, prompts)
    learner.undo.callback(rewarding.pool.close)

    # What draws: this model, or servers with its adapter.
    reference = reference_of(start.model, world, learner)
    model = ModelAnswers(learner, reference, data.tokenizer, settings, seed, world.device)
    made_by = digest_of(start, rewarding.pool)
    drawer = Drawer(start.run_dir, made_by, model, rewarding, world, lambda: start.stop.requested)
    if settings.servers is not None:
        drawer = served_by(drawer, settings.servers)

    windows = AnswerWindows(prompts, data.train, drawer, start.rewards)
    feed = RolloutFeed(
        windows,
        start.plan,
        world,
        learner,
        share_prefixes=shares,
        is_drawn=drawn_steps(learner.distill, seed),
        shown=_shown(start, learner, rewarding),
    )
    if judge is not None and start.rewards:
        feed.held_out = held_out_of(start, judge, rewarding.pool)
    if isinstance(drawer, ServedDrawer):
        drawer.slots_of = windows.slots
        learner.undo.callback(drawer.close)
    return feed


def _shown(start: RankStart, learner: Learner, rewarding: Rewarding) -> dict[int, list[int]]:
    """Return what a teacher reads in place of prompts, by row. Raise ConfigError for more than it can read."""
    if learner.distill is None:
        return {}
    shown = teacher_prompts(rewarding.prompts, learner.distill, start.data.tokenizer)
    longest = max(map(len, shown.values()), default=0) + start.model.grpo.max_completion_length
    served = learner.served_teacher
    if served is None:
        check_positions((learner.teacher or learner).lm, longest)
    elif longest > served.most_tokens:
        raise errors.ConfigError(
            f"distill.teacher_prompt: the teacher reads up to {longest:,} tokens with an answer, and its servers read "
            f"{served.most_tokens:,}; start them with --max-model-len {longest + 1}, or shorten it"
        )
    return shown
