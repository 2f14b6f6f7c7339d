"""The answers that optimizer steps learn from, drawn for several steps at a time.

A set of answers serves `window` optimizer steps. With `steps_per_generation: 2` and `num_iterations: 2`:

    optimizer step    0  1  2  3 | 4  5  6  7        answers are drawn before steps 0 and 4, by the weights then
    data step         0  1  0  1 | 2  3  2  3        the prompts are those of so many steps of the data: each serves twice

So what a step learns from follows from the step, the seed and the weights, and a run that goes on needs no other state
than the file of the answers (rollout_records.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kubetune.base import logs
from kubetune.batching.feed import Feed
from kubetune.config.schema import GrpoConfig, RewardConfig
from kubetune.data.prepared.rows import Rows
from kubetune.tasks.grpo.advantages import advantages, has_no_variance
from kubetune.training.rollouts.drawer import Drawer
from kubetune.training.rollouts.measures import measures_of, weighted_rewards
from kubetune.training.rollouts.model_answers import Slot
from kubetune.training.rollouts.rewarded_prompts import prompt_ids
from kubetune.training.rollouts.rollout_records import Group


@dataclass(frozen=True)
class RatedGroup:
    """All answers to one prompt, with their advantages."""

    group: Group
    advantages: list[float]  # [answers]


@dataclass(frozen=True)
class _Window:
    """The answers of some optimizer steps."""

    first: int  # the optimizer step that they were drawn before
    data_steps: list[list[RatedGroup]]  # the groups of each step of the data


@dataclass(frozen=True)
class AnsweredStep:
    """What an optimizer step learns from."""

    rated: list[RatedGroup]
    measured: dict[str, float]
    seconds: dict[str, float]  # what its answers took, as timings.jsonl has it


class AnswerWindows:
    """Windows of steps, with the answers to their prompts. All ranks call it."""

    def __init__(
        self, prompts: Feed, rows: Rows, drawer: Drawer, rewards: Sequence[RewardConfig]
    ) -> None:
        """`prompts`: which rows make up a step of the data."""
        self.prompts = prompts
        self.rows = rows
        self.settings: GrpoConfig = drawer.settings
        self._drawer = drawer
        self._rewards = rewards
        self._window: _Window | None = None

    def data_step(self, step: int) -> int:
        """Return the step of the data whose prompts an optimizer step learns from."""
        # With the numbers of the picture above, step 6 is step 2 of window 1, which has data steps 2 and 3: 2 + 2 % 2.
        window, step_in_window = divmod(step, self.settings.window)
        data_steps = self.settings.steps_per_generation
        return window * data_steps + step_in_window % data_steps

    def step(self, step: int) -> AnsweredStep | None:
        """Return the answers of a step; None if a stop was asked for while they were drawn.

        Where answers have to be drawn, the model's weights must be those after `step` steps.
        """
        first = step - step % self.settings.window
        # A step that learns from answers drawn earlier did not wait for them.
        seconds = {"answers_seconds": 0.0}
        if self._window is None or self._window.first != first:
            began = time.perf_counter()
            self._window = self._draw(first, is_late=step > first)
            seconds = self._drawer.seconds | {"answers_seconds": time.perf_counter() - began}
        if self._window is None:
            return None

        place = (step - first) % self.settings.steps_per_generation
        rated = self._window.data_steps[place]
        measured = measures_of([member.group for member in rated], self._rewards)
        return AnsweredStep(rated, measured, seconds)

    def slots(self, first: int) -> list[Slot]:
        """Return all prompts of the window that begins at a step, step after step."""
        slots: list[Slot] = []
        first_data_step = self.data_step(first)
        for place in range(self.settings.steps_per_generation):
            for row in self.prompts.samples(first_data_step + place).tolist():
                slots.append(Slot(len(slots), row, prompt_ids(self.rows, row)))
        return slots

    def _draw(self, first: int, *, is_late: bool) -> _Window | None:
        """Return the answers of a window; None if a stop was asked for meanwhile."""
        groups = self._drawer.groups(first, self.slots(first), is_late=is_late)
        if groups is None:
            return None

        return _Window(first, self._by_data_step(first, self._rated(first, groups)))

    def _rated(self, first: int, groups: Sequence[Group]) -> list[RatedGroup]:
        """Return groups with the advantages of their answers: all alike where nothing rewards them."""
        if not self._rewards:
            return [RatedGroup(group, [1.0] * len(group.answers)) for group in groups]

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
            advantages(self.settings, rewards).tolist(),
            strict=True,
        ):
            rated.append(RatedGroup(group, of_answers))
        return rated

    def _by_data_step(self, first: int, rated: list[RatedGroup]) -> list[list[RatedGroup]]:
        """Return the groups of each step of the data in a window."""
        # The groups lie in the order of `slots`: those of one step of the data are next to each other.
        data_steps = []
        begin = 0
        for place in range(self.settings.steps_per_generation):
            end = begin + len(self.prompts.samples(self.data_step(first) + place))
            data_steps.append(rated[begin:end])
            begin = end
        return data_steps
