"""The page of a sweep: where lines lie, what is counted where it cannot be drawn, and how a sweep stands."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kubetune.base.locks import lock
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.library.sweep import sweep_list
from kubetune.library.sweep.live_page import sweep_facts, write_page
from kubetune.library.sweep.ranges import split
from kubetune.library.sweep.sweep_list import find_sweeps, sweep_state
from kubetune.library.sweep.sweep_record import (
    LOCK,
    SWEEP,
    TRIALS,
    Record,
    Search,
    Trial,
    TrialRun,
    read_record,
    write_record,
    write_search,
)
from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.sweeps import scatter
from kubetune.reporting.sweeps.parallel import draw
from kubetune.reporting.sweeps.scales import ChoiceScale, NumberScale, round_numbers
from tests.run.test_report_long import write_run

WORDS = ("training.learning_rate=log(1e-5,1e-1)", "lora.r=8,16,32")
HOSTILE = "</script><script>alert(1)</script>"


def search_of(*words: str, **changes: Any) -> Search:
    """Return a search of these ranges."""
    facts: dict[str, Any] = {
        "sampler": "random", "pruner": "asha", "rungs": (1, 3, 9), "repeat": 1, "seed": 0, "name": "fit", "greater": False,
    }  # fmt: skip
    return Search(
        config={}, ranges=tuple(split(words or WORDS)[1]), metric="eval_loss", **facts | changes
    )


def trial_of(number: int, state: Any, rate: str, rank: str, value: float | None) -> Trial:
    """Return a trial of one run."""
    run_states = {"done": "done", "pruned": "paused", "failed": "failed", "open": "running"}
    run: Any = TrialRun(f"{number:03d}", 42, run_states[state], 9, 90, value)
    values = {"training.learning_rate": rate, "lora.r": rank}
    return Trial(number, values, [run], state=state, value=value)


def write_sweep(folder: Path, trials: list[Trial], search: Search | None = None) -> Path:
    """Write the folder of a sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    write_search(folder, search or search_of())
    write_record(folder, Record(trials, total=len(trials)))
    return folder


MIXED = [
    trial_of(0, "done", "1e-3", "8", 2.0),
    trial_of(1, "done", "1e-5", "16", 1.0),
    trial_of(2, "pruned", "1e-1", "32", 3.0),
    trial_of(3, "failed", "1e-2", "32", 1.5),
    trial_of(4, "open", "1e-4", "16", None),
    trial_of(5, "done", "1e-4", "8", 1.0),
]


def lines_of(svg: str) -> dict[int, tuple[set[str], list[tuple[float, float]]]]:
    """Return the classes and the points of each trial's line, by the trial's number."""
    lines = {}
    for look, number, path in re.findall(
        r'<path class="([^"]+)" data-trial="(\d+)" d="(.*?)"', svg
    ):
        points = []
        for point in re.findall(r"[-\d.]+,[-\d.]+", path):
            x, y = point.split(",")
            points.append((float(x), float(y)))
        lines[int(number)] = (set(look.split()), points)
    return lines


def test_lines_lie_where_values_do(tmp_path: Path) -> None:
    facts = sweep_facts(write_sweep(tmp_path, MIXED))
    assert [trial.number for trial in facts.trials] == [1, 5, 0, 2, 3, 4]
    wide, tall = draw(facts)
    lines = lines_of(wide)
    assert sorted(lines) == sorted(lines_of(tall)) == [0, 1, 2, 3, 4, 5]
    top, bottom = 66.0, 322.0
    middle = (top + bottom) / 2
    # 1e-3 is half of the way from 1e-5 to 1e-1, by the logarithm; 8 is the lowest of three choices.
    assert [y for _, y in lines[0][1]] == [middle, bottom, middle]
    assert [y for _, y in lines[1][1]] == [bottom, middle, bottom]
    assert [y for _, y in lines[2][1]] == [top, top, top]
    # Neither a trial that failed nor one without a value ends among results.
    for number in (3, 4):
        assert lines[number][1][-1][1] > bottom
    assert lines[1][0] == {"trial", "done", "part-100", "best"}
    assert lines[0][0] == {"trial", "done", "part-50"}
    assert lines[2][0] == {"trial", "stopped-early", "part-0"}
    assert lines[3][0] == {"trial", "failed"}
    assert lines[4][0] == {"trial", "running"}
    assert "6 trials: 3 done" in facts.summary
    assert "1 stopped early" in facts.summary
    assert "Without a result: 2" in facts.summary
    # On a phone the axes lie below each other: values go to the right, and all of it fits.
    points = {number: points for number, (_, points) in lines_of(tall).items()}
    assert [x for x, _ in points[2]] == [336, 336, 336]
    assert points[1][0][1] < points[1][1][1] < points[1][2][1]
    assert 'viewBox="0 0 348' in tall
    # No line passes the names, which stand left of the axes.
    assert re.findall(r'<text class="name" x="0" .*?>([^<]+)<', tall) == [
        "learning_rate",
        "lora.r",
        label_of(facts.metric),
    ]
    assert min(x for line in points.values() for x, _ in line) > 100
    more = sweep_facts(write_sweep(tmp_path, MIXED, search_of(greater=True)))
    assert lines_of(draw(more)[0])[0][0] == {"trial", "done", "part-50", "best"}


def test_dots_lie_where_values_do(tmp_path: Path) -> None:
    facts = sweep_facts(write_sweep(tmp_path, MIXED))
    by_rate, by_rank = scatter.draw(facts)
    dots = {}
    for look, number, x, y in re.findall(
        r'<circle class="([^"]+)" data-trial="(\d+)" cx="([\d.]+)" cy="([\d.]+)"', by_rate
    ):
        dots[int(number)] = (set(look.split()), float(x), float(y))
    # Neither the trial that failed nor the one without a value is among results.
    assert sorted(dots) == [0, 1, 2, 5]
    left, middle, right = (dots[number][1] for number in (1, 0, 2))
    assert middle - left == right - middle > 0, "1e-3 is half of the way from 1e-5 to 1e-1"
    assert dots[1][2] == dots[5][2] > dots[0][2] > dots[2][2], "1.0, 1.0, 2.0, 3.0 from the bottom"
    assert dots[1][0] == {"trial", "done", "part-100", "best"}
    assert dots[2][0] == {"trial", "stopped-early", "part-0"}
    assert ">lora.r</text>" in by_rank
    # What matters most comes first, with how much that is.
    shares = {"training.learning_rate": 0.2, "lora.r": 0.8}
    told = [replace(setting, importance=shares[setting.key]) for setting in facts.settings]
    first, _ = scatter.draw(replace(facts, settings=tuple(told)))
    assert ">lora.r</text>" in first
    assert ">80 % of the spread</text>" in first
    # A single result lies nowhere in particular.
    lone = sweep_facts(write_sweep(tmp_path, MIXED[:1]))
    assert scatter.draw(lone) == []
    assert scatter.course(lone) == []


@pytest.mark.parametrize(("greater", "turns"), [(False, 1), (True, 0)])
def test_the_best_so_far_goes_on_from_trial_to_trial(
    tmp_path: Path, greater: bool, turns: int
) -> None:
    facts = sweep_facts(write_sweep(tmp_path, MIXED, search_of(greater=greater)))
    shown, narrow = scatter.course(facts)
    assert narrow.count("<circle") == shown.count("<circle")
    places = {
        int(number): (x, y)
        for number, x, y in re.findall(r'data-trial="(\d+)" cx="([\d.]+)" cy="([\d.]+)"', shown)
    }
    # The results are 2.0, 1.0 and 1.0 of those that are done, in the order of their numbers.
    (path,) = re.findall(r'<path class="so-far" d="(.*?)"', shown)
    assert path.startswith("M{},{}".format(*places[0]))
    assert len(set(re.findall(r"V([\d.]+)", path)) - {places[0][1]}) == turns
    assert ("H{}V{}".format(*places[1]) in path) == (not greater)


def test_what_cannot_be_drawn_is_counted(tmp_path: Path) -> None:
    lacking = trial_of(2, "done", "1e-3", "8", 1.5)
    del lacking.values["training.learning_rate"]
    strange = trial_of(3, "done", "1e-3", "64", math.nan)
    facts = sweep_facts(write_sweep(tmp_path, [*MIXED[:2], lacking, strange]))
    lines = lines_of(draw(facts)[0])
    assert len(lines) == 4
    assert [len(points) for _, points in (lines[2], lines[3])] == [2, 2]
    assert "Without a result: 1" in facts.summary
    assert "Without a value of some setting in the record: 1" in facts.summary
    assert [trial.number for trial in facts.trials] == [1, 2, 0, 3]
    page = write_page(tmp_path).read_text()
    assert page.count('<tr id="trial-') == 4
    assert "nan" not in page[page.index("<svg") : page.index("</svg>")]


@pytest.mark.parametrize(
    ("trials", "words", "sentence"),
    [
        ([], WORDS, "No trial has begun yet."),
        ([trial_of(0, "failed", "1e-3", "8", None)], WORDS, "1 trial: 1 failed"),
        ([trial_of(0, "done", "1e-3", "8", 1.0)], WORDS, "Too few trials: 1 done, at least 10"),
        (MIXED, WORDS[:1], "Too few trials: 3 done, at least 10"),
    ],
)
def test_a_sweep_of_any_size_has_a_page(
    tmp_path: Path, trials: list[Trial], words: tuple[str, ...], sentence: str
) -> None:
    page = write_page(write_sweep(tmp_path, trials, search_of(*words))).read_text()
    assert sentence in page
    assert page.count('<path class="trial ') == 2 * len(trials), "wide, and for a phone"
    assert not re.search(r"(src|href)=\"https?:", page)


def test_five_hundred_trials_stay_a_small_page(tmp_path: Path) -> None:
    trials = []
    (tmp_path / "trials").mkdir()
    for number in range(500):
        rate = repr(10 ** (-5 + 4 * number / 500))
        trials.append(trial_of(number, "done", rate, "16", 1 + math.sin(number)))
        if number < 20:
            write_run(tmp_path / "trials" / f"{number:03d}", 60)
    page = write_page(write_sweep(tmp_path, trials)).read_text()
    assert page.count('<path class="trial ') == 2 * page.count('<tr id="trial-') == 1000
    assert 'class="parallel wide many"' in page
    assert len(page) < 1_000_000
    results = page[page.index('class="compared"') :]
    heads = results[: results.index("</thead>")]
    assert heads.count("<th ") == 1 + 12, "no more runs side by side than can be told apart"


def test_names_of_a_sweep_are_no_html(tmp_path: Path) -> None:
    search = search_of("training.learning_rate=log(1e-5,1e-1)", "lora.r=8,16", name=HOSTILE)
    ranges = (search.ranges[0], replace(search.ranges[1], choices=(HOSTILE, "16")))
    failed = trial_of(0, "failed", "1e-3", HOSTILE, None)
    failed.reason = HOSTILE
    folder = write_sweep(tmp_path, [failed], replace(search, ranges=ranges, metric=HOSTILE))
    assert HOSTILE not in write_page(folder).read_text()


def test_a_half_file_is_named(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "found", MIXED)
    text = (folder / TRIALS).read_text()
    (folder / TRIALS).write_text(text[: len(text) // 2])
    with pytest.raises(EnvironmentFault, match=r"trials\.json"):
        sweep_facts(folder)
    facts = sweep_list.overview(folder)
    assert facts["state"] == "damaged"
    assert "trials.json" in facts["why"]
    with pytest.raises(ConfigError, match="no sweep"):
        sweep_facts(tmp_path)
    (folder / "trials" / "000").mkdir(parents=True)
    (folder / "trials" / SWEEP).write_text("{}")
    assert list(find_sweeps(tmp_path)) == [folder]


def test_the_state_is_that_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_of()
    folder = write_sweep(tmp_path, MIXED)

    def state_now() -> tuple[str, str]:
        return sweep_state(folder, read_record(folder), search)

    # Written just now, and no lock of this machine: a driver elsewhere is at work.
    assert state_now() == ("running", "")
    written = (folder / TRIALS).stat().st_mtime - 60
    os.utime(folder / TRIALS, (written, written))
    assert state_now()[0] == "stopped"
    assert "repeat the command to continue it" in state_now()[1]
    assert "1 waiting (dotted" in sweep_facts(folder).summary, "nothing runs any more"
    done = Record([trial for trial in MIXED if trial.state != "open"], total=5)
    write_record(folder, done)
    assert state_now() == ("done", "")
    write_record(folder, replace(done, total=6))
    assert state_now()[0] == "stopped", "it was killed between two trials"
    write_record(folder, replace(done, reason="the budget is spent"))
    assert state_now() == ("stopped", "the budget is spent")
    write_record(folder, Record([MIXED[3]], total=1))
    assert state_now()[0] == "failed"
    with lock(folder / LOCK, wait=False):
        assert state_now()[0] == "failed", "its own process is about to end"
        monkeypatch.setattr(sweep_list.os, "getpid", lambda: 0)
        assert state_now() == ("running", "")


@pytest.mark.parametrize(
    ("scale", "labels"),
    [
        (NumberScale(1e-5, 1e-2, log=True), ["1e-5", "1e-4", "0.001", "0.01"]),
        (NumberScale(3e-4, 2e-3, log=True), ["0.0003", "0.001", "0.002"]),
        (NumberScale(4, 64, whole=True), ["20", "40", "60"]),
        (NumberScale(0, 0.3), ["0", "0.1", "0.2", "0.3"]),
        (NumberScale(2.5, 2.5), ["2.5"]),
        (ChoiceScale(("cosine", "linear")), ["cosine", "linear"]),
        (ChoiceScale(("a" * 30,)), ["a" * 19 + "…"]),
        (ChoiceScale(tuple(map(str, range(30)))), [str(number) for number in range(0, 30, 3)]),
    ],
)
def test_ticks_are_few_and_round(scale: NumberScale | ChoiceScale, labels: list[str]) -> None:
    ticks = scale.ticks()
    assert [tick.label for tick in ticks] == labels
    assert all(0 <= tick.height <= 1 for tick in ticks)
    assert scale.height("no value of it") is None


def test_one_result_far_off_leaves_the_others_apart() -> None:
    near = NumberScale.of_results([1.2, 1.3, 1.4])
    assert near is not None
    assert not near.log
    far = NumberScale.of_results([1.2, 1.3, 1.4, 40.0])
    assert far is not None
    assert far.log
    assert NumberScale.of_results([]) is None
    below_zero = NumberScale.of_results([-1.0, 40.0])
    assert below_zero is not None
    assert not below_zero.log


def test_numbers_beside_an_axis_are_round() -> None:
    assert round_numbers(1, 7, whole=True) == [2, 4, 6]
    assert round_numbers(0.512, 0.533) == [0.515, 0.52, 0.525, 0.53]
