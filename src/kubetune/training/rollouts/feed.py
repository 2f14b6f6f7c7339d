"""The batches of `task: grpo`: the same interface as batching/feed.Feed, with answers that the model draws itself.

A set of answers serves `window` optimizer steps. With `steps_per_generation: 2` and `num_iterations: 2`:

    optimizer step    0  1  2  3 | 4  5  6  7        answers are drawn before steps 0 and 4, by the weights then
    data step         0  1  0  1 | 2  3  2  3        the prompts are those of so many steps of the data: each serves twice

So what a step learns from follows from the step, the seed and the weights, and a run that goes on needs no other state
than the file of the answers (records.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kubetune.base import logs
from kubetune.batching.batch import Batch
from kubetune.batching.feed import NOTHING, Feed, Work, evened
from kubetune.config.schema import GrpoConfig, RewardConfig
from kubetune.data.order import Ids
from kubetune.data.prepared.micro_batches import split_batch
from kubetune.data.prepared.prefixes import split_by_prefix
from kubetune.data.prepared.rows import Rows
from kubetune.distributed.process_group import World
from kubetune.plan.plan import Plan
from kubetune.tasks.grpo.advantages import advantages, has_no_variance
from kubetune.tasks.grpo.objective import divisor
from kubetune.training.rollouts.answer_rows import AnswerRow, batch_of
from kubetune.training.rollouts.drawing import Drawer, Slot
from kubetune.training.rollouts.held_out import HeldOutRewards
from kubetune.training.rollouts.measures import measures_of, weighted_rewards
from kubetune.training.rollouts.records import Answer, Group


@dataclass(frozen=True)
class _RatedGroup:
    """All answers to one prompt, with their advantages."""

    group: Group
    advantages: list[float]  # [answers]


@dataclass(frozen=True)
class _Window:
    """The answers of some optimizer steps."""

    first: int  # the optimizer step that they were drawn before
    data_steps: list[list[_RatedGroup]]  # the groups of each step of the data


class RolloutFeed:
    """The training batches of one rank, of answers that all ranks draw together."""

    def __init__(
        self,
        prompts: Feed,
        rows: Rows,
        drawer: Drawer,
        rewards: Sequence[RewardConfig],
        plan: Plan,
        world: World,
        *,
        padding_free: bool,
        share_prefixes: bool,
        even: bool = False,
        balances_experts: bool = False,
    ) -> None:
        """`prompts`: which rows make up a step. `padding_free`, `even`, `share_prefixes`: as batching/feed.Feed has them.

        `balances_experts`: routers have a loss of their own, to which every answer counts.
        """
        self._prompts = prompts
        self._rows = rows
        self._drawer = drawer
        self._settings: GrpoConfig = drawer.settings
        self._rewards = rewards
        self._plan = plan
        self._world = world
        self._token_budget = plan.micro_batch_tokens if padding_free else None
        self._sequences = plan.per_device_train_batch_size if padding_free else 1
        self.share_prefixes = share_prefixes
        self._even = even
        self._computes_all = drawer.settings.beta > 0 or balances_experts
        self._window: _Window | None = None
        self.held_out: HeldOutRewards | None = None  # set by the feed's maker

    def samples(self, step: int) -> Ids:
        """Return the rows whose prompts a step learns from, the same on every rank and at every world size."""
        return self._prompts.samples(self._data_step(step))

    def _data_step(self, step: int) -> int:
        """Return the step of the data whose prompts an optimizer step learns from."""
        # With the numbers of the picture above, step 6 is step 2 of window 1, which has data steps 2 and 3: 2 + 2 % 2.
        window, step_in_window = divmod(step, self._settings.window)
        data_steps = self._settings.steps_per_generation
        return window * data_steps + step_in_window % data_steps

    def step(self, step: int) -> Work | None:
        """Return this rank's micro-batches of a step; None if a stop was asked for while answers were drawn.

        Where answers have to be drawn, the model's weights must be those after `step` steps.
        """
        first = step - step % self._settings.window
        # A step that learns from answers drawn earlier did not wait for them.
        seconds = {"answers_seconds": 0.0}
        if self._window is None or self._window.first != first:
            began = time.perf_counter()
            self._window = self._draw(first, is_late=step > first)
            seconds = self._drawer.seconds | {"answers_seconds": time.perf_counter() - began}
        if self._window is None:
            return None

        place = (step - first) % self._settings.steps_per_generation
        rated = self._window.data_steps[place]
        measured = measures_of([member.group for member in rated], self._rewards)
        return replace(self._work(rated), measured=measured, seconds=seconds)

    def slots(self, first: int) -> list[Slot]:
        """Return all prompts of the window that begins at a step, step after step."""
        slots: list[Slot] = []
        first_data_step = self._data_step(first)
        for place in range(self._settings.steps_per_generation):
            for row in self._prompts.samples(first_data_step + place).tolist():
                slots.append(Slot(len(slots), row, self._prompt(row)))
        return slots

    def _draw(self, first: int, *, is_late: bool) -> _Window | None:
        """Return the answers of a window; None if a stop was asked for meanwhile."""
        groups = self._drawer.groups(first, self.slots(first), is_late=is_late)
        if groups is None:
            return None

        rewards = weighted_rewards(groups, self._rewards)
        if first == 0 and bool(rewards.isnan().all()):
            logs.DATA.warning(
                "the first %d answers teach nothing: for each of them, all rewards returned None or NaN, which means that "
                "they do not apply to it; look at what the functions return",
                rewards.numel(),
            )
        elif first == 0 and bool(has_no_variance(rewards).all()):
            logs.DATA.warning(
                "the first %d answers teach nothing: to each prompt, all got the same reward (%.3g on average); such a "
                "model learns nothing by reward before it gets some prompts right: train it on examples first, take "
                "easier prompts or a reward that has more values",
                rewards.numel(),
                float(rewards.nanmean()),
            )

        # `scale_rewards: batch` compares with all answers that were drawn together, as TRL does.
        rated = []
        for group, of_answers in zip(
            groups,
            advantages(self._settings, rewards).tolist(),
            strict=True,
        ):
            rated.append(_RatedGroup(group, of_answers))

        # The groups lie in the order of `slots`: those of one step of the data are next to each other.
        data_steps = []
        begin = 0
        for place in range(self._settings.steps_per_generation):
            end = begin + len(self._prompts.samples(self._data_step(first) + place))
            data_steps.append(rated[begin:end])
            begin = end
        return _Window(first, data_steps)

    def _prompt(self, row: int) -> list[int]:
        """Return the ids of a row of the data up to its first trained token."""
        ids, is_trained = self._rows.row(row)
        length = int(is_trained.argmax())
        prompt: list[int] = ids[:length].tolist()
        return prompt

    def _work(self, rated: Sequence[_RatedGroup]) -> Work:
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
                    rows.append(AnswerRow(group.row, group.prompt, answer, advantage))

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
        return self._prompts.step_tokens(self._data_step(step))

    def largest(self) -> Batch:
        """Return a micro-batch about as large as the run's largest: the longest prompts with answers of full length."""
        settings = self._settings
        longest = int(np.argmax(self._rows.lengths))
        prompt = self._prompt(longest)
        length = settings.max_completion_length

        # The values do not matter, but there must be as many as in training: they take memory too.
        zeros = [0.0] * length
        answer = Answer(
            ids=[int(prompt[-1])] * length,
            text="",
            sampled=zeros,
            entropy=0.0,
            is_cut=True,
            rewards={},
            old=zeros if settings.window > 1 else None,
            reference=zeros if settings.beta else None,
        )
        row = AnswerRow(longest, prompt, answer, advantage=1.0)

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
