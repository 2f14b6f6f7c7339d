"""Have servers draw the answers that some steps learn from, and reward them: in place of the model's own drawing.

Every window of steps has answers by one version of the weights. Without a lag the run waits for them; with a lag of 1
servers draw for the next window while this one is learnt from. A window of one step, weights w0, w1, … after each step:

    lag 0    load w0, answers by w0, step 0 │ load w1, answers by w1, step 1 │ load w2, …
    lag 1    load w0, answers by w0, step 0 │ load w1, step 1                │ load w2, step 2
                      answers by w0 ────────┴─► learnt from in step 1        │
                                              answers by w1 ─────────────────┴─► learnt from in step 2

So which weights answered follows from the step alone. A start that goes on takes what the file of a step has, and asks
for the rest with the seeds that a prompt has at any time, by the adapter file of the right version.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from kubetune import errors
from kubetune.base import logs
from kubetune.distributed import process_group
from kubetune.distributed.main_rank import on_main
from kubetune.rundir import checkpoints, heartbeat
from kubetune.training.rollouts.drawer import Drawer, Turn
from kubetune.training.rollouts.model_answers import Slot
from kubetune.training.rollouts.rollout_records import Group, RolloutFile
from kubetune.training.rollouts.sampler import DrawnTokens
from kubetune.training.rollouts.servers.adapters import Adapter, AdapterFiles
from kubetune.training.rollouts.servers.requests import Asking, Requests

# Between two looks at whether the run is to stop.
_LOOK_SECONDS: Final = 0.5


@dataclass
class ServedDrawer(Drawer):
    """Has servers draw. All ranks call it, and each asks for its share of the prompts."""

    asking: Asking = field(kw_only=True)
    adapters: AdapterFiles = field(kw_only=True)  # used by rank 0
    lag: int = field(kw_only=True)
    # The prompts of the window that begins at a step, set by the feed's maker.
    slots_of: Callable[[int], list[Slot]] = field(kw_only=True, default=lambda step: [])
    _ahead: dict[int, Requests] = field(default_factory=dict)  # by the first step of their window
    _warned_of_gaps: bool = False

    def groups(self, step: int, slots: Sequence[Slot], *, is_late: bool) -> list[Group] | None:
        """Return the answers of all slots, in their order; None if a stop was asked for meanwhile: see Drawer.

        Raise EnvironmentFault for a server that does not do its part in time.
        """
        self.seconds = {"sync_seconds": 0.0, "generate_seconds": 0.0, "reward_seconds": 0.0}
        file = RolloutFile(self.run_dir, step, self.made_by)
        groups = dict(on_main(file.groups, self.world))
        missing = [slot for slot in slots if slot.number not in groups]
        if missing and is_late:
            raise self.gone(file.path)

        # First this window's prompts are sent, then those of the next.
        began = time.perf_counter()
        requests = self._requests(step, missing)
        if requests is None:
            self._cancel()
            return None
        if not self._ask_ahead(step, is_late=is_late):
            requests.cancel()
            self._cancel()
            return None
        # Servers draw already, while the run still loads what the next window is drawn by.
        self.seconds["sync_seconds"] = time.perf_counter() - began

        # Answers come to the ranks at different times, as in `Drawer`.
        drawing: AbstractContextManager[Any] = nullcontext(nullcontext)
        if self.model.asks_model and missing:
            drawing = self.model.drawing(self.world)
        try:
            with drawing as apart:
                came = self._collected(step, requests, len(missing), file, apart)
        finally:
            file.close()
        if came is None:
            self._cancel()
            return None

        groups |= came
        on_main(partial(self._drop, step), self.world)
        answered = [groups[slot.number] for slot in slots]
        self.rewarding.explain_errors(step, answered, partial(on_main, file.remove, self.world))
        return answered

    def close(self) -> None:
        """Ask no more, and have the servers forget this run's adapters."""
        self._cancel()
        self.adapters.close()

    def _cancel(self) -> None:
        for requests in self._ahead.values():
            requests.cancel()
        self._ahead.clear()

    def _version(self, step: int) -> int:
        """Return after how many steps the weights are that answer for the window beginning at `step`."""
        return max(0, step - self.lag * self.settings.window)

    def _requests(self, step: int, missing: Sequence[Slot]) -> Requests | None:
        """Return this rank's requests for a window, under way; None if a stop was asked for."""
        # With a lag they were sent a window ago, except by a start that begins here.
        ahead = self._ahead.pop(step, None)
        if ahead is not None:
            return ahead
        if not missing:
            # Nothing to ask, so no server needs to be there.
            return Requests(self.asking, step, Adapter("", "", step), [])
        version = self._version(step)
        adapter = self._loaded(version, writes=version == step)
        if adapter is None:
            return None
        return Requests(self.asking, step, adapter, self._share(missing))

    def _ask_ahead(self, step: int, *, is_late: bool) -> bool:
        """Ask for the window after the one beginning at `step`, if its answers lag; False if a stop was asked for."""
        following = step + self.settings.window
        if not self.lag or following >= self.rewarding.max_steps:
            return True
        file = RolloutFile(self.run_dir, following, self.made_by)
        present = on_main(file.groups, self.world)
        missing = [slot for slot in self.slots_of(following) if slot.number not in present]
        if not missing:
            return True
        # In the middle of a window the weights of its first step are gone, but their file is not.
        adapter = self._loaded(step, writes=not is_late)
        if adapter is None:
            return False
        self._ahead[following] = Requests(self.asking, following, adapter, self._share(missing))
        return True

    def _share(self, slots: Sequence[Slot]) -> Sequence[Slot]:
        # Ranks take prompts in turns: rank 1 of 2 asks for those at 1, 3, 5 …
        return slots[self.world.rank :: self.world.size]

    def _loaded(self, step: int, *, writes: bool) -> Adapter | None:
        """Return the version after `step` steps, loaded on all servers; None if a stop was asked for.

        `writes`: the model's weights are those, so that its file can be written.
        """
        heartbeat.beat("sync")

        def load() -> Adapter | None:
            adapter: Adapter | None = None
            if writes:
                adapter = self.adapters.write(step)
            else:
                adapter = self.adapters.find(step)
            if adapter is None:
                raise self.gone(self.run_dir / "adapters")
            if not self.adapters.load(adapter):
                return None
            return adapter

        return on_main(load, self.world)

    def _collected(
        self,
        step: int,
        requests: Requests,
        number: int,
        file: RolloutFile,
        apart: Callable[[], Any],
    ) -> dict[int, Group] | None:
        """Return the groups of a window as they come, `number` on all ranks together; None if a stop was asked for.

        Rank 0 appends them to the file. Raise on every rank what any rank met, after what came was appended.
        """
        groups: dict[int, Group] = {}
        while len(groups) < number:
            heartbeat.beat("generation")
            if process_group.agree(self.is_stopping(), self.world):
                requests.cancel()
                return None
            # A rank that raised here alone would leave the others waiting for it.
            with apart():
                turn = self._arrived(step, requests)
            try:
                groups |= self._gathered(turn, file)
            except errors.KubetuneError:
                requests.cancel()
                raise
        return groups

    def _arrived(self, step: int, requests: Requests) -> Turn:
        """Return the rewarded groups of this rank that came just now, and what went wrong."""
        mine: list[Group] = []
        try:
            began = time.perf_counter()
            arrived = requests.arrived(_LOOK_SECONDS)
            self.seconds["generate_seconds"] += time.perf_counter() - began
            for slot, answers in arrived:
                self._warn_of_gaps(answers)
                mine.append(self._group(step, slot, answers))
        except errors.KubetuneError as error:
            return Turn(mine, error)
        return Turn(mine)

    def _group(self, step: int, slot: Slot, answers: Sequence[DrawnTokens]) -> Group:
        """Return the answers to a prompt, rewarded, with the log-probabilities that training asks for before."""
        with self.model.learner.without_dropout():
            earlier = self.model.earlier(slot, answers)
        return self._rewarded(step, slot, answers, earlier)

    def _warn_of_gaps(self, answers: Sequence[DrawnTokens]) -> None:
        """Log once that a server has no log-probability of some tokens, which are then not corrected."""
        gaps = 0
        for answer in answers:
            gaps += sum(map(math.isnan, answer.logps))
        if gaps and not self._warned_of_gaps:
            self._warned_of_gaps = True
            logs.DATA.warning(
                "a server gave no log-probability of %d tokens; they count as equally likely to the training", gaps
            )  # fmt: skip

    def _drop(self, step: int) -> None:
        """Unload what no window needs any more, and delete its file unless a start from a checkpoint needs it."""
        if not self.lag:
            # The file of this step is whole and durable, so no start asks for this version again.
            self.adapters.drop(step + 1, files_before=step + 1)
            return
        window = self.settings.window
        # A start from the newest checkpoint asks for its window by the version of one window before.
        newest = checkpoints.newest_step(self.run_dir)
        self.adapters.drop(step, files_before=newest - newest % window - window)
