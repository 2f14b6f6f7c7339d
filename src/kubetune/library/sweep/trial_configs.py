"""Configs of a sweep's runs: the run file with a trial's values, a seed, and the step at which its rung lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubetune.config.resolved import dotted_values
from kubetune.config.schema import Config, TrainingConfig
from kubetune.errors import ConfigError
from kubetune.library.sweep.ranges import overrides
from kubetune.library.sweep.sweep_record import TRIAL_RUNS, Search, Trial, TrialRun
from kubetune.plan.plan import Plan

# Returns the config of the command line's run file with more overrides.
Load = Callable[[list[str]], Config]

_FACTOR = 3  # of successive halving: a third of the trials continues at each rung
_MOST_RUNGS = 3  # besides the end of a run
_QUARTERS = 4

# Keys of the run file that `Recipe` replaces in every trial.
_NOT_USED: Final = (
    "output",
    "push",
    "logging.before_after",
    "logging.report_json",
    "training.pause_at_step",
)


def not_used(values: Mapping[str, Any]) -> list[str]:
    """Return the keys that a run file sets and that no trial uses. `values`: its whole config."""
    names = []
    for name in _NOT_USED:
        # `push` is a section, whose keys begin with it.
        for key, value in dotted_values(values):
            if value and f"{key}.".startswith(f"{name}."):
                names.append(name)
                break
    return names


@dataclass(frozen=True)
class Recipe:
    """Makes the configs of all runs of a sweep."""

    load: Load
    search: Search
    folder: Path  # of the sweep; local runs are in folders below it
    name: str  # of the sweep

    def config(self, trial: Trial, run: TrialRun) -> Config:
        """Return the config of a run that trains to its end.

        Raise ConfigError if the trial's values do not go together.
        """
        config = self.load(overrides(trial.values))
        training = {
            "seed": run.seed,
            "metric_for_best_model": self.search.metric,
            "greater_is_better": self.search.greater,
        }
        logging = {"report_json": None, "before_after": 0}
        # Each run has a folder of its own in the bucket too.
        mirror = None
        if config.mirror:
            mirror = f"{config.mirror.rstrip('/')}/{run.name}"
        return config.model_copy(
            update={
                "name": f"{self.name}-{run.name}",
                "output": str(self.folder / TRIAL_RUNS / run.name),
                "mirror": mirror,
                "push": None,
                "training": config.training.model_copy(update=training),
                "logging": config.logging.model_copy(update=logging),
            }
        )

    def pausing(self, training: TrainingConfig, plan: Plan, trial: Trial) -> TrainingConfig:
        """Return the section of a run that pauses at its trial's rung."""
        rungs = self.search.rungs
        share = 1.0
        if trial.rung < len(rungs):
            share = rungs[trial.rung] / rungs[-1]
        # At its last step a run is done, and does not pause.
        step = rung_step(plan, share)
        pause = step if step < plan.num_steps else None
        return training.model_copy(update={"pause_at_step": pause})


def rung_step(plan: Plan, share: float) -> int:
    """Return the step of the first evaluation when this share of a run is done.

    Example: 90 steps with an evaluation every 20; a third is step 30, so it returns 40.
    """
    every = plan.eval_steps or plan.num_steps
    # Rounded first, or 90 * (1/3) might need one evaluation more than 30 does.
    evaluations = math.ceil(round(plan.num_steps * share / every, 6))
    return min(plan.num_steps, max(1, evaluations) * every)


def rungs_of(pruner: str, plan: Plan) -> tuple[int, ...]:
    """Return how far a trial is at each rung, with a whole run as the last; () without a pruner.

    Rungs are shares of a run, written as integers, so that runs of different batch sizes are
    compared after the same part of their data:

        median       1, 2, 3, 4    judged after 1/4, 2/4 and 3/4 of a run
        asha         1, 3, 9, 27   judged after 1/27, 1/9 and 1/3 of a run

    There are fewer rungs if there are too few evaluations for these, and ConfigError if there are
    too few for any.
    """
    if pruner == "none":
        return ()
    if not plan.num_steps:
        raise ConfigError(
            f"--pruner {pruner}: how many steps a run has is not known before its data are read; "
            "set training.max_steps"
        )

    # Candidates, those with the most rungs first: asha 1-3-9-27, 1-3-9, 1-3.
    if pruner == "median":
        ladders = [tuple(range(1, parts + 1)) for parts in (_QUARTERS, 2)]
    else:
        powers = [_FACTOR**exponent for exponent in range(_MOST_RUNGS + 1)]
        ladders = [tuple(powers[:length]) for length in range(len(powers), 1, -1)]

    # A ladder fits if each of its rungs is another evaluation.
    for rungs in ladders:
        steps = [rung_step(plan, resource / rungs[-1]) for resource in rungs]
        if len(set(steps)) == len(steps):
            return rungs
    most = max(1, plan.num_steps // ladders[-1][-1])
    raise ConfigError(
        f"--pruner {pruner}: found {plan.num_steps} steps with an evaluation every "
        f"{plan.eval_steps or 'end'}; a trial is judged by evaluations before its end: set "
        f"training.eval_steps={most} or less. Nothing was written."
    )
