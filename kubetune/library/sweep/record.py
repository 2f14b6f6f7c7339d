"""A sweep's folder: what is searched (`sweep.json`), and how its trials stand (`trials.json`), each written whole.

Everything but Optuna's own study is here, so that `sweep status` and pages read it without Optuna.
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

SWEEP: Final = "sweep.json"
TRIALS: Final = "trials.json"
BEST: Final = "best.yaml"
REPORT: Final = "report.html"
LOCK: Final = ".driver.lock"

RunState = Literal["waiting", "running", "paused", "done", "failed"]
Outcome = Literal["done", "pruned", "failed"]
TrialState = Literal["open"] | Outcome


@dataclass(frozen=True)
class Search:
    """The search itself: what makes two sweeps two. `config`: the whole config with the first value of each range.

    `rungs` are the resources at which trials are judged, the last that of a whole run; `namespace` is that of the
    cluster, None for trials on this machine.
    """

    config: dict[str, Any]
    ranges: tuple[Range, ...]
    metric: str
    greater: bool
    sampler: str
    pruner: str
    rungs: tuple[int, ...]
    repeat: int
    seed: int
    name: str
    namespace: str | None = None


@dataclass
class TrialRun:
    """One run of a trial, `name` below the sweep's folder or, with the sweep's name before it, on the cluster.

    `value` is its best so far; `devices` it holds while it runs, for `seconds` until now, `earlier_seconds` of them
    before its last start; `starts` without progress.
    """

    name: str
    seed: int
    state: RunState = "waiting"
    step: int = 0
    steps: int = 0
    value: float | None = None
    seconds: float = 0.0
    earlier_seconds: float = 0.0
    devices: int = 1
    starts: int = 0
    code: int | None = None
    reason: str = ""


@dataclass
class Trial:
    """A setting that is tried, once or with several seeds. `rung`: the one it is on the way to.

    `value` is the mean of its runs', `reason` why it ended otherwise than well.
    """

    number: int
    values: Values
    runs: list[TrialRun]
    rung: int = 0
    state: TrialState = "open"
    value: float | None = None
    reason: str = ""

    @property
    def spread(self) -> float | None:
        """Standard deviation of the values of its runs; None for one run."""
        known = [run.value for run in self.runs if run.value is not None]
        return statistics.stdev(known) if len(known) > 1 else None


@dataclass
class Record:
    """The state of a sweep. `seconds`: wall-clock time of all its drivers; `reason`: why the last one ended."""

    trials: list[Trial] = field(default_factory=list)
    seconds: float = 0.0
    reason: str = ""
    importances: dict[str, float] = field(default_factory=dict)

    @property
    def runs(self) -> Iterator[TrialRun]:
        """The runs of all trials."""
        return (run for trial in self.trials for run in trial.runs)

    @property
    def running(self) -> Iterator[TrialRun]:
        """The runs that a driver has begun and not seen end."""
        return (run for run in self.runs if run.state == "running")

    @property
    def device_hours(self) -> float:
        """Hours that devices were held."""
        return sum(run.seconds * run.devices for run in self.runs) / 3600

    def ranked(self, *, greater: bool) -> list[Trial]:
        """Trials that are done, the best first."""
        known = [
            trial for trial in self.trials if trial.state == "done" and trial.value is not None
        ]
        return sorted(known, key=lambda trial: (-1 if greater else 1) * (trial.value or 0.0))


def write_search(folder: Path, search: Search) -> None:
    """Write sweep.json."""
    write_atomic(folder / SWEEP, json.dumps(asdict(search), indent=1) + "\n")


def read_search(folder: Path) -> Search:
    """The search of a folder. Raises ConfigError where there is none, EnvironmentFault where it is damaged."""
    if not (folder / SWEEP).is_file():
        raise ConfigError(
            f"{folder}: no sweep is there (it has no {SWEEP}); give the folder of one"
        )
    told = read_object(folder / SWEEP)
    try:
        ranges = tuple(Range(**{**one, "choices": tuple(one["choices"])}) for one in told["ranges"])
        return Search(**{**told, "ranges": ranges, "rungs": tuple(told["rungs"])})
    except (KeyError, TypeError) as error:
        raise _damaged(folder / SWEEP, error) from None


def write_record(folder: Path, record: Record) -> None:
    """Write trials.json."""
    write_atomic(folder / TRIALS, json.dumps(asdict(record), indent=1) + "\n", within=folder)


def read_record(folder: Path) -> Record:
    """The state of a folder's sweep; one that has not begun where there is none. EnvironmentFault for damage."""
    try:
        told = read_object(folder / TRIALS)
        trials = [
            Trial(**{**one, "runs": [TrialRun(**run) for run in one["runs"]]})
            for one in told["trials"]
        ]
        return Record(**{**told, "trials": trials})
    except FileNotFoundError:
        return Record()
    except (KeyError, TypeError) as error:
        raise _damaged(folder / TRIALS, error) from None


def at_rest(record: Record) -> Record:
    """The same, with runs that a driver left as running waiting for the next one."""
    for run in record.running:
        run.state = "waiting"
    return record


def _damaged(path: Path, error: Exception) -> EnvironmentFault:
    return EnvironmentFault(
        f"{path} is damaged, or another version of kubetune wrote it ({error}); put it back"
    )


def mean(values: Sequence[float | None]) -> float | None:
    """The mean; None where one is missing or is no number."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if len(known) == len(values) and known else None


def state_of(trial: Trial) -> str:
    """State of a trial in a word or two."""
    running = any(run.state == "running" for run in trial.runs)
    return {"open": "running" if running else "waiting", "pruned": "given up"}.get(
        trial.state, trial.state
    )


def summary(record: Record) -> str:
    """The trials so far, counted by how they stand."""
    states = [trial.state for trial in record.trials]
    told = {"done": "done", "pruned": "given up", "failed": "failed", "open": "open"}
    counts = ", ".join(
        f"{states.count(state)} {word}" for state, word in told.items() if state in states
    )
    return f"{counted(len(states), 'trial')}: {counts}" if states else "no trial yet"
