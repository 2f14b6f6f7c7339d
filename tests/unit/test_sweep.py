"""Decisions of sweeps, without training: runs are functions here, and everything else is real."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest

from kubetune import errors
from kubetune.config.load import load_config
from kubetune.config.resolved import resolved
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.library.sweep import ranges
from kubetune.library.sweep.budget import parse as parse_budgets
from kubetune.library.sweep.driver import Driver
from kubetune.library.sweep.live_page import sweep_facts
from kubetune.library.sweep.local import slots_of
from kubetune.library.sweep.runner import Observation
from kubetune.library.sweep.sweep_record import (
    Record,
    Search,
    Trial,
    TrialRun,
    read_record,
    read_search,
    write_search,
)
from kubetune.library.sweep.trial_configs import Recipe
from kubetune.library.sweep.winner import noise, write_best
from kubetune.library.training import start_child
from kubetune.rundir.exit_status import ExitStatus

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

optuna = pytest.importorskip("optuna")

STEPS = 90
RUN = {"model": "m", "data": {"train": "t.jsonl", "eval": "e.jsonl"}, "lora": {"r": 8}}
WORDS = ["training.learning_rate=log(1e-5,1e-1)", "lora.r=4..64", "lora.dropout=0,0.05,0.1"]


def load(more: list[str]) -> Config:
    return load_config(RUN, overrides=more)


def search_of(*words: str, **changes: Any) -> Search:
    words_of_ranges = ranges.split(words or WORDS)[1]
    facts = {
        "sampler": "random",
        "pruner": "asha",
        "rungs": (1, 3, 9),
        "repeat": 1,
        "seed": 0,
        "name": "fit",
    } | changes
    return Search(
        resolved(ranges.check(words_of_ranges, load)),
        tuple(words_of_ranges),
        "eval_loss",
        facts.pop("greater", False),
        **facts,
    )


def curve(values: Mapping[str, str], share: float, seed: int = 42) -> float:
    """Return a loss that falls the faster the nearer the learning rate is to 3e-3, in a way that crosses others'."""
    off = abs(math.log10(float(values["training.learning_rate"]) / 3e-3))
    start = 2.0 + math.sin(seed + 37 * off) * 0.2
    return start * math.exp(-share * 2 / (1 + off)) + 0.1 * off


class Functions:
    """A place where runs are computed at once, and where `order` tells in which order they came to their rungs."""

    devices = 1

    def __init__(
        self, search: Search, slots: int = 1, measure: Callable[..., float] = curve
    ) -> None:
        self.slots, self._search, self._measure = slots, search, measure
        self.order: list[tuple[int, int, float]] = []
        self.begun: list[str] = []
        self.stopped: list[str] = []
        self._seen: dict[str, Observation] = {}
        self.seconds: dict[str, float] = {}

    def start(self, trial: Trial, run: TrialRun) -> None:
        self.begun.append(run.name)
        run.devices = self.devices
        rungs = self._search.rungs or (1,)
        resource = rungs[trial.rung] if self._search.rungs else 1
        share = resource / rungs[-1]
        value = self._measure(trial.values, share, run.seed)
        self.order.append((trial.number, resource, value))
        self.seconds[run.name] = self.seconds.get(run.name, 0.0) + 360 * (share - run.step / STEPS)
        status = ExitStatus(
            0, "done" if share == 1 else "paused", error=None if share == 1 else "Paused"
        )
        self._seen[run.name] = Observation(
            status, round(share * STEPS), STEPS, value, self.seconds[run.name]
        )

    def observe(self, run: TrialRun) -> Observation:
        return self._seen[run.name]

    def stop(self, run: TrialRun) -> None:
        self.stopped.append(run.name)

    def kill(self) -> None:
        self.stopped.append("all")

    def wait(self) -> None:
        pass


class Endless(Functions):
    """Runs that end only when they are killed."""

    def observe(self, run: TrialRun) -> Observation:
        return Observation(ExitStatus(145, "killed") if "all" in self.stopped else None)


# Studies of the test that runs.
opened = list[Any]()


@pytest.fixture(autouse=True)
def closed_studies() -> Iterator[None]:
    """Close the studies of a test. Python 3.13 and newer complain of connections that nobody closes."""
    yield
    while opened:
        opened.pop().close()


def driver_of(
    folder: Path,
    search: Search,
    place: Any,
    *,
    total: int = 20,
    storage: BaseStorage | None = None,
    **more: Any,
) -> Driver:
    from kubetune.library.sweep.study import Study

    study = Study(folder, search, storage)
    opened.append(study)
    return Driver(
        folder,
        search,
        read_record(folder),
        study,
        place,
        total=total,
        say=lambda text: None,
        **more,
    )


def plain_optuna(search: Search, order: list[tuple[int, int, float]]) -> list[FrozenTrial]:
    """Return what Optuna by itself makes of the same reports in the same order."""
    from kubetune.library.sweep.study import distributions, make_pruner, make_sampler

    study = optuna.create_study(
        study_name="sweep",
        direction="maximize" if search.greater else "minimize",
        pruner=make_pruner(search.pruner, search.rungs),
    )
    trials: dict[int, OptunaTrial] = {}
    for number, resource, value in order:
        while number not in trials:
            study.sampler = make_sampler(search.sampler, search.ranges, search.seed, len(trials))
            trial = study.ask(distributions(search.ranges))
            trials[trial.number] = trial
        study.sampler = optuna.samplers.RandomSampler()
        if resource == search.rungs[-1]:
            study.tell(trials[number], value)
            continue
        trials[number].report(value, resource)
        if trials[number].should_prune():
            study.tell(trials[number], state=optuna.trial.TrialState.PRUNED)
    return study.trials


@pytest.mark.parametrize(
    ("sampler", "pruner", "rungs"),
    [
        ("tpe", "asha", (1, 3, 9)),
        ("random", "hyperband", (1, 3, 9, 27)),
        pytest.param("tpe", "median", (1, 2, 3, 4), marks=pytest.mark.slow),
    ],
)
def test_decisions_are_optunas(
    tmp_path: Path, sampler: str, pruner: str, rungs: tuple[int, ...]
) -> None:
    search = search_of(sampler=sampler, pruner=pruner, rungs=rungs)
    place = Functions(search)
    driver = driver_of(tmp_path, search, place, total=14, storage=optuna.storages.InMemoryStorage())
    assert driver.drive() == ""
    expected = plain_optuna(search, place.order)
    ours = driver.record.trials
    states = {"done": "COMPLETE", "pruned": "PRUNED"}
    assert [states[trial.state] for trial in ours] == [trial.state.name for trial in expected]
    assert {trial.state for trial in ours} == {"done", "pruned"}
    for mine, other in zip(ours, expected, strict=True):
        assert mine.values == {
            part.key: other.params[part.key] if part.choices else part.text(other.params[part.key])
            for part in search.ranges
        }
        reports = {
            resource: value for number, resource, value in place.order if number == mine.number
        }
        assert other.intermediate_values == {r: v for r, v in reports.items() if r != rungs[-1]}
    assert read_record(tmp_path) == driver.record
    done = [trial.state for trial in ours].count("done")
    assert (driver.record.importance is not None) == (done >= 10)


def test_importance_is_told_of_ten_trials_and_not_of_nine(tmp_path: Path) -> None:
    search = search_of(pruner="none", rungs=())
    memory = optuna.storages.InMemoryStorage()
    nine = driver_of(tmp_path, search, Functions(search), total=9, storage=memory)
    nine.drive()
    assert nine.record.importance is None
    ten = driver_of(tmp_path, search, Functions(search), total=10, storage=memory)
    ten.drive()
    assert ten.record.importance is not None
    assert ten.record.importance.trials == 10
    many = driver_of(tmp_path, search, Functions(search), total=24, storage=memory)
    many.drive()
    importance = many.record.importance
    assert importance is not None
    assert read_record(tmp_path).importance == importance
    assert 0 < importance.predicted < 1
    assert sum(importance.shares.values()) == pytest.approx(1)
    # The loss of these runs depends on nothing else.
    assert max(importance.shares, key=lambda key: importance.shares[key]) == WORDS[0].split("=")[0]
    # As Optuna has it of the same trials, whose forest has other trees.
    study = optuna.load_study(study_name="sweep", storage=memory)
    evaluator = optuna.importance.MeanDecreaseImpurityImportanceEvaluator(seed=0)
    expected = optuna.importance.get_param_importances(study, evaluator=evaluator)
    assert importance.shares == pytest.approx(expected, abs=0.1)


def test_results_by_chance_have_no_importance(tmp_path: Path) -> None:
    search = search_of(pruner="none", rungs=())
    draw = random.Random(0)
    place = Functions(search, measure=lambda *_: draw.random())
    memory = optuna.storages.InMemoryStorage()
    driver = driver_of(tmp_path, search, place, total=12, storage=memory)
    driver.drive()
    assert driver.record.importance is not None
    assert driver.record.importance.predicted < 0
    write_search(tmp_path, search)
    facts = sweep_facts(tmp_path)
    assert [setting.importance for setting in facts.settings] == [None] * len(facts.settings)
    assert "no better than chance" in facts.importance


@pytest.mark.parametrize(
    ("sampler", "pruner"),
    [
        ("random", "none"),
        ("random", "hyperband"),
        pytest.param("tpe", "none", marks=pytest.mark.slow),
    ],
)
def test_no_setting_is_tried_twice_while_there_are_others(
    tmp_path: Path, sampler: str, pruner: str
) -> None:
    search = search_of("lora.r=1..5", "lora.dropout=0,0.1,0.2", sampler=sampler, pruner=pruner)
    place = Functions(search, measure=lambda values, share, seed: float(values["lora.r"]))
    storage = optuna.storages.InMemoryStorage()
    driver_of(tmp_path, search, place, total=4, storage=storage).drive()
    driver = driver_of(tmp_path, search, place, total=15, storage=storage)  # as after a kill
    driver.drive()
    settings = [tuple(trial.values.values()) for trial in driver.record.trials]
    assert len(settings) == len(set(settings)) == 15


def test_ranges_are_checked_all_at_once_in_the_words_of_overrides() -> None:
    rest, parsed, _ = ranges.split(
        [
            "run.yaml",
            "training.max_steps=9",
            *WORDS,
            "lora.target_modules=[q_proj,v_proj],all-linear",
        ]
    )
    assert rest == ["run.yaml", "training.max_steps=9"]
    assert [part.kind for part in parsed] == ["float", "int", "choice", "choice"]
    assert [str(part) for part in parsed][:2] == ["log(1e-05,0.1)", "4..64"]
    assert parsed[3].choices == ("[q_proj,v_proj]", "all-linear")
    assert ranges.split(["lr=1..2"])[1][0].kind == "float"
    for word in (
        "lora.dropout=0.1,0.10",
        "lr=1e-3,0.001",
        "lora.r=8,08",
        "training.optim=adamw,adamw",
    ):
        (message,) = ranges.split([word])[2]
        assert re.search(r"found [\w.]+ twice in .*; expected different values", message), message
    assert ranges.split(["model.revision=0.1,0.10"])[1][0].choices == ("0.1", "0.10")
    assert ranges.split(["data.train=../a.jsonl"]) == (["data.train=../a.jsonl"], [], [])
    wrong = [
        "training.learning_rate=log(1e-5,20)",
        "lora.r=0.5..8",
        "training.optim=adamw,sgd",
        "lora.rr=1,2",
    ]
    _, parsed, problems = ranges.split([*wrong, "lora.dropout=0.2..0.1"])
    with pytest.raises(ConfigError) as refused:
        ranges.check(parsed, load, problems)
    assert [problem.split(";")[0] for problem in sorted(refused.value.problems)] == [
        "override: lora.dropout: found 0.2..0.1",
        "override: lora.r: found 0.5",
        "override: lora.rr: unknown key",
        "override: training.learning_rate: found 20",
        'override: training.optim: found "sgd"',
    ]
    bad = [
        "a.b=log(1,0)",
        "output=a,b",
        "lr=1,1",
        "learning_rate=1..2",
        "training.learning_rate=1,2",
    ]
    assert len(ranges.split(bad)[2]) == 4


def test_a_driver_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed at every note it makes, one after the other: the same trials, none lost and none twice."""
    search = search_of(sampler="tpe")
    whole = (
        driver_of((tmp_path / "whole"), search, Functions(search), total=2)
        if (tmp_path / "whole").mkdir() is None
        else None
    )
    assert whole is not None
    whole.drive()
    (tmp_path / "killed").mkdir()
    place = Functions(search)
    for _ in range(30):
        notes = itertools.count()
        driver = driver_of(tmp_path / "killed", search, place, total=2)
        note = driver._write

        def die() -> None:
            note()  # noqa: B023
            if next(notes) == 5:  # noqa: B023
                raise MemoryError

        driver._write = die  # type: ignore[method-assign]
        try:
            driver.drive()
            break
        except MemoryError:
            continue
    else:
        raise AssertionError("it came to no end")
    got = [(trial.values, trial.state, trial.value) for trial in driver.record.trials]
    assert got == [(trial.values, trial.state, trial.value) for trial in whole.record.trials]


@pytest.mark.parametrize(
    ("text", "repeat", "devices", "trials", "spent"),
    [
        ("0.55gpu-hours", 1, 1, 5, 0.5),
        ("2.75eur", 1, 1, 5, 0.5),
        ("0.55gpu-hours", 3, 1, 1, 0.3),  # a trial has no value without all its seeds
        ("1gpu-hours", 1, 4, 2, 0.8),
    ],
)
def test_no_run_is_begun_that_would_pass_the_budget(
    tmp_path: Path, text: str, repeat: int, devices: int, trials: int, spent: float
) -> None:
    search = search_of(pruner="none", rungs=(), repeat=repeat)
    place = Functions(search)
    memory = optuna.storages.InMemoryStorage()
    place.devices = devices
    driver = driver_of(tmp_path, search, place, storage=memory, budgets=parse_budgets([text], 5.0))
    assert "no more were started" in driver.drive()
    assert (len(driver.record.trials), round(driver.record.device_hours, 6)) == (trials, spent)


def test_budgets_are_read_or_refused() -> None:
    texts = [str(budget) for budget in parse_budgets(["90min", "1min", "3 h", "12GPU-hours"], None)]
    assert texts == ["1 h 30 min", "1 min", "3 h", "12 gpu-hours"]
    assert parse_budgets(["90min"], None)[0].share(0.2) == "12 min of 1 h 30 min"
    with pytest.raises(ConfigError) as refused:
        parse_budgets(["5", "3 weeks", "0h", "20eur"], None)
    assert len(refused.value.problems) == 4


def test_a_trial_that_fails_is_a_result_and_an_error_of_all_is_the_end(tmp_path: Path) -> None:
    search = search_of(pruner="none", rungs=())

    class Failing(Functions):
        def __init__(self, ends: list[ExitStatus]) -> None:
            super().__init__(search)
            self._ends = iter(ends)

        def observe(self, run: TrialRun) -> Observation:
            return Observation(end) if (end := next(self._ends, None)) else super().observe(run)

    diverged = ExitStatus(4, "loss is nan at step 3")
    memory = ExitStatus(3, "out of memory", error="OutOfMemory")
    (tmp_path / "a").mkdir()
    ends = [diverged, memory, ExitStatus(145, "killed")]
    driver = driver_of(
        tmp_path / "a", search, Failing(ends), total=4, storage=optuna.storages.InMemoryStorage()
    )
    assert driver.drive() == ""
    assert [trial.state for trial in driver.record.trials] == ["failed", "failed", "done", "done"]
    assert driver.record.trials[0].reason == "loss is nan at step 3"
    (tmp_path / "b").mkdir()
    missing = ExitStatus(2, "t.jsonl: no such file")
    driver = driver_of(
        tmp_path / "b", search, Failing([missing] * 9), storage=optuna.storages.InMemoryStorage()
    )
    with pytest.raises(errors.KubetuneError, match="no such file") as ended:
        driver.drive()
    assert ended.value.exit_code == 2
    assert len(driver.record.trials) == 2


@pytest.mark.parametrize(("steps", "starts"), [([7] * 9, 2), ([7, 8, 8], 3), ([None], 1)])
def test_a_fault_of_the_surroundings_is_no_result_of_a_trial(
    tmp_path: Path, steps: list[int | None], starts: int
) -> None:
    """Else a full disk would end all that are left of a search, one after the other, as if their values were bad."""
    search = search_of(pruner="none", rungs=())
    storage = optuna.storages.InMemoryStorage()
    left = iter(steps)

    class Full(Functions):
        def observe(self, run: TrialRun) -> Observation:
            if run.name != "001" or self.begun.count("001") > starts:
                return super().observe(run)
            return Observation(
                ExitStatus(3, "/out: No space left on device", error="EnvironmentFault"), next(left)
            )

    place = Full(search)
    with pytest.raises(errors.EnvironmentFault, match="run 001: /out: No space left") as ended:
        driver_of(tmp_path, search, place, total=4, storage=storage).drive()
    assert str(ended.value).endswith("Fix this, then repeat the command to continue.")
    assert place.begun.count("001") == starts
    assert [trial.state for trial in read_record(tmp_path).trials] == ["done", "open"]
    # It did not come to the study either, whose sampler would keep away from such values.
    driver = driver_of(tmp_path, search, place, total=4, storage=storage)
    assert driver.drive() == ""
    assert [trial.state for trial in driver.record.trials] == ["done"] * 4


def test_a_config_that_no_trial_can_begin_with_ends_the_search_at_once(tmp_path: Path) -> None:
    search = search_of(pruner="none", rungs=())

    class Refusing(Functions):
        def start(self, trial: Trial, run: TrialRun) -> None:
            self.begun.append(run.name)
            raise errors.ModelError("m: no such folder")

    place = Refusing(search, slots=3)
    with pytest.raises(errors.KubetuneError, match="no such folder"):
        driver_of(tmp_path, search, place, storage=optuna.storages.InMemoryStorage()).drive()
    assert place.begun == ["000", "001"]


def test_what_cannot_begin_for_a_moment_begins_later(tmp_path: Path) -> None:
    search = search_of(pruner="none", rungs=())

    class Busy(Functions):
        waits = 0

        def start(self, trial: Trial, run: TrialRun) -> None:
            if len(self.begun) < 2:
                self.begun.append("")
                raise errors.EnvironmentFault("exceeded quota")
            super().start(trial, run)

        def wait(self) -> None:
            self.waits += 1

    place = Busy(search)
    driver = driver_of(tmp_path, search, place, total=2, storage=optuna.storages.InMemoryStorage())
    assert driver.drive() == ""
    assert place.begun == ["", "", "000", "001"]
    assert place.waits >= 2
    assert [trial.state for trial in driver.record.trials] == ["done", "done"]


def test_what_cannot_begin_for_long_ends_the_search_and_no_trial(tmp_path: Path) -> None:
    search = search_of(pruner="none", rungs=())

    class Refused(Functions):
        def start(self, trial: Trial, run: TrialRun) -> None:
            self.begun.append(run.name)
            raise errors.EnvironmentFault("exceeded quota")

    place = Refused(search)
    memory = optuna.storages.InMemoryStorage()
    driver = driver_of(tmp_path, search, place, total=2, storage=memory)
    with pytest.raises(errors.EnvironmentFault, match="run 000: exceeded quota"):
        driver.drive()
    assert place.begun == ["000"] * 4
    assert [(trial.state, trial.runs[0].state) for trial in driver.record.trials] == [
        ("open", "waiting")
    ]


def test_the_first_wish_to_stop_asks_all_runs_and_the_second_kills_them(tmp_path: Path) -> None:
    wishes = iter([None, "asked to stop", "asked to stop", "stopped at once"])
    search = search_of(pruner="none", rungs=())
    place = Endless(search, slots=2)
    memory = optuna.storages.InMemoryStorage()
    driver = driver_of(
        tmp_path,
        search,
        place,
        storage=memory,
        asked_to_stop=lambda: next(wishes, "stopped at once"),
    )
    assert driver.drive() == "asked to stop"
    assert place.stopped[:2] == ["000", "001"]
    assert place.stopped.count("all") == 1
    assert [run.state for run in driver.record.runs] == ["waiting", "waiting"]


def test_seeds_are_a_dimension_and_noise_is_told(tmp_path: Path) -> None:
    search = search_of(
        "training.learning_rate=1e-3,2e-3", sampler="grid", pruner="none", rungs=(), repeat=3
    )
    measured = iter([1.0, 1.2, 1.1, 1.05, 1.15, 1.12])
    place = Functions(search, measure=lambda *_: next(measured))
    driver = driver_of(tmp_path, search, place, total=2, storage=optuna.storages.InMemoryStorage())
    driver.drive()
    first, second = driver.record.ranked(greater=False)
    assert [run.seed for run in first.runs] == [42, 43, 44]
    assert (round(first.value or 0, 3), round(first.spread or 0, 3)) == (1.1, 0.1)
    assert "within noise" in (noise(first, second) or "")
    far = Trial(
        9,
        {},
        [TrialRun("x", 42, value=2.0), TrialRun("y", 43, value=2.2), TrialRun("z", 44, value=2.1)],
    )
    assert noise(first, far) is None


def test_the_winner_is_a_run_file_that_says_what_it_changed(tmp_path: Path) -> None:
    search = search_of()
    values = {"training.learning_rate": "0.002", "lora.r": "16", "data.train[0].weight": "0.3"}
    trial = Trial(3, values, [TrialRun("003", 7, "done", value=1.5)])
    trial.state, trial.value = "done", 1.5
    config = Recipe(load, search, tmp_path, "fit").config(trial, trial.runs[0])
    path = write_best(tmp_path, config, load([]), Record([trial]), search)
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert comments[0] == "# Written by kubetune sweep, of 1 trial: 1 done."
    assert comments[2:] == [
        "# data.train[0].weight: 1 → 0.3",
        "# lora.r: 8 → 16",
        "# training.learning_rate: – → 0.002",
        "# training.seed: 42 → 7",
    ]
    winner = load_config(path)
    assert winner == load(
        ["lora.r=16", "training.learning_rate=0.002", "training.seed=7", "data.train[0].weight=0.3"]
    )


def test_the_folder_reads_back(tmp_path: Path) -> None:
    search = search_of()
    write_search(tmp_path, search)
    assert read_search(tmp_path) == search
    (tmp_path / "trials.json").write_text(json.dumps({"trials": [{}]}))
    with pytest.raises(errors.EnvironmentFault, match="damaged"):
        read_record(tmp_path)
    with pytest.raises(ConfigError, match="no sweep"):
        read_search(tmp_path / "other")
    assert Record().device_hours == 0


def test_a_study_that_is_damaged_or_lost_is_told_of_and_not_begun_anew(tmp_path: Path) -> None:
    from kubetune.library.sweep.study import explained

    search = search_of(pruner="none", rungs=())
    memory = optuna.storages.InMemoryStorage()
    driver_of(tmp_path, search, Functions(search), total=2, storage=memory).drive()
    (tmp_path / "empty").mkdir()
    for folder, storage in (
        (tmp_path, optuna.storages.InMemoryStorage()),
        (tmp_path / "empty", memory),
    ):
        place = Functions(search)
        with pytest.raises(errors.EnvironmentFault, match="lost or replaced"):
            driver_of(folder, search, place, total=3, storage=storage).drive()
        assert place.begun == []
    (tmp_path / "study.db").write_text("no study")
    with (
        pytest.raises(errors.EnvironmentFault, match=r"study\.db.*: file is not a database"),
        explained(tmp_path),
    ):
        driver_of(tmp_path, search, place)


def test_a_study_that_is_closed_holds_no_file(tmp_path: Path) -> None:
    from kubetune.library.sweep.study import Study

    study = Study(tmp_path, search_of())
    study.ask()
    study.close()
    open_files = {file.path for file in psutil.Process().open_files()}
    assert str(tmp_path / "study.db") not in open_files


@pytest.mark.parametrize(
    ("visible", "parallel", "parts"),
    [
        (None, None, ["0", "1", "2", "3"]),
        ("2,5,7,9", 2, ["2,5", "7,9"]),
        ("GPU-a, GPU-b,-1", None, ["GPU-a", "GPU-b"]),
        ("0,1", 3, "found 3 trials of 1 GPUs, and 2 GPUs here"),
        ("", None, [None]),
    ],
)
def test_gpus_are_shared_out_among_trials(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    parallel: int | None,
    parts: Any,
) -> None:
    """By nvidia-smi and the environment, which is all that there is of GPUs here."""
    command = tmp_path / "nvidia-smi"
    command.write_text('#!/bin/sh\nfor n in 0 1 2 3; do echo "GPU $n: H100"; done\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if isinstance(parts, str):
        with pytest.raises(ConfigError, match=parts):
            slots_of(load([]).compute, parallel, environ)
        return
    compute, slots = slots_of(load([]).compute, parallel, environ)
    assert [slot.get("CUDA_VISIBLE_DEVICES") for slot in slots] == parts
    assert compute.gpus_per_node == (len(parts[0].split(",")) if parts[0] else None)


def test_a_process_that_dies_before_its_request_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = tmp_path / "python"
    shell.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES"; exec 0<&-; exit 1\n')
    shell.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(shell))
    child, output = start_child(
        {"long": "x" * 1_000_000}, subprocess.PIPE, subprocess.STDOUT, {"CUDA_VISIBLE_DEVICES": "3"}
    )
    with output, child:
        assert child.stdout is not None
        assert (child.stdout.read(), output.read(), child.wait()) == (b"3\n", "", 1)


def test_all_that_failed_in_ways_of_their_own_is_no_success(tmp_path: Path) -> None:
    search = search_of(pruner="none", rungs=())
    steps = itertools.count()

    class Diverging(Functions):
        def observe(self, run: TrialRun) -> Observation:
            return Observation(ExitStatus(errors.DIVERGED, f"loss is nan at step {next(steps)}"))

    memory = optuna.storages.InMemoryStorage()
    with pytest.raises(
        errors.KubetuneError, match="no best one; the last failure: loss is nan at step 3"
    ) as ended:
        driver_of(tmp_path, search, Diverging(search), total=4, storage=memory).drive()
    assert ended.value.exit_code == errors.DIVERGED


def test_each_trial_that_is_the_best_so_far_is_told_of(tmp_path: Path) -> None:
    """So that its run file is there while the others train, and after a kill."""
    search = search_of(
        "training.learning_rate=1e-3,2e-3,3e-3,4e-3", sampler="grid", pruner="none", rungs=()
    )
    measured = iter([3.0, 4.0, 1.0, 2.0])
    place = Functions(search, measure=lambda *_: next(measured))
    numbers = list[int]()
    memory = optuna.storages.InMemoryStorage()
    driver = driver_of(
        tmp_path, search, place, total=4, storage=memory,
        on_new_best=lambda: numbers.append(driver.record.ranked(greater=False)[0].number),
    )  # fmt: skip
    driver.drive()
    assert numbers == [0, 2]


@pytest.mark.parametrize(
    ("pause", "ended_at", "state"), [(4, 2, "running"), (4, 4, "done"), (None, 2, "running")]
)
def test_a_pause_that_a_new_pod_has_not_cleared_yet_is_not_taken_for_its_own(
    monkeypatch: pytest.MonkeyPatch, pause: int | None, ended_at: int, state: str
) -> None:
    """Else a promoted trial would be judged at its next rung by what it had at the one before."""
    pytest.importorskip("lightkube")
    from kubetune.k8s.api.client import Cluster
    from kubetune.k8s.cluster import cluster_runs
    from kubetune.k8s.manifests.run_spec import spec_of

    class Api:
        def get(self, kind: str, name: str) -> dict[str, Any]:
            return {"kind": kind, "metadata": {"name": name}, "spec": {}, "status": {"active": 1}}

    trainer = {"name": "trainer", "state": {"running": {}}}
    status = {"containerStatuses": [trainer]}
    pod = {
        "metadata": {"name": "m-0"},
        "spec": {"containers": [{"name": "trainer"}]},
        "status": status,
    }
    left = {
        "step": ended_at,
        "exit_status": {"code": 0, "reason": "paused", "step": ended_at, "error": "Paused"},
    }
    monkeypatch.setattr(cluster_runs, "trainer_pods", lambda *_: [pod])
    monkeypatch.setattr(cluster_runs, "ask_progress", lambda *_: (left, ""))
    monkeypatch.setattr(cluster_runs, "events_of", lambda *_: [])
    config = load([f"training.pause_at_step={pause or 'null'}", "kubernetes.image=i:1", "name=m"])
    assert cluster_runs.observe(cast("Cluster", Api()), spec_of(config)).state == state
