"""The files of a sweep's folder: what is searched (`sweep.json`), and the state of trials (`trials.json`).

Everything but Optuna's study is here, so that `sweep status` and pages need no Optuna. Both files
are written as a whole.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from kubetune.base.files import read_object, write_atomic
from kubetune.base.humanize import counted
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.library.sweep.ranges import Range, Values

# Names in the folder.
SWEEP: Final = "sweep.json"
TRIALS: Final = "trials.json"
TRIAL_RUNS: Final = "trials"  # folder of the run directories
BEST: Final = "best.yaml"
REPORT: Final = "report.html"
LOCK: Final = ".driver.lock"

# Importances of fewer trials would be chance (docs/sweep.md has the measurement).
LEAST_FOR_IMPORTANCE: Final = 10

# A run waits until it is started, pauses at its rung, and waits again if its trial goes on.
RunState = Literal["waiting", "running", "paused", "done", "failed"]

# How a trial ends: its runs reached their end, it was stopped early at a rung, or it failed.
Outcome = Literal["done", "pruned", "failed"]
TrialState = Literal["open"] | Outcome


@dataclass(frozen=True)
class Search:
    """What is searched, and how. Two sweeps are different if this is."""

    config: dict[str, Any]  # the whole config, with the first value of each range
    ranges: tuple[Range, ...]
    metric: str
    greater: bool  # True if more of the metric is better
    sampler: str
    pruner: str
    rungs: tuple[int, ...]  # how far a run is when it is judged; the last is a whole run
    repeat: int  # runs of a trial, each with a seed of its own
    seed: int  # of the search itself
    name: str
    namespace: str | None = None  # of the cluster; None for trials on this machine


@dataclass
class TrialRun:
    """One run of a trial."""

    name: str  # of its folder; on a cluster, the sweep's name is before it
    seed: int
    state: RunState = "waiting"
    step: int = 0
    steps: int = 0  # of a whole run; 0 if unknown
    value: float | None = None  # the best so far
    seconds: float = 0.0  # for which it held its devices
    earlier_seconds: float = 0.0  # of these, those before its last start
    devices: int = 1
    starts: int = 0  # since it last made progress
    code: int | None = None
    reason: str = ""


@dataclass
class Trial:
    """A setting that is tried, with one run for each seed."""

    number: int
    values: Values
    runs: list[TrialRun]
    rung: int = 0  # index of the rung that its runs train to
    state: TrialState = "open"
    value: float | None = None  # mean of its runs
    reason: str = ""  # why it failed

    @property
    def spread(self) -> float | None:
        """Standard deviation of the values of its runs; None for one run."""
        values = [run.value for run in self.runs if run.value is not None]
        if len(values) < 2:
            return None
        return statistics.stdev(values)

    @property
    def progress(self) -> str:
        """Steps of the run that is furthest, of all steps: `40/90`, or `40/?`."""
        step = max(run.step for run in self.runs)
        steps = max(run.steps for run in self.runs)
        return f"{step}/{steps or '?'}"


@dataclass
class Importance:
    """How much each setting mattered, by a random forest (`Study.weigh`)."""

    shares: dict[str, float]  # by key, in sum 1
    trials: int  # that were done when the forest was grown
    # R² of results that are predicted by the trees that were not grown from them (out of bag). 1 is
    # perfect; 0 or less is no better than the mean of all results, and then the shares are chance.
    predicted: float


@dataclass
class Record:
    """The state of a sweep."""

    trials: list[Trial] = field(default_factory=list)
    seconds: float = 0.0  # wall-clock time of all its drivers
    reason: str = ""  # why the last driver ended early
    importance: Importance | None = None  # None if too few trials are done to say
    total: int = 0  # trials at most, as the last command had it; 0 if unknown

    @property
    def runs(self) -> Iterator[TrialRun]:
        """The runs of all trials."""
        for trial in self.trials:
            yield from trial.runs

    @property
    def running(self) -> Iterator[TrialRun]:
        """The runs that a driver has started and whose end it has not seen."""
        return (run for run in self.runs if run.state == "running")

    @property
    def device_hours(self) -> float:
        """Hours for which devices were held."""
        return sum(run.seconds * run.devices for run in self.runs) / 3600

    def ranked(self, *, greater: bool) -> list[Trial]:
        """Return the trials that are done, the best first."""
        sign = -1 if greater else 1
        done = []
        for trial in self.trials:
            # A record that was edited by hand may hold NaN, which is in no order.
            if trial.state == "done" and trial.value is not None and math.isfinite(trial.value):
                done.append((sign * trial.value, trial))
        # By the value alone: of equal trials the earlier one is better.
        done.sort(key=lambda pair: pair[0])
        return [trial for _, trial in done]


def write_search(folder: Path, search: Search) -> None:
    """Write sweep.json."""
    write_atomic(folder / SWEEP, json.dumps(asdict(search), indent=1) + "\n")


def read_search(folder: Path) -> Search:
    """Read sweep.json. Raise ConfigError if there is none, EnvironmentFault if it is damaged."""
    if not (folder / SWEEP).is_file():
        raise ConfigError(f"{folder}: found no {SWEEP}; expected the folder of a sweep")
    fields = read_object(folder / SWEEP)
    # JSON has lists where the fields are tuples. A key too many or too few is a TypeError.
    try:
        ranges = []
        for range_fields in fields["ranges"]:
            choices = tuple(range_fields["choices"])
            ranges.append(Range(**{**range_fields, "choices": choices}))
        return Search(**{**fields, "ranges": tuple(ranges), "rungs": tuple(fields["rungs"])})
    except (KeyError, TypeError) as error:
        raise _damaged(folder / SWEEP, error) from None


def write_record(folder: Path, record: Record) -> None:
    """Write trials.json."""
    write_atomic(folder / TRIALS, json.dumps(asdict(record), indent=1) + "\n", within=folder)


def read_record(folder: Path) -> Record:
    """Read trials.json; return an empty record if there is none. Raise EnvironmentFault for damage."""
    try:
        fields = read_object(folder / TRIALS)
        trials = []
        for trial_fields in fields["trials"]:
            runs = [TrialRun(**run_fields) for run_fields in trial_fields["runs"]]
            trials.append(Trial(**{**trial_fields, "runs": runs}))
        importance = None
        if fields.get("importance") is not None:
            importance = Importance(**fields["importance"])
        return Record(**{**fields, "trials": trials, "importance": importance})
    except FileNotFoundError:
        return Record()
    except (KeyError, TypeError) as error:
        raise _damaged(folder / TRIALS, error) from None


def _damaged(path: Path, error: Exception) -> EnvironmentFault:
    """Return the error for a file that is no record of a sweep."""
    return EnvironmentFault(
        f"{path} is damaged, or another version of kubetune wrote it ({error}); put it back"
    )


def at_rest(record: Record) -> Record:
    """Return the record with the runs waiting that a driver left behind as running."""
    for run in record.running:
        run.state = "waiting"
    return record


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if there are no values, or one is missing or not finite."""
    # A trial without the value of one seed cannot be compared with one that has all.
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers or len(numbers) < len(values):
        return None
    return statistics.fmean(numbers)


def state_of(trial: Trial) -> str:
    """Return the state of a trial in words."""
    if trial.state == "pruned":
        return "stopped early"
    if trial.state != "open":
        return trial.state
    if any(run.state == "running" for run in trial.runs):
        return "running"
    return "waiting"


def summary(record: Record) -> str:
    """Return the number of trials in each state: `3 trials: 2 done, 1 failed`."""
    if not record.trials:
        return "no trial yet"
    states = [trial.state for trial in record.trials]
    words = {"done": "done", "pruned": "stopped early", "failed": "failed", "open": "open"}
    counts = []
    for state, word in words.items():
        if state in states:
            counts.append(f"{states.count(state)} {word}")
    return f"{counted(len(states), 'trial')}: {', '.join(counts)}"
