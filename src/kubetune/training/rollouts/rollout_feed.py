"""Batches of drawn answers: the same interface as batching/feed.Feed, for `task: grpo` and `task: distill`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from kubetune.batching.batch import Batch
from kubetune.batching.feed import NOTHING, Work, evened
from kubetune.config.schema import DistillConfig
from kubetune.data.order import Ids
from kubetune.data.prepared.micro_batches import split_batch
from kubetune.data.prepared.prefixes import split_by_prefix
from kubetune.distributed.process_group import World
from kubetune.models import fsdp
from kubetune.models.learner import Learner
from kubetune.plan.plan import Plan
from kubetune.scoring.counted_draws import uniforms
from kubetune.tasks.grpo.objective import divisor
from kubetune.training.rollouts.answer_rows import AnswerRow, batch_of
from kubetune.training.rollouts.answer_windows import AnswerWindows, RatedGroup
from kubetune.training.rollouts.held_out import HeldOutRewards
from kubetune.training.rollouts.rewarded_prompts import prompt_ids
from kubetune.training.rollouts.rollout_records import RewardedAnswer


class RolloutFeed:
    """The training batches of one rank, of answers that all ranks draw together."""

    def __init__(
        self,
        windows: AnswerWindows,
        plan: Plan,
        world: World,
        learner: Learner,
        *,
        share_prefixes: bool,
        is_drawn: Callable[[int], bool] = lambda _: True,
        shown: Mapping[int, list[int]] = MappingProxyType({}),
    ) -> None:
        """`share_prefixes`: as batching/feed.Feed has it. `is_drawn`: of a step; others learn from answers of the data.

        `shown`: what a teacher reads in place of the prompt, by row.
        """
        self._shown = shown
        self._is_drawn = is_drawn
        padding_free = learner.route.padding_free
        self._windows = windows
        self._settings = windows.settings
        self._plan = plan
        self._world = world
        self._token_budget = plan.micro_batch_tokens if padding_free else None
        self._sequences = plan.per_device_train_batch_size if padding_free else 1
        self.share_prefixes = share_prefixes
        self._even = fsdp.is_sharded(learner.model)
        # Routers that balance their experts have a loss of their own, to which every answer counts.
        self._computes_all = windows.settings.beta > 0 or learner.routing.balances
        self.held_out: HeldOutRewards | None = None  # set by the feed's maker

    def samples(self, step: int) -> Ids:
        """Return the rows whose prompts a step learns from, the same on every rank and at every world size."""
        return self._windows.prompts.samples(self._windows.data_step(step))

    def step(self, step: int) -> Work | None:
        """Return this rank's micro-batches of a step; None if a stop was asked for while answers were drawn.

        Where answers have to be drawn, the model's weights must be those after `step` steps.
        """
        if not self._is_drawn(step):
            return self._windows.prompts.step(step)
        answered = self._windows.step(step)
        if answered is None:
            return None
        work = self._work(answered.rated)
        return replace(work, measured=answered.measured, seconds=answered.seconds)

    def _work(self, rated: Sequence[RatedGroup]) -> Work:
        """Return this rank's micro-batches of some groups."""
        rows: list[AnswerRow] = []  # those that go through the model
        num_answers = 0
        labels = 0
        tokens = 0
        for member in rated:
            group = member.group
            for answer, advantage in zip(group.answers, member.advantages, strict=True):
                num_answers += 1
                tokens += len(group.prompt) + len(answer.ids)
                if answer.is_cut and self._settings.mask_truncated_completions:
                    continue
                labels += len(answer.ids)
                # Without an advantage the gradient of an answer is 0, unless a divergence or the load of experts has one.
                if advantage or self._computes_all:
                    shown = self._shown.get(group.row)
                    rows.append(AnswerRow(group.row, group.prompt, answer, advantage, shown))

        # The divisor counts all answers of the step, so that it does not depend on how many have an advantage.
        loss_divisor = divisor(self._settings, num_answers, labels)
        # Measures are means over tokens that go through the model: of others training knows nothing.
        computed_labels = sum(len(row.answer.ids) for row in rows)
        micro_batches, computed_tokens = self._split(rows)
        batches = []
        for places in micro_batches:
            batch = batch_of(
                [rows[place] for place in places],
                computed_labels,
                loss_divisor,
                share_prefixes=self.share_prefixes,
            )
            batches.append(batch)
        return Work(
            batches,
            divisor=loss_divisor,
            labels=labels,
            tokens=tokens,
            samples=len(rated),
            computed=computed_tokens,
        )

    def _split(self, rows: Sequence[AnswerRow]) -> tuple[list[Ids], int]:
        """Return the places of the rows in this rank's micro-batches, and how many tokens all ranks compute."""
        if not rows:
            return [NOTHING] if self._even else [], 0

        places = np.arange(len(rows))
        if self.share_prefixes and self._token_budget is not None:
            of_ranks, tokens = split_by_prefix(
                places,
                lambda place: [rows[place].sequence[0]],
                self._world.size,
                self._token_budget,
            )
        else:
            lengths = np.array([len(row) for row in rows], np.int64)
            tokens = int(lengths.sum())
            of_ranks = split_batch(
                places,
                lengths,
                self._world.size,
                token_budget=self._token_budget,
                sequences=self._sequences,
            )
        if self._even:
            of_ranks = evened(of_ranks)
        return of_ranks[self._world.rank], tokens

    def step_tokens(self, step: int) -> tuple[int, int]:
        """Return tokens of a step as far as the data know them, those of its prompts, computed and in all."""
        return self._windows.prompts.step_tokens(self._windows.data_step(step))

    def largest(self) -> Batch:
        """Return a micro-batch about as large as the run's largest: the longest prompts with answers of full length."""
        settings = self._settings
        rows = self._windows.rows
        longest = int(np.argmax(rows.lengths))
        prompt = prompt_ids(rows, longest)
        length = settings.max_completion_length

        # The values do not matter, but there must be as many as in training: they take memory too.
        zeros = [0.0] * length
        answer = RewardedAnswer(
            ids=[int(prompt[-1])] * length,
            text="",
            sampled=zeros,
            entropy=0.0,
            is_cut=True,
            rewards={},
            old=zeros if settings.window > 1 else None,
            reference=zeros if settings.beta else None,
        )
        shown = max(self._shown.values(), key=len, default=None)
        row = AnswerRow(longest, prompt, answer, advantage=1.0, shown=shown)

        # As many answers as fit a micro-batch, but no more than a rank has of a step.
        number = self._sequences
        if self._token_budget is not None:
            number = max(1, self._token_budget // len(row))
        answers_of_step = self._plan.global_batch_size * settings.num_generations
        answers_of_rank = -(-answers_of_step // self._world.size)  # rounded up
        number = min(number, answers_of_rank)
        labels = length * number
        return batch_of(
            [row] * number,
            labels,
            divisor(settings, number, labels),
            share_prefixes=False,
        )


def drawn_steps(distill: DistillConfig | None, seed: int) -> Callable[[int], bool]:
    """Return which steps learn from drawn answers: all, or the share of them that distillation wants."""
    if distill is None or distill.lmbda == 1:
        return lambda _: True
    share = distill.lmbda
    return lambda step: bool(uniforms(1, seed, "is drawn", step)[0] < share)
