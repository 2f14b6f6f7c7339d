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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kubetune import errors
from kubetune.config.schema import GrpoConfig
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import on_main, raise_first
from kubetune.distributed.process_group import World
from kubetune.rundir import heartbeat
from kubetune.training.rollouts.model_answers import EarlierLogps, ModelAnswers, Slot
from kubetune.training.rollouts.rewarding import Rewarding
from kubetune.training.rollouts.rollout_records import Group, RolloutFile
from kubetune.training.rollouts.sampler import DrawnTokens


@dataclass
class Drawer:
    """Draws answers with the weights as they are. All ranks call it."""

    run_dir: Path
    made_by: str  # digest of what decides the answers
    model: ModelAnswers
    rewarding: Rewarding
    world: World
    is_stopping: Callable[[], bool]
    # What parts of the last drawing took on this rank, as timings.jsonl has it.
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def settings(self) -> GrpoConfig:
        """The section `grpo`."""
        return self.model.settings

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
        self.rewarding.explain_errors(step, answered, partial(on_main, file.remove, self.world))
        return answered

    def _in_turns(
        self,
        step: int,
        units: Sequence[Sequence[Slot]],
        file: RolloutFile,
    ) -> dict[int, Group] | None:
        """Return the groups of some units by their slots; None if a stop was asked for. Rank 0 appends them to the file."""
        groups: dict[int, Group] = {}
        # Ranks draw answers of different lengths, so of a sharded model each needs all weights, or the others' company.
        with self.model.drawing(self.world) as apart:
            for first in range(0, len(units), self.world.size):
                heartbeat.beat("generation")
                if process_group.agree(self.is_stopping(), self.world):
                    return None
                # In the last round some ranks may have nothing to draw.
                turn = Turn()
                with apart():
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

    def gone(self, path: Path) -> errors.EnvironmentFault:
        """Return the error of a file that lacks answers which cannot be drawn again."""
        return errors.EnvironmentFault(
            f"{path}: lacks answers that later steps learnt from, and the weights that drew them are gone; put "
            "the file back, go on from an earlier checkpoint, or choose another `output`"
        )

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
                if self.model.learner.route.padding_free or len(first.ids) == len(slot.ids):
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
        # Adapters are on.
        with self.model.learner.without_dropout():
            of_slots = self.model.draw(step, unit)
            earlier = []
            for slot, answers in zip(unit, of_slots, strict=True):
                earlier.append(self.model.earlier(slot, answers))
        process_group.wait_for_device(self.world.device)
        self.seconds["generate_seconds"] += time.perf_counter() - began

        groups = []
        for place, slot in enumerate(unit):
            groups.append(self._rewarded(step, slot, of_slots[place], earlier[place]))
        return groups

    def _rewarded(
        self, step: int, slot: Slot, drawn: Sequence[DrawnTokens], earlier: EarlierLogps
    ) -> Group:
        began = time.perf_counter()
        group = self.rewarding.group(step, slot, drawn, earlier)
        self.seconds["reward_seconds"] += time.perf_counter() - began
        return group


@dataclass(frozen=True)
class Turn:
    """What a rank has of the answers that it was to draw: whole groups, and the error that it met."""

    groups: list[Group] = field(default_factory=list)
    failure: errors.KubetuneError | None = None
