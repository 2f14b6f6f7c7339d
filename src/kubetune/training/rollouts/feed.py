"""The batches of `task: grpo`: the same interface as batching/feed.Feed, with answers that the model draws itself.

A set of answers serves `window` optimizer steps. With `steps_per_generation: 2` and `num_iterations: 2`:

    optimizer step    0  1  2  3 | 4  5  6  7        answers are drawn before steps 0 and 4, by the weights then
    prompts of        0  1  0  1 | 2  3  2  3        so many steps of the data: each prompt serves twice

So what a step learns from follows from the step, the seed and the weights, and a run that goes on needs no other state
than the file of the answers (records.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kubetune.base import logs
from kubetune.batching.batch import Batch, collate
from kubetune.batching.drawn_answers import DrawnAnswers
from kubetune.batching.feed import Feed, Work
from kubetune.batching.prefix_sharing import collate_shared
from kubetune.config.schema import GrpoConfig, RewardConfig
from kubetune.data.prepared.micro_batches import split_batch
from kubetune.data.prepared.order import Ids
from kubetune.data.prepared.prefixes import split_by_prefix
from kubetune.data.prepared.rows import Rows
from kubetune.distributed.process_group import World
from kubetune.plan.plan import Plan
from kubetune.tasks.grpo.advantages import advantages, deviation, has_no_variance, summed_rewards
from kubetune.tasks.grpo.objective import divisor
from kubetune.training.rollouts.drawing import Drawer, Slot
from kubetune.training.rollouts.records import Answer, Group


@dataclass(frozen=True)
class _Row:
    """An answer that a step learns from, with its prompt."""

    sample: int  # row of the training data
    prompt: list[int]
    answer: Answer
    advantage: float

    @property
    def ids(self) -> NDArray[np.uint32]:
        """Return the ids of prompt and answer."""
        return np.array([*self.prompt, *self.answer.ids], np.uint32)

    @property
    def sequence(self) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Return ids, and which of them are trained: the answer's."""
        ids = self.ids
        return ids, np.arange(len(ids)) >= len(self.prompt)


@dataclass(frozen=True)
class _Window:
    """The answers of some optimizer steps."""

    first: int  # the optimizer step that they were drawn before
    groups: list[list[Group]]  # of each step of the data
    advantages: list[list[list[float]]]  # of each step of the data, group and answer


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
        balances_experts: bool = False,
    ) -> None:
        """`prompts` says which rows make up a step. `padding_free`, `share_prefixes`: as batching/feed.Feed has them.

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
        self._computes_all = drawer.settings.beta > 0 or balances_experts
        self._window: _Window | None = None

    def samples(self, step: int) -> Ids:
        """Return the rows whose prompts a step learns from, the same on every rank and at every world size."""
        return self._prompts.samples(self._data_step(step))

    def _data_step(self, step: int) -> int:
        number, place = divmod(step, self._settings.window)
        size = self._settings.steps_per_generation
        return number * size + place % size

    def step(self, step: int) -> Work | None:
        """Return this rank's micro-batches of a step; None if a stop was asked for while answers were drawn.

        Where answers have to be drawn, the model's weights must be those after `step` steps.
        """
        first = step - step % self._settings.window
        is_new = self._window is None or self._window.first != first
        if is_new:
            self._window = self._drawn(first, is_late=step > first)
        if self._window is None:
            return None
        place = (step - first) % self._settings.steps_per_generation
        groups = self._window.groups[place]
        work = self._work(groups, self._window.advantages[place])
        measured = measured_of(groups, self._rewards)
        return replace(work, measured=measured, seconds=self._drawer.seconds if is_new else {})

    def slots(self, first: int) -> list[Slot]:
        """Return all prompts of the window that begins at a step, step after step."""
        slots: list[Slot] = []
        first_data_step = self._data_step(first)
        for place in range(self._settings.steps_per_generation):
            for row in self._prompts.samples(first_data_step + place).tolist():
                slots.append(Slot(len(slots), row, self._prompt(row)))
        return slots

    def _drawn(self, first: int, *, is_late: bool) -> _Window | None:
        """Return the answers of a window; None if a stop was asked for meanwhile."""
        slots = self.slots(first)
        groups = self._drawer.groups(first, slots, is_late=is_late)
        if groups is None:
            return None

        summed = _summed(groups, self._rewards)
        if first == 0 and bool(has_no_variance(summed).all()):
            logs.DATA.warning(
                "the first %d answers teach nothing: to each prompt, all got the same reward (%.3g on average); such a "
                "model learns nothing by reward before it gets some prompts right: train it on examples first, take "
                "easier prompts or a reward that has more values",
                summed.numel(),
                float(summed.nanmean()),
            )

        # `scale_rewards: batch` compares with all answers that were drawn together, as TRL does.
        of_all = advantages(self._settings, summed).tolist()
        of_steps = []
        advantages_of_steps = []
        end = 0
        for place in range(self._settings.steps_per_generation):
            begin = end
            end += len(self._prompts.samples(self._data_step(first) + place))
            of_steps.append(groups[begin:end])
            advantages_of_steps.append(of_all[begin:end])
        return _Window(first, of_steps, advantages_of_steps)

    def _prompt(self, row: int) -> list[int]:
        ids, trained = self._rows.row(row)
        prompt: list[int] = ids[: int(trained.argmax())].tolist()
        return prompt

    def _work(self, groups: Sequence[Group], of_groups: Sequence[Sequence[float]]) -> Work:
        """Return this rank's micro-batches of some groups, by the advantages of their answers."""
        settings = self._settings
        trained: list[_Row] = []
        num_answers = 0  # of the step, for the divisor
        labels = 0
        tokens = 0
        for group, of_answers in zip(groups, of_groups, strict=True):
            for answer, advantage in zip(group.answers, of_answers, strict=True):
                num_answers += 1
                tokens += len(group.prompt) + len(answer.ids)
                if answer.is_cut and settings.mask_truncated_completions:
                    continue
                labels += len(answer.ids)
                # Without an advantage the gradient of an answer is 0, unless a divergence or the load of experts has one.
                if advantage or self._computes_all:
                    trained.append(_Row(group.row, group.prompt, answer, advantage))
        number = divisor(settings, num_answers, labels)
        share, computed = self._split(trained)
        # Measures are means over tokens that go through the model: of others training knows nothing.
        measured_tokens = sum(len(row.answer.ids) for row in trained)
        batches = []
        for places in share:
            rows = [trained[place] for place in places]
            batches.append(
                _batch_of(rows, measured_tokens, number, share_prefixes=self.share_prefixes)
            )
        return Work(
            batches,
            divisor=number,
            labels=labels,
            tokens=tokens,
            samples=len(groups),
            computed=computed,
        )

    def _split(self, rows: Sequence[_Row]) -> tuple[list[Ids], int]:
        """Return the numbers of the rows of this rank's micro-batches, and how many tokens all ranks compute."""
        if not rows:
            return [], 0
        places = np.arange(len(rows))
        if self.share_prefixes and self._token_budget is not None:
            split, computed = split_by_prefix(
                places, lambda place: [rows[place].ids], self._world.size, self._token_budget
            )
            return split[self._world.rank], computed
        lengths = np.array([len(row.prompt) + len(row.answer.ids) for row in rows], np.int64)
        split = split_batch(
            places,
            lengths,
            self._world.size,
            token_budget=self._token_budget,
            sequences=self._sequences,
        )
        return split[self._world.rank], int(lengths.sum())

    def step_tokens(self, step: int) -> tuple[int, int]:
        """Return tokens of a step as far as the data know them, those of its prompts, computed and in all."""
        return self._prompts.step_tokens(self._data_step(step))

    def largest(self) -> Batch:
        """Return a micro-batch about as large as the run's largest: the longest prompts with answers of full length."""
        settings = self._settings
        longest = int(np.argmax(self._rows.lengths))
        prompt = self._prompt(longest)
        length = settings.max_completion_length
        # As many answers as fit a micro-batch, but no more than a rank has of a step.
        number = self._sequences
        if self._token_budget is not None:
            number = max(1, self._token_budget // (len(prompt) + length))
        most = -(-self._plan.global_batch_size * settings.num_generations // self._world.size)
        nothing = [0.0] * length
        answer = Answer(
            ids=[int(prompt[-1])] * length,
            text="",
            sampled=nothing,
            entropy=0.0,
            is_cut=True,
            rewards={},
            old=nothing if settings.window > 1 else None,
            reference=nothing if settings.beta else None,
        )
        rows = [_Row(longest, prompt, answer, 1.0)] * min(number, most)
        labels = length * len(rows)
        return _batch_of(rows, labels, divisor(settings, len(rows), labels), share_prefixes=False)


def _batch_of(rows: Sequence[_Row], labels: int, number: int, *, share_prefixes: bool) -> Batch:
    """Return answers as one batch. `labels`: tokens of all computed answers of the step; `number`: its loss's divisor."""
    lay = collate_shared if share_prefixes else collate
    batch = lay([row.sequence for row in rows], [row.sample for row in rows])
    drawn = DrawnAnswers(
        advantages=torch.tensor([row.advantage for row in rows]),
        counts=torch.tensor([len(row.answer.ids) for row in rows]),
        sampled=torch.tensor([logp for row in rows for logp in row.answer.sampled]),
        old=_joined([row.answer.old for row in rows]),
        reference=_joined([row.answer.reference for row in rows]),
        computed_labels=labels,
        divisor=number,
    )
    return replace(batch, drawn=drawn)


def _joined(of_rows: Sequence[list[float] | None]) -> torch.Tensor | None:
    """Return numbers of tokens end to end, None where rows have none."""
    joined: list[float] = []
    for of_row in of_rows:
        if of_row is None:
            return None
        joined += of_row
    return torch.tensor(joined)


def _summed(groups: Sequence[Group], rewards: Sequence[RewardConfig]) -> torch.Tensor:
    """Return the weighted rewards of all answers, `[groups, answers]`, NaN where none could judge."""
    weights = torch.tensor([reward.weight for reward in rewards])
    table = _table(groups, rewards)
    return summed_rewards(table, weights).view(len(groups), -1)


def _table(groups: Sequence[Group], rewards: Sequence[RewardConfig]) -> torch.Tensor:
    """Return what each reward said of each answer, `[answers of all groups, rewards]`, NaN where it could not judge."""
    lines = []
    for group in groups:
        for answer in group.answers:
            line = [answer.rewards[reward.title] for reward in rewards]
            lines.append([math.nan if number is None else number for number in line])
    return torch.tensor(lines)


def measured_of(groups: Sequence[Group], rewards: Sequence[RewardConfig]) -> dict[str, float]:
    """Return the numbers of a step's answers that do not depend on the loss."""
    table = _table(groups, rewards)
    summed = _summed(groups, rewards)
    answers = [answer for group in groups for answer in group.answers]
    lengths = [len(answer.ids) for answer in answers]
    tokens = sum(lengths)
    measured = {
        "reward": float(summed.nanmean()),
        "reward_std": float(deviation(summed.flatten())),
        "zero_variance": float(has_no_variance(summed).float().mean()),
        "unjudged": float(summed.isnan().float().mean()),
        "completion_length": tokens / len(answers),
        "truncated": sum(answer.is_cut for answer in answers) / len(answers),
        "entropy": sum(answer.entropy * len(answer.ids) for answer in answers) / tokens,
        "reward_errors": float(sum(len(group.errors) for group in groups)),
    }
    for number, reward in enumerate(rewards):
        column = table[:, number]
        measured[f"reward/{reward.title}"] = float(column.nanmean())
        measured[f"reward_std/{reward.title}"] = float(deviation(column))
    return measured | _logged(groups)


def _logged(groups: Sequence[Group]) -> dict[str, float]:
    """Return what reward functions logged, `logged/NAME`, as means over the groups that have it."""
    by_name: dict[str, list[float]] = {}
    for group in groups:
        for name, number in group.logged.items():
            by_name.setdefault(f"logged/{name}", []).append(number)
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in by_name.items()}
