"""Draw and reward the answers that some steps learn from, by all ranks, or take them from the file of an earlier start.

The prompts are cut into units, whole groups that are drawn together. Units follow from the prompts alone, so that any
number of ranks draws the same answers. Two ranks, four units of which the file has one:

    in the file    unit 1
    round 0        rank 0: unit 0    rank 1: unit 2    all gather, rank 0 appends both to the file
    round 1        rank 0: unit 3    rank 1: nothing
    then           rank 0 makes the file durable, and the step begins

An error of one rank, such as a reward that raises, is gathered with the groups and raised on all: ranks that did not
know of it would wait for a rank that has ended, and would end without the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kubetune import errors
from kubetune.base import logs
from kubetune.batching.batch import collate
from kubetune.batching.drawn_answers import answer_sequence
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import on_main, raise_first
from kubetune.models import fsdp
from kubetune.models.padding_free import own_attention
from kubetune.rundir import heartbeat
from kubetune.scoring.counted_draws import uniforms
from kubetune.tasks.grpo.task import log_probabilities
from kubetune.training.rollouts.records import Answer, Group, RolloutFile
from kubetune.training.rollouts.sampler import DrawnTokens, draw

if TYPE_CHECKING:
    from kubetune.config.schema import GrpoConfig
    from kubetune.data.text.tokenizer import Tokenizer
    from kubetune.distributed.process_group import World
    from kubetune.models.learner import Learner
    from kubetune.scoring.rewards.pool import RewardPool
    from kubetune.scoring.rewards.request import Judgement
    from kubetune.training.rollouts.questions import RewardedPrompt


@dataclass(frozen=True)
class Slot:
    """A prompt that is to be answered."""

    number: int  # its place among those that are drawn together
    row: int  # of the training data
    ids: list[int]  # of the prompt


@dataclass
class Drawer:
    """Draws answers with the weights as they are. All ranks call it."""

    run_dir: Path
    learner: Learner
    reference: Learner | None  # the model before training; None where nothing is compared with it
    tokenizer: Tokenizer
    settings: GrpoConfig
    rewards: RewardPool
    names: list[str]  # of the rewards
    prompts: Mapping[int, RewardedPrompt]  # by row
    seed: int
    world: World
    made_by: str  # digest of what decides the answers
    max_steps: int
    is_stopping: Callable[[], bool]
    _explained: set[str] = field(default_factory=set)  # rewards of which an error was logged
    # What parts of the last drawing took on this rank, as timings.jsonl has it.
    seconds: dict[str, float] = field(default_factory=dict)

    def groups(
        self,
        step: int,
        slots: Sequence[Slot],
        *,
        is_late: bool,
    ) -> list[Group] | None:
        """Return the answers of all slots, in their order; None if a stop was asked for meanwhile.

        `step`: the weights are those after so many steps. `is_late`: the weights that drew the answers are gone, so
        the file must have them all. Raise EnvironmentFault where it does not.
        """
        self.seconds = {"generate_seconds": 0.0, "reward_seconds": 0.0}
        file = RolloutFile(self.run_dir, step, self.made_by)
        groups = dict(on_main(file.groups, self.world))

        missing = []
        for unit in self._units(slots):
            # A unit is drawn whole or not at all: fewer rows in a batch would give other bits.
            if any(slot.number not in groups for slot in unit):
                missing.append(unit)
        if missing and is_late:
            raise self.gone(file.path)

        try:
            if missing:
                drawn = self._in_turns(step, missing, file)
                if drawn is None:
                    return None
                groups |= drawn
        finally:
            # From here on a power cut loses nothing that the step has learnt from.
            file.close()

        answered = [groups[slot.number] for slot in slots]
        self._explain_errors(step, answered, file)
        return answered

    def _in_turns(
        self,
        step: int,
        units: Sequence[Sequence[Slot]],
        file: RolloutFile,
    ) -> dict[int, Group] | None:
        """Return the groups of some units by their slots; None if a stop was asked for. Rank 0 appends them to the file."""
        groups: dict[int, Group] = {}
        # Ranks draw answers of different lengths, so of a sharded model each needs all weights for a while.
        with fsdp.whole(self.learner.lm):
            for first in range(0, len(units), self.world.size):
                heartbeat.beat("generation")
                if process_group.agree(self.is_stopping(), self.world):
                    return None
                # In the last round some ranks may have nothing to draw.
                turn = Turn()
                if first + self.world.rank < len(units):
                    turn = self._turn(step, units[first + self.world.rank])
                groups |= self._gathered(turn, file)
        return groups

    def _gathered(self, turn: Turn, file: RolloutFile) -> dict[int, Group]:
        """Return the groups that all ranks have, by their slots. Rank 0 appends them to the file.

        Raise on every rank what any rank met, after what was drawn is in the file.
        """
        turns = process_group.gather(turn, self.world)
        of_all: list[Group] = []
        for of_rank in turns:
            of_all.extend(of_rank.groups)
        on_main(partial(file.append, of_all), self.world)
        raise_first([of_rank.failure for of_rank in turns])
        return {group.slot: group for group in of_all}

    @property
    def _asks_model(self) -> bool:
        """True if training asks for log-probabilities of the answers before it learns from them."""
        return self.settings.window > 1 or self.reference is not None

    def gone(self, path: Path) -> errors.EnvironmentFault:
        """Return the error of a file that lacks answers which cannot be drawn again."""
        return errors.EnvironmentFault(
            f"{path}: lacks answers that later steps learnt from, and the weights that drew them are gone; put "
            "the file back, go on from an earlier checkpoint, or choose another `output`"
        )

    def _explain_errors(self, step: int, groups: Sequence[Group], file: RolloutFile) -> None:
        """Log the first error of each reward. Raise ConfigError for one that could judge nothing from the start on."""
        for name in self.names:
            reasons = [group.errors[name] for group in groups if name in group.errors]
            if not reasons:
                continue
            # What fails from the first answer on is a mistake in the function, and the run would learn nothing from it.
            if step == 0 and len(reasons) == len(groups):
                # The next start must ask the function again.
                on_main(file.remove, self.world)
                raise errors.ConfigError(
                    f"reward {name} could judge no answer of the first step: {reasons[0]}"
                )
            if name not in self._explained:
                self._explained.add(name)
                logs.DATA.warning(
                    "reward %s could not judge the answers to %d of %d prompts, which is counted as reward_errors: %s",
                    name, len(reasons), len(groups), reasons[0],
                )  # fmt: skip

    def _units(self, slots: Sequence[Slot]) -> list[list[Slot]]:
        """Return the slots that are drawn together, longest prompts first.

        A model whose state would run over padding gets prompts of equal length together.
        """
        # Slots 0 to 4 with prompts of 3, 9, 3, 5 and 9 tokens, two of them a unit:
        #
        #     padding-free      [1 4] [3 0] [2]
        #     equal lengths     [1 4] [3] [0 2]
        most = max(1, self.settings.generation_batch_size // self.settings.num_generations)
        longest_first = sorted(slots, key=lambda slot: (-len(slot.ids), slot.number))
        units: list[list[Slot]] = []
        for slot in longest_first:
            if units and len(units[-1]) < most:
                first = units[-1][0]
                if self.learner.route.padding_free or len(first.ids) == len(slot.ids):
                    units[-1].append(slot)
                    continue
            units.append([slot])
        return units

    def _turn(self, step: int, unit: Sequence[Slot]) -> Turn:
        """Return the groups of a unit, or the error that this rank met."""
        try:
            return Turn(self._drawn(step, unit))
        except errors.LostPeer:
            raise  # there is no whole set of ranks left to tell
        except errors.KubetuneError as error:
            return Turn(failure=error)

    def _drawn(self, step: int, unit: Sequence[Slot]) -> list[Group]:
        """Draw the answers of a unit, and have them rewarded."""
        began = time.perf_counter()
        model = self.learner.model
        # Adapters are on, and nothing is dropped out.
        model.eval()
        try:
            of_slots = self._answers(step, unit)
            earlier = []
            for slot, answers in zip(unit, of_slots, strict=True):
                earlier.append(self._earlier(slot, answers))
        finally:
            model.train()
        process_group.wait_for_device(self.world.device)
        self.seconds["generate_seconds"] += time.perf_counter() - began

        groups = []
        for place, slot in enumerate(unit):
            groups.append(self._rewarded(step, slot, of_slots[place], earlier[place]))
        return groups

    def _answers(self, step: int, unit: Sequence[Slot]) -> list[list[DrawnTokens]]:
        """Return the answers that the sampler draws to the prompts of a unit, a list for each prompt."""
        settings = self.settings
        number = settings.num_generations
        numbers = []
        for slot in unit:
            for answer in range(number):
                place = (self.seed, step, slot.number, answer)
                numbers.append(uniforms(settings.max_completion_length, *place))

        lm = self.learner.lm
        # Packed attention knows no cache.
        with own_attention(lm):
            drawn = draw(
                lm,
                [slot.ids for slot in unit],
                np.stack(numbers),
                settings,
                self.tokenizer.eos_ids,
                self.tokenizer.pad_id,
            )
        return [drawn[first : first + number] for first in range(0, len(drawn), number)]

    def _earlier(self, slot: Slot, answers: Sequence[DrawnTokens]) -> _Earlier:
        """Return log-probabilities of a group's tokens that are asked for before training: see `_Earlier`."""
        if not self._asks_model:
            return _Earlier()

        sequences = [answer_sequence(slot.ids, answer.ids) for answer in answers]
        batch = collate(sequences, [slot.row] * len(answers)).to(self.world.device)
        lengths = [len(answer.ids) for answer in answers]
        old = None
        if self.settings.window > 1:
            old = _cut(log_probabilities(self.learner, batch), lengths)
        reference = None
        if self.reference is not None:
            # Either the same model with its adapter off, or a second one.
            is_same = self.reference is self.learner
            logps = log_probabilities(self.reference, batch, without_adapter=is_same)
            reference = _cut(logps, lengths)
        return _Earlier(old, reference)

    def _rewarded(
        self,
        step: int,
        slot: Slot,
        drawn: Sequence[DrawnTokens],
        earlier: _Earlier,
    ) -> Group:
        """Have the answers to a prompt rewarded, and return all that is known of them."""
        began = time.perf_counter()
        texts = [self.tokenizer.decode(answer.ids) for answer in drawn]
        ids = [answer.ids for answer in drawn]
        request = self.prompts[slot.row].request(slot.ids, texts, ids, step, self.max_steps)
        judgements = self.rewards.judge(request)

        answers = []
        for number, answer in enumerate(drawn):
            rewards = {}
            for name, judgement in zip(self.names, judgements, strict=True):
                rewards[name] = judgement.rewards[number]
            answers.append(
                Answer(
                    ids=answer.ids,
                    text=texts[number],
                    sampled=answer.logps,
                    entropy=float(np.mean(answer.entropies)),
                    is_cut=answer.is_cut,
                    rewards=rewards,
                    old=earlier.old[number] if earlier.old else None,
                    reference=earlier.reference[number] if earlier.reference else None,
                )
            )
        self.seconds["reward_seconds"] += time.perf_counter() - began
        return Group(
            slot=slot.number,
            row=slot.row,
            prompt=slot.ids,
            text=self.tokenizer.decode(slot.ids),
            answers=answers,
            errors=self._errors(judgements),
            logged=_logged(judgements),
        )

    def _errors(self, judgements: Sequence[Judgement]) -> dict[str, str]:
        """Return why rewards could not judge, by their names."""
        errors_by_name = {}
        for name, judgement in zip(self.names, judgements, strict=True):
            if judgement.error:
                errors_by_name[name] = judgement.error
        return errors_by_name


@dataclass(frozen=True)
class Turn:
    """What a rank has of the answers that it was to draw: whole groups, and the error that it met."""

    groups: list[Group] = field(default_factory=list)
    failure: errors.KubetuneError | None = None


@dataclass(frozen=True)
class _Earlier:
    """Log-probabilities of a group's tokens, a list for each answer; None where the loss does not ask for them."""

    # as training has them, under the weights that drew the answers
    old: list[list[float]] | None = None
    reference: list[list[float]] | None = None  # under the model before training


def _logged(judgements: Sequence[Judgement]) -> dict[str, float]:
    """Return the numbers that reward functions logged, by their names."""
    logged: dict[str, float] = {}
    for judgement in judgements:
        logged |= judgement.metrics
    return logged


def _cut(logps: torch.Tensor, lengths: Sequence[int]) -> list[list[float]]:
    """Return numbers of tokens, a list for each answer.

    1 2 3 4 5 of answers with 2 and 3 tokens    [[1, 2], [3, 4, 5]]
    """
    return [part.tolist() for part in logps.split(list(lengths))]
