"""Configs of a sweep's runs: the run file with a trial's values, a seed, and the step at which its rung lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kubetune.config.load import dotted_values, resolved
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.library.sweep.ranges import overrides
from kubetune.library.sweep.record import Search, Trial, TrialRun
from kubetune.plan.plan import Plan

Load = Callable[[list[str]], Config]
"""A config of the command line's run file with more overrides."""

FACTOR: Final = 3
"""Of successive halving: a third goes on at each rung."""
_MOST_RUNGS = 3
_QUARTERS = 4
_NOT_USED: Final = (
    "output",
    "push",
    "logging.before_after",
    "logging.report_json",
    "training.pause_at_step",
)
"""Keys of the run file in whose place `Recipe` sets values of its own."""


def not_used(config: Config) -> list[str]:
    """The keys that a run file sets, and that no trial heeds."""
    values = dict(dotted_values(resolved(config)))
    return [
        key
        for key in _NOT_USED
        if any(values[one] for one in values if one == key or one.startswith(f"{key}."))
    ]


@dataclass(frozen=True)
class Recipe:
    """Makes the configs. `folder`: the sweep's, in which local runs lie; `name`: the sweep's."""

    load: Load
    search: Search
    folder: Path
    name: str

    def config(self, trial: Trial, run: TrialRun) -> Config:
        """The config of a run, which would train to its end. Raises ConfigError where values do not go together."""
        config = self.load(overrides(trial.values))
        training = {
            "seed": run.seed,
            "metric_for_best_model": self.search.metric,
            "greater_is_better": self.search.greater,
        }
        return config.model_copy(
            update={
                "name": f"{self.name}-{run.name}",
                "output": str(self.folder / "trials" / run.name),
                "mirror": f"{config.mirror.rstrip('/')}/{run.name}" if config.mirror else None,
                "push": None,
                "training": config.training.model_copy(update=training),
                "logging": config.logging.model_copy(
                    update={"report_json": None, "before_after": 0}
                ),
            }
        )

    def pausing(self, config: Config, plan: Plan, trial: Trial) -> Config:
        """The same, to pause at the trial's rung."""
        rungs = self.search.rungs
        share = rungs[trial.rung] / rungs[-1] if trial.rung < len(rungs) else 1.0
        step = rung_step(plan, share)
        pause = step if step < plan.num_steps else None
        return config.model_copy(
            update={"training": config.training.model_copy(update={"pause_at_step": pause})}
        )


def rung_step(plan: Plan, share: float) -> int:
    """The step of the first evaluation at which so much of a run is done."""
    every = plan.eval_steps or plan.num_steps
    return min(plan.num_steps, max(1, math.ceil(round(plan.num_steps * share / every, 6))) * every)


def rungs_of(pruner: str, plan: Plan) -> tuple[int, ...]:
    """Resources at which a pruner is asked, with that of a whole run as the last: shares of a run in the smallest unit.

    In shares, so that runs of other batch sizes are compared at equal parts of their data. None without a pruner.
    Raises ConfigError where there are too few evaluations for one.
    """
    if pruner == "none":
        return ()
    if not plan.num_steps:
        raise ConfigError(
            f"--pruner {pruner}: how many steps a run has is not known before its data are read; set training.max_steps"
        )
    if pruner == "median":
        ladders = [tuple(range(1, parts + 1)) for parts in (_QUARTERS, 2)]
    else:
        ladders = [tuple(FACTOR**k for k in range(top + 1)) for top in range(_MOST_RUNGS, 0, -1)]
    for rungs in ladders:
        steps = [rung_step(plan, resource / rungs[-1]) for resource in rungs]
        if len(set(steps)) == len(steps):
            return rungs
    most = plan.num_steps // ladders[-1][-1]
    raise ConfigError(
        f"--pruner {pruner}: found {plan.num_steps} steps with an evaluation every {plan.eval_steps or 'end'}; a trial "
        f"is judged by evaluations before its end: set training.eval_steps={max(1, most)} or less. Nothing was written."
    )
