"""What `task: grpo` draws and learns from, made at the start of a run."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM

from kubetune import errors
from kubetune.base import files, logs
from kubetune.batching.feed import Feed
from kubetune.data.spec import DataSpec
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import raise_first
from kubetune.models import fsdp, prefix_sharing
from kubetune.models.loading import load_pretrained
from kubetune.models.spec import ModelSpec
from kubetune.scoring.generation import acting_settings
from kubetune.scoring.rewards import isolation
from kubetune.scoring.rewards.pool import RewardPool
from kubetune.tasks import causal_lm
from kubetune.training.rollouts.drawing import Drawer
from kubetune.training.rollouts.feed import RolloutFeed
from kubetune.training.rollouts.held_out import HeldOutRewards
from kubetune.training.rollouts.questions import rewarded_prompts
from kubetune.training.rollouts.self_check import require_sampling
from kubetune.training.rollouts.servers.drawing import ServedDrawer
from kubetune.training.rollouts.servers.start import served_by

if TYPE_CHECKING:
    from kubetune.config.schema import Config
    from kubetune.data.prepared.prepare import Prepared
    from kubetune.data.text.tokenizer import Tokenizer
    from kubetune.distributed.process_group import World
    from kubetune.models.learner import Learner
    from kubetune.plan.plan import Plan
    from kubetune.scoring.judge import Judge
    from kubetune.scoring.rewards.models import ModelJudge
    from kubetune.training.rollouts.questions import RewardedPrompt
    from kubetune.training.start.rank_start import RankStart

# Settings of `grpo` that decide the answers.
DECIDING = {
    "num_generations",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "num_iterations",
    "steps_per_generation",
    "generation_batch_size",
}


def make_rollout_feed(start: RankStart, learner: Learner, judge: Judge | None) -> RolloutFeed:
    """Return the batches of a run that learns by reward. All ranks call it. `judge`: of its evaluations.

    Raise ConfigError where a reward cannot be loaded, DataError for data that rewards or evaluations find nothing in.
    """
    config = start.config
    plan = start.plan
    data = start.data
    world = start.world
    _name_unused_settings(learner.lm, world)
    padding_free = learner.route.padding_free
    if config.grpo.servers is None:
        require_sampling(learner, _two_prompts(data, padding_free), data.tokenizer.pad_id)
    prompts = Feed(data.train, plan, config.training.seed, world, padding_free=padding_free)
    by_row = _prompts_of_run(prompts, plan, config, data)
    rewards = _reward_pool(config, world, data.tokenizer)
    learner.undo.callback(rewards.close)

    # What draws: this model, or servers with its adapter.
    drawer = Drawer(
        run_dir=start.run_dir,
        learner=learner,
        reference=_reference(config, world, learner),
        tokenizer=data.tokenizer,
        settings=config.grpo,
        rewards=rewards,
        names=[reward.title for reward in config.rewards],
        prompts=by_row,
        seed=config.training.seed,
        world=world,
        made_by=_digest(config, plan, data, rewards),
        max_steps=plan.num_steps,
        is_stopping=lambda: start.stop.requested,
    )
    if config.grpo.servers is not None:
        drawer = served_by(drawer, config.grpo.servers)

    feed = RolloutFeed(
        prompts,
        data.train,
        drawer,
        config.rewards,
        plan,
        world,
        padding_free=padding_free,
        share_prefixes=_may_share(config, learner, world),
        even=fsdp.is_sharded(learner.model),
        balances_experts=learner.routing.balances,
    )
    feed.held_out = _held_out(config, data, judge, rewards, plan.num_steps)
    if isinstance(drawer, ServedDrawer):
        drawer.slots_of = feed.slots
        learner.undo.callback(drawer.close)
    return feed


def _name_unused_settings(lm: Any, world: World) -> None:
    """Log what of the model's generation_config acts on answers of evaluations, and not on those that are learnt from."""
    settings = [f"{key} {value}" for key, value in acting_settings(lm).items()]
    if settings and world.is_main:
        logs.DATA.info(
            "answers are drawn by the model's own probabilities, without %s of its generation_config; evaluations use it",
            ", ".join(settings),
        )


def _prompts_of_run(
    prompts: Feed, plan: Plan, config: Config, data: Prepared
) -> dict[int, RewardedPrompt]:
    """Return the prompts that any step of the run asks, as rewards see them, by row."""
    sources = DataSpec.of(config).splits["train"]
    rows = _rows_of_run(prompts, plan, config, len(data.train))
    return rewarded_prompts(sources, data.train, rows, config.rewards)


def _name_open_bounds(rewards: RewardPool) -> None:
    """Log what the kernel of this machine does not keep reward functions from."""
    if rewards.refused:
        logs.DATA.warning(
            "the kernel of this machine refuses reward functions %s; grpo.require_reward_isolation ends a run here",
            isolation.consequences(rewards.refused),
        )


def _reward_pool(config: Config, world: World, tokenizer: Tokenizer) -> RewardPool:
    """Return this rank's rewards. Raise on all ranks what keeps one of them from having them."""
    pool = None
    failure = None
    judges: dict[int, ModelJudge] = {}
    try:
        for number, reward in enumerate(config.rewards):
            if reward.is_model:
                # Its code imports what trains reward models.
                from kubetune.scoring.rewards.models import load_judge

                judges[number] = load_judge(
                    reward,
                    tokenizer,
                    world.device,
                    config.data.max_length + config.grpo.max_completion_length,
                    local_files_only=config.model.local_files_only,
                )
        pool = RewardPool(config.rewards, config.grpo, judges)
    except errors.KubetuneError as error:
        failure = error

    # A rank that raised here alone would leave the others waiting for it.
    try:
        raise_first(process_group.gather(failure, world))
    except errors.KubetuneError:
        if pool is not None:
            pool.close()
        raise
    assert pool is not None, "without one this rank has a failure"
    if any(reward.is_code for reward in config.rewards):
        _name_open_bounds(pool)
    return pool


def _two_prompts(data: Prepared, padding_free: bool) -> list[list[int]]:
    """Return the shortest and the longest prompt; one alone for a model whose state would run over padding."""
    lengths = data.train.lengths
    rows = [int(lengths.argmin())]
    if padding_free:
        rows.append(int(lengths.argmax()))
    prompts = []
    for row in rows:
        ids, trained = data.train.row(row)
        # A prompt ends where the first trained token is.
        length = int(trained.argmax())
        prompts.append(ids[:length].tolist())
    return prompts


def _reference(config: Config, world: World, learner: Learner) -> Learner | None:
    """Return the model before training; None where the loss does not compare with it.

    Where every weight is trained it is loaded as a second model, also by a run that goes on.
    """
    if not config.grpo.beta:
        return None
    if config.lora is not None:
        return learner
    spec = ModelSpec.of(config).decided_for(world)
    model = load_pretrained(AutoModelForCausalLM, spec, world.device).eval()
    reference = causal_lm.TASK.learner_of(model, spec)
    return replace(reference, grpo=config.grpo)


def _held_out(
    config: Config, data: Prepared, judge: Judge | None, rewards: RewardPool, max_steps: int
) -> HeldOutRewards | None:
    """Return the rewards of the prompts that evaluations ask; None where there are no evaluations."""
    if judge is None:
        return None
    assert data.eval is not None
    sources = DataSpec.of(config).splits["eval"]
    rows = [question.row for question in judge.asked]
    prompts = rewarded_prompts(sources, data.eval, rows, config.rewards)
    return HeldOutRewards(rewards, config.rewards, prompts, data.tokenizer, max_steps)


def _rows_of_run(prompts: Feed, plan: Plan, config: Config, number: int) -> list[int]:
    """Return the rows that any step of the run asks, in order."""
    # 10 steps whose prompts serve twice each take 5 steps of the data, and the last window is drawn whole.
    data_steps = math.ceil(plan.num_steps / config.grpo.num_iterations)
    data_steps += config.grpo.steps_per_generation
    rows: set[int] = set()
    for data_step in range(data_steps):
        rows.update(prompts.samples(data_step).tolist())
        if len(rows) == number:
            break
    return sorted(rows)


def _may_share(config: Config, learner: Learner, world: World) -> bool:
    """True if answers to the same prompt share it in a batch. All ranks share or none."""
    if not config.data.packing or config.data.share_prefixes is False:
        return False
    for reason in process_group.gather(prefix_sharing.why_not(learner), world):
        if reason:
            logs.DATA.info("prompts are computed for each of their answers: %s", reason)
            return False
    logs.DATA.info("prompts are computed once for all of their answers")
    return True


def _digest(config: Config, plan: Plan, data: Prepared, rewards: RewardPool) -> str:
    """Return the digest of what decides the answers and their rewards, besides the weights."""
    code = []
    for reward in config.rewards:
        if reward.file:
            code.append(files.sha256_file(Path(reward.file).expanduser()))
    facts: dict[str, Any] = {
        "settings": config.grpo.model_dump(include=DECIDING),
        "has_reference": config.grpo.beta > 0,
        "rewards": [reward.model_dump(exclude={"weight"}) for reward in config.rewards],
        "code": code,
        "models": [judge.digest for judge in rewards.models.values()],
        "seed": config.training.seed,
        "batch": plan.global_batch_size,
        "data": data.fingerprint,
        "ends": list(data.tokenizer.eos_ids),
    }
    if config.grpo.servers is not None:
        # Which servers does not matter, but whose weights the answers are of.
        facts["lag"] = config.grpo.servers.lag
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
