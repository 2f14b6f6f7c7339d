"""Judge answers to held-out prompts by the run's own rewards: the metric `reward` of an evaluation of `task: grpo`.

The answers are the greedy ones that `scoring/judge` asks for. Ranks take rows in turns, and all get all rewards:

    round 0    rank 0: row 3     rank 1: row 8
    round 1    rank 0: row 11    rank 1: nothing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.base import logs
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import raise_first
from kubetune.rundir import heartbeat
from kubetune.scoring.judge import Rewarded, any_known
from kubetune.training.rollouts.rewarded_prompts import RewardedPrompt, rewarded_prompts

if TYPE_CHECKING:
    from kubetune.config.schema import RewardConfig
    from kubetune.data.prepared.rows import Rows
    from kubetune.data.text.tokenizer import Tokenizer
    from kubetune.distributed.process_group import World
    from kubetune.scoring.judge import Judge, Reply
    from kubetune.scoring.rewards.pool import RewardPool
    from kubetune.training.start.rank_start import RankStart


def have_answers(rows: Rows) -> bool:
    """True if each row of prompts has a right answer: without one its only label is the token that ends an answer."""
    return bool((rows.trained_counts > 1).all())


@dataclass(frozen=True)
class HeldOutRewards:
    """The rewards of a run, and the prompts of its evaluation data as they see them."""

    pool: RewardPool
    rewards: Sequence[RewardConfig]
    prompts: Mapping[int, RewardedPrompt]  # by row
    tokenizer: Tokenizer
    max_steps: int
    _explained: set[str] = field(default_factory=set)  # rewards of which an error was logged

    def judge(
        self,
        judge: Judge,
        answers: Mapping[int, Sequence[Reply]],
        step: int,
        world: World,
        is_stopping: Callable[[], bool],
    ) -> dict[int, Rewarded] | None:
        """Return the rewards of the greedy answers by row, the same on all ranks; None if a stop was asked for meanwhile.

        `step`: the weights are those after so many steps. Raise ConfigError, on every rank, for a reward that could
        judge no answer of the model before training.
        """
        rows = [question.row for question in judge.asked if question.row in answers]
        prompts = {question.row: question.ids for question in judge.asked}
        longest = judge.wanted.max_new_tokens
        rewarded: dict[int, Rewarded] = {}
        reasons: dict[str, list[str]] = {}
        for first in range(0, len(rows), world.size):
            if process_group.agree(is_stopping(), world):
                return None
            turn = _Turn()
            if first + world.rank < len(rows):
                row = rows[first + world.rank]
                turn = self._turn(row, prompts[row], answers[row][0], step, longest)
            for of_rank in self._gathered(turn, world):
                rewarded |= of_rank.rewarded
                for name, reason in of_rank.reasons.items():
                    reasons.setdefault(name, []).append(reason)

        self._explain(step, len(rows), rewarded, reasons)
        return rewarded

    def _gathered(self, turn: _Turn, world: World) -> list[_Turn]:
        """Return the turns of all ranks. Raise on every rank what any rank met."""
        turns = process_group.gather(turn, world)
        raise_first([of_rank.failure for of_rank in turns])
        return turns

    def _turn(
        self, row: int, prompt: Sequence[int], reply: Reply, step: int, longest: int
    ) -> _Turn:
        """Have one answer judged."""
        heartbeat.beat("evaluation")
        ids = list(reply.ids)
        if len(ids) < longest:
            # Training counts the token that ends an answer to it, and so do rewards.
            ids.append(self.tokenizer.eos_id)
        request = self.prompts[row].request(list(prompt), [reply.text], [ids], step, self.max_steps)
        try:
            judgements = self.pool.judge(request)
        except errors.KubetuneError as error:
            return _Turn(failure=error)

        total = 0.0
        rewards: dict[str, float | None] = {}
        reasons = {}
        for reward, judgement in zip(self.rewards, judgements, strict=True):
            value = judgement.rewards[0]
            rewards[reward.title] = value
            if value is not None:
                total += reward.weight * value
            if judgement.error:
                reasons[reward.title] = judgement.error
        return _Turn({row: Rewarded(total, rewards)}, reasons)

    def _explain(
        self,
        step: int,
        number: int,
        rewarded: Mapping[int, Rewarded],
        reasons: Mapping[str, Sequence[str]],
    ) -> None:
        """Log the first error of each reward, and that nothing was judged. Raise ConfigError for a mistake in a function."""
        for name, of_name in reasons.items():
            # What fails from the first answer on is a mistake in the function, and its evaluations would mean nothing.
            if not step and len(of_name) == number:
                raise errors.ConfigError(
                    f"reward {name} could judge no answer to the held-out prompts: {of_name[0].strip()}"
                )
            if name not in self._explained:
                self._explained.add(name)
                logs.EVAL.warning(
                    "reward %s failed on %d of %d held-out prompts; an answer that no reward judged counts as 0. The "
                    "first error: %s",
                    name, len(of_name), number, of_name[0],
                )  # fmt: skip
        if rewarded and not any(any_known(answer) for answer in rewarded.values()):
            logs.EVAL.warning(
                "no reward applied to any of %d held-out prompts (all returned None or NaN), so eval_reward is 0", number
            )  # fmt: skip


@dataclass(frozen=True)
class _Turn:
    """What a rank has of a round."""

    rewarded: dict[int, Rewarded] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # by a reward's name: why it could not
    failure: errors.KubetuneError | None = None


def held_out_of(start: RankStart, judge: Judge, pool: RewardPool) -> HeldOutRewards:
    """Return the rewards of the prompts that evaluations ask."""
    rewards = start.rewards
    rows = start.data.eval
    assert rows is not None
    asked = [question.row for question in judge.asked]
    prompts = rewarded_prompts(start.data.spec.splits["eval"], rows, asked, rewards)
    tokenizer = start.data.tokenizer
    return HeldOutRewards(pool, rewards, prompts, tokenizer, start.plan.num_steps)
