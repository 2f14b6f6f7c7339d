"""The table of a run on a terminal, and which lines a brief terminal leaves to the log file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kubetune.base import logs
from kubetune.base.terminal import VERBOSE, is_brief
from kubetune.config.schema import Config
from kubetune.plan.plan import Plan, make_plan
from kubetune.rundir import metrics
from kubetune.rundir.checkpoints import State
from kubetune.training.epochs.run_table import RunTable

WIDE = 200


def step_values(loss: float, **measures: float) -> dict[str, Any]:
    return {"loss": loss, "trained_tokens": 10, **measures}


def printed(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the words of each line that was printed."""
    return [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def plan() -> Plan:
    """Return the plan of a run of two epochs of two steps, each with an evaluation at its end."""
    plan = make_plan(Config.model_validate({"model": "a/model", "data": {"train": "x"}}), 4)
    return plan.model_copy(
        update={"steps_per_epoch": 2, "num_steps": 4, "eval_steps": 2, "eval_rows": 2}
    )


def test_a_row_before_training_and_one_for_each_epoch(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    table = RunTable(plan, "eval_loss", WIDE)
    table.evaluation(0, {"eval_loss": 6.5, "eval_exact_match": 0.0}, is_best=False)
    for step, loss in [(1, 4.0), (2, 2.0)]:
        table.step(step, step_values(loss), is_evaluated=step == 2)
    table.evaluation(2, {"eval_loss": 1.5, "eval_exact_match": 0.5}, is_best=True)
    assert printed(capsys) == [
        ["epoch", "step", "loss", "eval_loss", "eval_exact_match"],
        ["0", "0", "6.5", "0", "before", "training"],
        ["1", "2", "3.0000", "1.5", "0.5", "best", "so", "far"],
    ]


def test_a_resumed_run_shows_the_rows_of_before(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / metrics.BASE).write_text(json.dumps({"metrics": {"eval_loss": 6.5}}))
    with metrics.MetricsLog(tmp_path) as log:
        for step in (1, 2):
            log.write(step, {"epoch": step / 2, **step_values(3.0)})
        log.write(2, {"epoch": 1.0, "eval_loss": 1.5})
        log.write(3, {"epoch": 1.5, **step_values(1.0)})
    table = RunTable(plan, "eval_loss", WIDE)
    table.remember(tmp_path, replace(State(), step=3, best_step=2))
    table.step(4, step_values(2.0), is_evaluated=True)
    table.evaluation(4, {"eval_loss": 1.7}, is_best=False)
    assert [words[1:4] for words in printed(capsys)] == [
        ["step", "loss", "eval_loss"],
        ["0", "6.5", "before"],
        ["2", "3.0000", "1.5"],
        ["4", "1.5000", "1.7"],
    ]


def test_a_run_that_was_not_measured_before_training_has_no_row_for_it(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = RunTable(plan, "eval_loss", WIDE)
    table.remember(tmp_path, State())
    assert printed(capsys) == []


def test_a_run_by_rewards_shows_them_in_place_of_its_loss(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    table = RunTable(plan.model_copy(update={"eval_rows": 0}), "eval_loss", WIDE)
    table.step(1, step_values(0.001, reward=0.25, reward_std=0.4), is_evaluated=False)
    table.step(2, step_values(0.001, reward=0.75, reward_std=0.4), is_evaluated=False)
    assert printed(capsys) == [["epoch", "step", "reward"], ["1", "2", "0.5"]]


def test_many_evaluations_are_thinned_and_the_last_is_shown(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    long = plan.model_copy(update={"steps_per_epoch": 1000, "num_steps": 1000})
    table = RunTable(long, "eval_loss", WIDE)
    for step in range(1, 909):
        table.step(step, step_values(1.0), is_evaluated=True)
        table.evaluation(step, {"eval_loss": 1.0}, is_best=False)
    table.end()  # patience was spent
    rows = printed(capsys)
    assert 19 <= len(rows) <= 23
    assert rows[-1][1] == "908"


@pytest.mark.parametrize("columns", [40, 80])
def test_a_row_fits_into_its_terminal(
    plan: Plan, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    table = RunTable(plan, "eval_a_metric_with_a_name_that_is_rather_long", columns)
    values = {"eval_loss": 1.0, "eval_a_metric_with_a_name_that_is_rather_long": 1.0}
    table.step(1, step_values(1.0), is_evaluated=True)
    table.evaluation(2, values, is_best=True)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[-1].endswith("best so far")


def test_a_brief_terminal_shows_warnings_and_notices_and_the_file_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("INFO", tmp_path, brief=True)
    logs.MODEL.info("self-check")
    logs.RESULT.log(logs.NOTICE, "0 → 0.92")
    logs.DATA.warning("3 rows are empty")
    logs.ERROR.error("no such file")
    out = capsys.readouterr().out
    assert out.splitlines() == ["0 → 0.92", "warning: 3 rows are empty", "error: no such file"]
    content = (tmp_path / "logs" / "rank-0.log").read_text()
    assert len(content.splitlines()) == 4
    assert "[RESULT] 0 → 0.92" in content


def test_only_a_terminal_is_brief_and_only_until_somebody_asks_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VERBOSE, raising=False)
    assert not is_brief()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert is_brief()
    assert not is_brief("DEBUG")
    monkeypatch.setenv(VERBOSE, "1")
    assert not is_brief()


def test_the_epochs_of_evaluations_between_them_fit_their_column(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    table = RunTable(plan.model_copy(update={"steps_per_epoch": 27, "num_steps": 54}), "eval_loss")
    for step in (10, 37):
        table.evaluation(step, {"eval_loss": 1.5}, is_best=False)
    head, *rows = capsys.readouterr().out.splitlines()
    assert [row[: head.index("step")].strip() for row in rows] == ["0.37", "1.37"]
