"""Optuna's part of a sweep: which values are tried next, which trials are given up, which settings mattered.

The study lies in `study.db` of the sweep's folder (SQLite), where any tool of Optuna's can open it. Samplers are made
anew for each trial, seeded by its number, so that a driver that was killed goes on with other values, and not with the
same again. The only file that knows Optuna.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import optuna
import sqlalchemy.exc
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import StorageInternalError
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    SuccessiveHalvingPruner,
)
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from kubetune.errors import EnvironmentFault
from kubetune.library.sweep.ranges import Range, Values, settings_in
from kubetune.library.sweep.record import TRIALS, Outcome

FILE: Final = "study.db"
_DRAWS: Final = 20
_NAME: Final = "sweep"
_STATES: Final[dict[Outcome, TrialState]] = {
    "done": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}


def make_pruner(name: str, rungs: Sequence[int]) -> BasePruner:
    """Optuna's pruner over `rungs`, the resources at which it is asked, and the last, at which a trial is done."""
    first, last = (rungs[0], rungs[-1]) if rungs else (1, 1)
    factor = rungs[1] // rungs[0] if len(rungs) > 1 else 3
    if name == "asha":
        return SuccessiveHalvingPruner(min_resource=first, reduction_factor=factor)
    if name == "hyperband":
        return HyperbandPruner(min_resource=first, max_resource=last, reduction_factor=factor)
    return MedianPruner() if name == "median" else NopPruner()


class _Untried(BaseSampler):
    """Optuna's sampler, asked again until it gives a setting that is not among those `tried`.

    Training one again would give the same value; `--repeat` is there for other seeds.
    """

    def __init__(
        self, inner: BaseSampler, ranges: Sequence[Range], tried: Sequence[Mapping[str, Any]]
    ) -> None:
        self._inner, self._tried = inner, tried
        self._space = {one.key: distribution(one) for one in ranges}
        self._random = RandomSampler(seed=len(tried))
        settings = {
            tuple(params[key] for key in self._space)
            for params in tried
            if params.keys() == self._space.keys()
        }
        self._is_spent = len(settings) == settings_in(ranges)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All keys, since only whole settings are the same or not."""
        return self._space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A setting that was not tried; any where all were."""
        for draws in itertools.count():
            sampler = self._inner if draws < _DRAWS else self._random  # TPE may insist on its best
            params = {
                key: sampler.sample_independent(study, trial, key, one)
                for key, one in search_space.items()
            }
            if self._is_spent or params not in self._tried:
                break
        return params

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """The inner sampler's value; Optuna asks for none, since `sample_relative` gives all."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)


def make_sampler(
    name: str,
    ranges: Sequence[Range],
    seed: int,
    number: int,
    tried: Sequence[Mapping[str, Any]] = (),
) -> BaseSampler:
    """Optuna's sampler for the trial of that number; it gives a setting of those `tried` only where all were."""
    if name == "grid":
        # The order of the grid's points hangs on this seed, so it is the same for every trial.
        return GridSampler({one.key: list(one.choices or _whole(one)) for one in ranges}, seed=seed)
    mixed = _mixed(seed, number)
    sampler = (
        TPESampler(seed=mixed, constant_liar=True) if name == "tpe" else RandomSampler(seed=mixed)
    )
    return sampler if settings_in(ranges) is None else _Untried(sampler, ranges, tried)


def _mixed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{number}".encode()).digest()[:4], "big")


def _whole(one: Range) -> range:
    return range(int(one.low), int(one.high) + 1)


def distribution(one: Range) -> BaseDistribution:
    """A range as Optuna has it."""
    if one.kind == "choice":
        return CategoricalDistribution(list(one.choices))
    if one.kind == "int":
        return IntDistribution(int(one.low), int(one.high), log=one.log)
    return FloatDistribution(one.low, one.high, log=one.log)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Faults of the study's file as EnvironmentFault: damaged, locked, on a full disk."""
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ or error
        why = getattr(cause, "orig", None) or cause
        raise EnvironmentFault(
            f"{folder / FILE}, where Optuna keeps the study: {why}; mend this, or put the file back from a copy, and "
            "the same command goes on"
        ) from error


class Study:
    """A study in a folder, made or opened again. Trials are named by their numbers."""

    def __init__(
        self, folder: Path, ranges: Sequence[Range], *, sampler: str, pruner: str, rungs: Sequence[int], greater: bool,
        seed: int, storage: BaseStorage | None = None,
    ) -> None:  # fmt: skip
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._ranges, self._sampler, self._seed = ranges, sampler, seed
        self._study = optuna.create_study(
            storage=storage or RDBStorage(f"sqlite:///{(folder / FILE).absolute()}"),
            study_name=_NAME,
            direction="maximize" if greater else "minimize",
            sampler=RandomSampler(),
            pruner=make_pruner(pruner, rungs),
            load_if_exists=True,
        )
        self._folder = folder
        self._trials: dict[int, Trial] = {}
        for found in self._study.get_trials(deepcopy=False):
            if not found.state.is_finished():
                self._trials[found.number] = Trial(self._study, found._trial_id)

    def ask(self) -> tuple[int, Values]:
        """The number and values of a new trial."""
        # Trials are numbered in the order in which they are asked for, by this process alone.
        tried = [trial.params for trial in self._study.get_trials(deepcopy=False)]
        self._study.sampler = make_sampler(
            self._sampler, self._ranges, self._seed, len(tried), tried
        )
        trial = self._study.ask({one.key: distribution(one) for one in self._ranges})
        self._study.sampler = RandomSampler()
        self._trials[trial.number] = trial
        return trial.number, self._values(trial.params)

    def _values(self, params: Mapping[str, Any]) -> Values:
        return {
            one.key: params[one.key] if one.kind == "choice" else one.text(params[one.key])
            for one in self._ranges
        }

    def require_trials(self, known: Set[int]) -> None:
        """Raise EnvironmentFault where study and record, which has the `known` trials, are not of one sweep."""
        found = self._study.get_trials(deepcopy=False)
        told = {
            trial.number
            for trial in found
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
        }
        if not told <= known <= {trial.number for trial in found}:
            raise EnvironmentFault(
                f"{self._folder}: {FILE} holds {len(found)} trials and {TRIALS} {len(known)}, so one of them was lost "
                "or replaced; put it back from a copy, or choose another -o"
            )

    def open_trials(self) -> dict[int, Values]:
        """Trials that were asked for and have no end; what a kill left without all its values is ended as failed."""
        found = {}
        for number, trial in list(self._trials.items()):
            if all(one.key in trial.params for one in self._ranges):
                found[number] = self._values(trial.params)
            else:
                self.tell(number, "failed", None)
        return found

    def outcome(self, number: int) -> Outcome | None:
        """The end of a trial; None while it is open."""
        state = self._study.get_trials(deepcopy=False)[number].state
        return next((outcome for outcome, known in _STATES.items() if known == state), None)

    def is_given_up(self, number: int, resource: int, value: float) -> bool:
        """The decision of Optuna's pruner on a trial that has come to a rung with a value."""
        trial = self._trials[number]
        trial.report(value, resource)
        return bool(trial.should_prune())

    def tell(self, number: int, outcome: Outcome, value: float | None, reason: str = "") -> None:
        """End a trial. Samplers learn from those given up too, and learn nothing from failed ones."""
        trial = self._trials.pop(number, None)
        if trial is None:
            return  # told by a driver that was killed before it could note it
        if reason:
            trial.set_user_attr("reason", reason)
        is_value = outcome == "done" and value is not None and math.isfinite(value)
        self._study.tell(trial, value if is_value else None, state=_STATES[outcome])

    def importances(self) -> dict[str, float]:
        """Importance of each setting by Optuna, in sum 1; empty where too few trials are done to say."""
        done = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(self._ranges) < 2 or len(done) < 4 or len({trial.value for trial in done}) < 2:
            return {}
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=self._seed)
        found: dict[str, float] = optuna.importance.get_param_importances(
            self._study, evaluator=evaluator
        )
        return found

    def close(self) -> None:
        """Let go of the file."""
        self._study._storage.remove_session()
