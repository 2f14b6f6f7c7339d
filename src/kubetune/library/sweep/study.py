"""Optuna's part of a sweep: which values are tried next, which trials stop early, what mattered.

The study is in `study.db` of the sweep's folder (SQLite), where every tool of Optuna's can open it.
This is the only file that knows Optuna.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, assert_never

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
from sqlalchemy.pool import NullPool

from kubetune.errors import EnvironmentFault
from kubetune.library.sweep.ranges import Range, Values, settings_in
from kubetune.library.sweep.sweep_record import (
    LEAST_FOR_IMPORTANCE,
    TRIALS,
    Importance,
    Outcome,
    Search,
)

FILE: Final = "study.db"
_DRAWS: Final = 20  # of a setting from the sampler, before chance decides
_NAME: Final = "sweep"
_TREES: Final = 128  # enough that each trial is out of the bag of some
_STATES: Final[dict[Outcome, TrialState]] = {
    "done": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}


def make_pruner(name: str, rungs: Sequence[int]) -> BasePruner:
    """Return Optuna's pruner. A trial is judged at all `rungs` but the last, where it is done.

    Example: asha with the rungs 1, 3, 9 keeps the best third of the trials that came to rung 1,
    and the best third of those that came to rung 3.
    """
    if name == "none":
        return NopPruner()
    if name == "median":
        return MedianPruner()

    # Each rung is the same multiple of the one before: 1, 3, 9 have the factor 3.
    factor = rungs[1] // rungs[0]
    if name == "asha":
        return SuccessiveHalvingPruner(min_resource=rungs[0], reduction_factor=factor)
    if name == "hyperband":
        return HyperbandPruner(
            min_resource=rungs[0], max_resource=rungs[-1], reduction_factor=factor
        )
    raise ValueError(f"no pruner {name}")


class _Untried(BaseSampler):
    """Optuna's sampler, asked again until it returns a setting that was not tried.

    Training a setting again would give the same value; `--repeat` is for other seeds.
    """

    def __init__(
        self, inner: BaseSampler, ranges: Sequence[Range], tried: Sequence[Mapping[str, Any]]
    ) -> None:
        self._inner = inner
        self._tried = tried
        self._space = distributions(ranges)
        self._random = RandomSampler(seed=len(tried))
        # Trials of a killed driver may lack values; they count for nothing.
        settings = set()
        for params in tried:
            if params.keys() == self._space.keys():
                settings.add(tuple(params[key] for key in self._space))
        self._all_tried = len(settings) == settings_in(ranges)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return all keys, since only whole settings can be compared."""
        return self._space

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return a setting that was not tried; any if all were."""
        draws = 0
        while True:
            # TPE may insist on its best setting.
            sampler = self._inner
            if draws >= _DRAWS:
                sampler = self._random
            params = {}
            for key, values in search_space.items():
                params[key] = sampler.sample_independent(study, trial, key, values)
            if self._all_tried or params not in self._tried:
                return params
            draws += 1

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Required by Optuna, which does not call it, since `sample_relative` sets every key."""
        return self._inner.sample_independent(study, trial, param_name, param_distribution)


def make_sampler(
    name: str,
    ranges: Sequence[Range],
    seed: int,
    number: int,
    tried: Sequence[Mapping[str, Any]] = (),
) -> BaseSampler:
    """Return Optuna's sampler for the trial of that number, which avoids the settings in `tried`.

    Each trial has a sampler with a seed of its own. With one sampler for all, a driver that
    continues after a kill would begin again with the values of trial 0.
    """
    if name == "grid":
        # The seed decides the order of the grid's points, so it is the same for all trials.
        grid = {searched.key: _grid(searched) for searched in ranges}
        return GridSampler(grid, seed=seed)

    # TPE and chance: a seed from the sweep's and the trial's number.
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    seed_of_trial = int.from_bytes(digest[:4], "big")
    sampler: BaseSampler
    if name == "tpe":
        sampler = TPESampler(seed=seed_of_trial, constant_liar=True)
    elif name == "random":
        sampler = RandomSampler(seed=seed_of_trial)
    else:
        raise ValueError(f"no sampler {name}")

    # No value of a continuous range is drawn twice.
    if settings_in(ranges) is None:
        return sampler
    return _Untried(sampler, ranges, tried)


def _grid(searched: Range) -> list[str] | list[int]:
    """Return all values of a range, which is of choices or of integers."""
    if searched.choices:
        return list(searched.choices)
    return list(range(int(searched.low), int(searched.high) + 1))


def distributions(ranges: Sequence[Range]) -> dict[str, BaseDistribution]:
    """Return the ranges as Optuna has them, by key."""
    space: dict[str, BaseDistribution] = {}
    for searched in ranges:
        values: BaseDistribution
        match searched.kind:
            case "choice":
                values = CategoricalDistribution(list(searched.choices))
            case "int":
                values = IntDistribution(int(searched.low), int(searched.high), log=searched.log)
            case "float":
                values = FloatDistribution(searched.low, searched.high, log=searched.log)
            case unknown:
                assert_never(unknown)
        space[searched.key] = values
    return space


def _as_number(searched: Range, value: Any) -> float:
    """Return a value as a tree can split it: a choice by its place in the list, a log range by its logarithm."""
    if searched.choices:
        return searched.choices.index(value)
    if searched.log:
        return math.log(value)
    return float(value)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Raise EnvironmentFault if the study's file is damaged or locked, or its disk is full."""
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, StorageInternalError) as error:
        # Optuna wraps SQLAlchemy's error, which wraps SQLite's, and only that one says what is wrong.
        cause = error.__cause__ or error
        why = getattr(cause, "orig", None) or cause
        raise EnvironmentFault(
            f"{folder / FILE}, where Optuna keeps the study: {why}; fix this or restore the file "
            "from a copy, then repeat the command to continue"
        ) from error


class Study:
    """A study in a folder, made or opened again. Trials are named by their numbers."""

    def __init__(self, folder: Path, search: Search, storage: BaseStorage | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder = folder
        self._search = search

        if storage is None:
            # A pool would hold the file open when the study is closed, or cannot be read.
            storage = RDBStorage(
                f"sqlite:///{(folder / FILE).absolute()}",
                engine_kwargs={"poolclass": NullPool},
            )
        direction: Literal["minimize", "maximize"] = "minimize"
        if search.greater:
            direction = "maximize"
        # The sampler is made anew for each trial, see `ask`.
        self._study = optuna.create_study(
            storage=storage,
            study_name=_NAME,
            direction=direction,
            sampler=RandomSampler(),
            pruner=make_pruner(search.pruner, search.rungs),
            load_if_exists=True,
        )

        # Trials that an earlier driver left open go on.
        self._open_trials: dict[int, Trial] = {}
        for trial in self._study.get_trials(deepcopy=False):
            if not trial.state.is_finished():
                self._open_trials[trial.number] = Trial(self._study, trial._trial_id)

    def ask(self) -> tuple[int, Values]:
        """Return the number and values of a new trial."""
        # A sampler avoids settings that were tried, so it is made anew for each trial.
        # Optuna counts trials in the order in which they are asked for; only this process asks.
        tried = [trial.params for trial in self._study.get_trials(deepcopy=False)]
        search = self._search
        self._study.sampler = make_sampler(
            search.sampler,
            search.ranges,
            search.seed,
            len(tried),
            tried,
        )
        trial = self._study.ask(distributions(search.ranges))
        self._study.sampler = RandomSampler()
        self._open_trials[trial.number] = trial
        return trial.number, self._values(trial.params)

    def _values(self, params: Mapping[str, Any]) -> Values:
        """Return the values of a trial as texts of overrides."""
        values = {}
        for searched in self._search.ranges:
            value = params[searched.key]
            if searched.kind != "choice":
                value = searched.text(value)
            values[searched.key] = value
        return values

    def require_trials(self, recorded: Set[int]) -> None:
        """Raise EnvironmentFault if the study and the record are not of one sweep.

        A driver may be killed between writing one and the other, so the study may be one step
        ahead: its newest trials may not be in the record, `recorded`. Nothing else may differ.
        """
        numbers = set()
        ended = set()
        for trial in self._study.get_trials(deepcopy=False):
            numbers.add(trial.number)
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                ended.add(trial.number)
        if not ended <= recorded <= numbers:
            raise EnvironmentFault(
                f"{self._folder}: {FILE} holds {len(numbers)} trials and {TRIALS} {len(recorded)}, "
                "so one of them was lost or replaced; put it back from a copy, or choose another -o"
            )

    def open_trials(self) -> dict[int, Values]:
        """Return the trials that have no outcome. One that a kill left half made ends as failed."""
        trials = {}
        for number, trial in list(self._open_trials.items()):
            if all(searched.key in trial.params for searched in self._search.ranges):
                trials[number] = self._values(trial.params)
            else:
                self.tell(number, "failed", None)
        return trials

    def outcome(self, number: int) -> Outcome | None:
        """Return the outcome of a trial; None while it is open."""
        # Optuna's states have other names.
        state = self._study.get_trials(deepcopy=False)[number].state
        for outcome, optunas_state in _STATES.items():
            if optunas_state == state:
                return outcome
        return None

    def is_pruned(self, number: int, resource: int, value: float) -> bool:
        """True if Optuna's pruner stops a trial that has this value at this rung."""
        # The pruner compares this value with those of all trials at the same rung.
        trial = self._open_trials[number]
        trial.report(value, resource)
        return bool(trial.should_prune())

    def tell(self, number: int, outcome: Outcome, value: float | None, reason: str = "") -> None:
        """End a trial. Samplers learn from trials that stopped early too, but not from failed ones."""
        trial = self._open_trials.pop(number, None)
        if trial is None:
            return  # a driver that was killed before it could write the record has ended it
        if reason:
            trial.set_user_attr("reason", reason)
        if outcome != "done" or value is None or not math.isfinite(value):
            value = None
        self._study.tell(trial, value, state=_STATES[outcome])

    def weigh(self) -> Importance | None:
        """Return how much each setting mattered. None if too few trials are done, or all have one result.

        A random forest learns the results from the settings. The importance of a setting is the part of
        the spread of the results that splits by it take away (mean decrease in impurity).
        """
        done = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        results = [trial.value for trial in done]
        if len(done) < LEAST_FOR_IMPORTANCE or len(set(results)) < 2:
            return None
        from sklearn.ensemble import RandomForestRegressor

        rows = []
        for trial in done:
            rows.append([_as_number(part, trial.params[part.key]) for part in self._search.ranges])
        forest = RandomForestRegressor(_TREES, oob_score=True, random_state=self._search.seed)
        forest.fit(rows, results)
        shares = {}
        for part, importance in zip(
            self._search.ranges, forest.feature_importances_.tolist(), strict=True
        ):
            shares[part.key] = importance
        return Importance(shares, len(done), float(forest.oob_score_))

    def close(self) -> None:
        """Close the file."""
        self._study._storage.remove_session()
