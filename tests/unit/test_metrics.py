"""metrics.jsonl and its siblings: exact numbers, no step twice after a resume, nothing lost or torn."""

from __future__ import annotations

import hashlib
import json
import math
import signal
import subprocess
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kubetune import errors
from kubetune.base import jsonl
from kubetune.config.metric_names import main_metric
from kubetune.errors import EnvironmentFault
from kubetune.library.listing import facts
from kubetune.reporting.hero import hero
from kubetune.reporting.reading import read_run
from kubetune.rundir import metrics
from kubetune.rundir.metrics import (
    MetricsLog,
    read_events,
    read_lines,
    read_metrics,
    record_event,
)
from kubetune.rundir.report import REPORT_VERSION, read_report, write_report_json
from kubetune.rundir.totals import Totals, read_totals, runaway
from tests.run.test_report_long import write_run

STEP = {
    "epoch": 0.5,
    "loss": 1.9312345678901234,
    "samples": 4,
    "tokens": 600,
    "trained_tokens": 200,
}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, values: list[float]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    with MetricsLog(run_dir) as log:
        for step, value in enumerate(values, start=1):
            log.write(step, {"loss": value})
    assert [line["loss"].hex() for line in read_metrics(run_dir)] == [
        value.hex() for value in values
    ]


def test_a_resume_cuts_off_what_came_after_its_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(step, STEP)
            log.write_timing(step, {"seconds": 0.5})
        log.write(3, {"eval_loss": 1.8})
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    with MetricsLog(tmp_path, resume_step=3, evaluated_step=2) as log:
        assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
        log.write(3, {"eval_loss": 1.8})
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    with MetricsLog(tmp_path, resume_step=2) as log:
        assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
        assert [line["step"] for line in read_lines(tmp_path / "timings.jsonl")] == [1, 2]
        log.write(3, STEP)
        log.write(3, {"eval_loss": 1.8})
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_a_start_from_the_beginning_leaves_nothing_old(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, STEP)
    with MetricsLog(tmp_path):
        assert read_metrics(tmp_path) == []


def test_a_torn_last_line_is_not_read_and_repaired_by_a_resume(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, STEP)
        log.write(2, STEP)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    with MetricsLog(tmp_path, resume_step=2) as log:
        log.write(3, STEP)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def test_not_finite_numbers_become_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, {"loss": math.nan, "grad_norm": math.inf})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None}]


def test_a_killed_process_loses_no_line(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from kubetune.rundir.metrics import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1])); [log.write(s, {'loss': 1.0}) for s in (1, 2, 3)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program, tmp_path]).returncode == -signal.SIGKILL
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_full_disk_is_explained_and_leaves_whole_lines(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from kubetune.errors import EnvironmentFault; from kubetune.rundir.metrics import MetricsLog\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "log = MetricsLog(Path(sys.argv[1]))\n"
        "try:\n for step in range(100): log.write(step, {'loss': 1.0})\n"
        "except EnvironmentFault as fault: print(fault)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True
    )
    assert "metrics.jsonl" in done.stdout
    path = tmp_path / "metrics.jsonl"
    assert len(read_lines(path)) == 4
    assert path.read_bytes().endswith(b"\n")


def test_a_folder_that_is_missing_is_explained(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"events\.jsonl"):
        record_event(tmp_path / "missing", "start")


def test_events_have_time_and_facts_and_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary_value")
    record_event(tmp_path, "start", world_size=2)
    record_event(tmp_path, "error", reason="401 with hf_canary_value")
    start, error = read_events(tmp_path)
    assert start["event"] == "start"
    assert start["world_size"] == 2
    assert start["time"].endswith("Z")
    assert error["reason"] == "401 with [secret]"


def test_lines_of_several_writers_stay_whole(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from kubetune.rundir.metrics import record_event\n"
        "[record_event(Path(sys.argv[1]), 'save', pid=os.getpid(), filler='x' * 3000) for _ in range(50)]"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, tmp_path]) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(read_events(tmp_path)) == 150


def test_the_report_sums_up_the_run(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text("{}")
    with MetricsLog(tmp_path) as log:
        for step, loss in ((1, 2.0), (2, 1.5)):
            log.write(step, {**STEP, "epoch": step / 2, "loss": loss})
            log.write_timing(step, {"seconds": 2.0})
        log.write(2, {"epoch": 1.0, "eval_loss": 1.4})
    report = write_report_json(
        tmp_path,
        read_totals(tmp_path),
        world_size=2,
        data_fingerprint="abc",
        peak_memory_bytes=10,
        copy_to=tmp_path / "copies" / "report.json",
        device="cpu",
    )
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert (tmp_path / "copies" / "report.json").read_bytes() == (
        tmp_path / "report.json"
    ).read_bytes()
    assert {key: report[key] for key in ("world_size", "steps", "epochs", "samples", "tokens", "trained_tokens")} == {
        "world_size": 2, "steps": 2, "epochs": 1.0, "samples": 8, "tokens": 1200, "trained_tokens": 400,
    }  # fmt: skip
    assert (report["seconds"], report["tokens_per_second"]) == (4.0, 300.0)
    assert (report["loss_first"], report["loss_last"], report["eval_last"]["eval_loss"]) == (
        2.0,
        1.5,
        1.4,
    )
    assert report["config_sha256"] == hashlib.sha256(b"{}").hexdigest()
    assert report["versions"]["torch"]
    assert report["device"] == "cpu"


def test_the_copy_of_a_report_overwrites_nothing_but_reports(tmp_path: Path) -> None:
    def write(copy: Path) -> None:
        write_report_json(
            tmp_path,
            read_totals(tmp_path),
            world_size=1,
            data_fingerprint="f",
            peak_memory_bytes=1,
            copy_to=copy,
        )

    (tmp_path / "resolved.json").write_text("{}")
    rows = tmp_path / "train.jsonl"
    copy = tmp_path / "copy.json"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(errors.ConfigError, match=r"train\.jsonl holds something other than"):
        write(rows)
    assert rows.read_text() == '{"prompt": "a", "completion": "b"}\n'
    copy.touch()  # as mktemp does
    write(copy)
    write(copy)
    assert copy.read_bytes() == (tmp_path / metrics.REPORT).read_bytes()


def test_the_report_of_a_run_without_steps(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text("{}")
    report = write_report_json(
        tmp_path, Totals(), world_size=1, data_fingerprint="", peak_memory_bytes=0
    )
    assert report["steps"] == 0
    assert report["tokens_per_second"] is None


def test_a_torn_line_costs_itself_and_not_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_event(tmp_path, "start")
    path = tmp_path / "events.jsonl"
    with path.open("ab") as file:
        file.write(b'{"time": "2026')
    record_event(tmp_path, "stop")
    record_event(tmp_path, "exit")
    assert [event["event"] for event in read_events(tmp_path)] == ["start", "stop", "exit"]
    assert f"{path}: line 2 is damaged and left out" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        b"\0" * 300,
        b"garbage",
        b"[" * 20_000,
        b"5",
        b'{"a": "\xff"}',
        b'{"step": null}',
        b'{"time": "2026-x", "event": "x"}',
    ],
    ids=["NULs", "garbage", "nested deeply", "a number", "no UTF-8", "no step", "no time"],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl", "events.jsonl"])
def test_damaged_lines_are_stepped_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, line: bytes
) -> None:
    with MetricsLog(tmp_path) as log:
        for step in (1, 2):
            log.write(step, STEP)
            log.write_timing(step, {"seconds": 0.5})
            record_event(tmp_path, "save", step=step)
    path = tmp_path / name
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, line, second, line, b""]))
    assert [whole_line["step"] for whole_line in read_lines(path)] == [1, 2]
    assert "lines 2, 4 are damaged" in caplog.text
    assert [whole_line["step"] for whole_line in metrics.last_lines(path)] == [1, 2]


def test_a_resume_misses_the_lines_that_a_disk_has_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(1, 21):
            log.write(step, STEP)
            log.write_timing(step, {"seconds": 0.5})
        log.write(20, {"eval_loss": 1.5})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], b"\0" * 50, b"\n", *lines[5:13], b'{"st']))
    with MetricsLog(tmp_path, resume_step=20, evaluated_step=20) as log:
        log.write(21, STEP)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, *range(6, 14), 21]
    assert f"{path}: steps 5, 14-20 are missing (8 of 20)" in caplog.text
    assert "the evaluation after step 20 is missing" in caplog.text
    assert b"\0" not in path.read_bytes()
    assert "timings" not in caplog.text


def test_a_file_that_is_deleted_or_moved_away_is_noticed_at_the_next_step(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with MetricsLog(run_dir) as log:
        log.write(1, STEP)
        run_dir.rename(tmp_path / "elsewhere")
        with pytest.raises(EnvironmentFault, match=r"metrics\.jsonl was deleted or moved away"):
            log.write(2, STEP)
        (tmp_path / "elsewhere").rename(run_dir)
        log.write(2, STEP)
        (run_dir / "metrics.jsonl").unlink()
        (run_dir / "metrics.jsonl").touch()
        with pytest.raises(EnvironmentFault, match=r"metrics\.jsonl was deleted or moved away"):
            log.write(3, STEP)


@pytest.mark.parametrize(
    ("damaged", "wrong"),
    [
        (['{"step": 2', '"loss": 3}'], [2, 3]),  # together they would make an object
        (['{"step": 2}, {"step": 3}'], [2]),
        (['{"step": 2', '"loss": 3}', '{"step": 4}, {"step": 5}'], [2, 3, 4]),
        (['{"step": 2}], [{"step": 3}'], [2]),
        (["[1]", "\0\0\0"], [2, 3]),
    ],
)
def test_damaged_lines_are_judged_one_by_one(
    tmp_path: Path, damaged: list[str], wrong: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged_lines = list[int]()
    path.write_text("\n".join(['{"step": 1}', *damaged, '{"step": 9}', '{"step": 10']))
    assert [line["step"] for line in metrics.stream_lines(path, damaged_lines)] == [1, 9]
    assert damaged_lines == wrong


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["add", "half", "cut", "replace", "look"]), max_size=12))
def test_a_growing_file_is_told_whole_however_it_changes(
    tmp_path_factory: pytest.TempPathFactory, changes: list[str]
) -> None:
    path = tmp_path_factory.mktemp("run") / metrics.TIMINGS
    follower = metrics.follower(path)
    written = list[int]()
    shown = list[int]()
    half = b""
    for count, change in enumerate([*changes, "look"], 1):
        line = json.dumps({"step": count, "seconds": 0.5}).encode() + b"\n"
        if change == "add":
            with path.open("ab") as file:
                file.write(b"\n" * bool(half) + line)
            written, half = [*written, count], b""
        elif change == "half" and not half:
            half = line[:9]
            with path.open("ab") as file:
                file.write(half)
        elif change in (
            "cut",
            "replace",
        ):  # by a resume: here in its place, there by another file; some is done again
            written, half = [*written[:1], count], b""
            content = b"".join(
                json.dumps({"step": n, "seconds": 0.5}).encode() + b"\n" for n in written
            )
            other = path if change == "cut" else path.with_suffix(".other")
            other.write_bytes(content)
            other.replace(path)
        elif change == "look":
            lines = [followed["step"] for followed in follower.read()]
            shown = lines if follower.has_begun_anew else shown + lines
            assert shown == written
            assert list(follower.read()) == []


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (
            [4.1, 128, 447, 1548, 2421] + [3500.0] * 60 + [3400.0] * 15,
            (4.1, 3400.0),
        ),  # within the first steps
        ([4.0] * 40 + [9.0] * 40, (4.0, 9.0)),
        ([0.3, 2.0, 1.9, 2.1] + [2.0] * 76, None),  # the first batch was an easy one
        ([4.0, 90.0] + [3.0] * 78, None),  # it came back
    ],
)
def test_a_loss_that_ran_away_is_known(
    losses: list[float], expected: tuple[float, float] | None
) -> None:
    totals = Totals()
    totals.add([{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)])
    ran = runaway(totals)
    assert (ran and (ran["first"], ran["last"])) == expected


def test_a_report_of_another_version_is_refused_and_named(tmp_path: Path) -> None:
    newer = REPORT_VERSION + 1
    (tmp_path / metrics.REPORT).write_text(json.dumps({"schema_version": newer}))
    with pytest.raises(EnvironmentFault, match=rf"report\.json: schema_version is {newer}, this"):
        read_report(tmp_path)


def test_a_list_of_runs_parses_only_the_lines_that_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of thousands of runs is asked for often, and most lines of their numbers do not matter to it."""
    write_run(tmp_path / "run", 3000)
    expected = [line for line in metrics.read_metrics(tmp_path / "run") if "loss" in line][-1]
    parsed = list[bytes]()
    parse = jsonl.parse

    def counted(line: bytes) -> jsonl.Line | None:
        parsed.append(line)
        return parse(line)

    monkeypatch.setattr(jsonl, "parse", counted)
    shown = facts(tmp_path / "run")
    assert (shown["step"], shown["loss"]) == (3000, expected["loss"])
    assert shown["evaluation"]["eval_loss"] > 0
    # All evaluations, as the best of them is looked for, and next to none of the 3,000 steps.
    assert len([line for line in parsed if b'"loss"' in line]) < 10
    assert len(parsed) < 100


def test_a_list_and_the_pages_say_the_numbers_of_the_checkpoint_that_a_user_gets(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir, 60)
    lowest = min(
        filter(metrics.is_evaluation, metrics.read_metrics(run_dir)), key=itemgetter("eval_loss")
    )

    def said() -> dict[str, Any]:
        listed = facts(run_dir)["evaluation"]
        assert listed == read_run(run_dir).of_best, "one function for both"
        return dict(listed)

    assert said() == lowest
    # The verdict is on a checkpoint, whatever was evaluated later.
    best = {"eval_loss": 0.125, "eval_exact_match": 0.97}
    verdict = run_dir / metrics.VERDICT
    verdict.write_text(json.dumps({"step": 7, "best": best}))
    assert said().items() >= {"step": 7, **best}.items()
    verdict.write_text("{")
    assert said() == lowest
    # The link decides which that is; its own state says its value where no line does.
    folder = run_dir / "checkpoints" / "step-000070"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(
        json.dumps({"step": 70, "best_step": 70, "best_value": 0.25})
    )
    link = run_dir / "checkpoints" / "best"
    link.unlink(missing_ok=True)
    link.symlink_to("step-000070")
    assert said() == {"step": 70, "eval_loss": 0.25}
    with (run_dir / metrics.METRICS).open("a") as lines:
        for step, loss in ((80, 0.5), (81, 0.75)):
            lines.write(json.dumps({"step": step, "epoch": 1.0, "eval_loss": loss}) + "\n")
    link.unlink()
    link.symlink_to("step-000080")
    assert (said()["step"], said()["eval_loss"]) == (80, 0.5)
    # Of a run that holds nothing out, what somebody measured by hand.
    steps = [line for line in metrics.read_metrics(run_dir) if not metrics.is_evaluation(line)]
    (run_dir / metrics.METRICS).write_text("".join(json.dumps(line) + "\n" for line in steps))
    (folder / "state.json").unlink()
    by_hand = {"metrics": {"eval_accuracy": 0.5}, "checkpoint": "best", "data": "some/other.tsv"}
    (run_dir / metrics.EVALUATION).write_text(json.dumps(by_hand))
    assert said() == {"step": 80, "data": "some/other.tsv", "eval_accuracy": 0.5}
    shown = hero(read_run(run_dir))
    assert shown is not None
    assert (shown.value.after, shown.sure.partition(";")[0]) == ("50 %", "at step 80, on other.tsv")


@pytest.mark.parametrize(
    ("names", "best_by", "main"),
    [
        ("loss perplexity token_accuracy", "eval_loss", "eval_loss"),
        ("loss perplexity token_accuracy exact_match", "eval_loss", "eval_exact_match"),
        ("loss perplexity exact_match rouge", "eval_rouge", "eval_rouge"),
        ("loss accuracy f1_macro precision", "eval_loss", "eval_f1_macro"),
        ("loss accuracy f1_macro f1 precision", "eval_loss", "eval_f1"),
        ("loss accuracy f1_macro precision", "eval_accuracy", "eval_accuracy"),
        ("loss token_accuracy divergence", "eval_loss", "eval_divergence"),
        ("reward exact_match", "eval_exact_match", "eval_reward"),
        ("loss accuracy f1_macro precision", "eval_f1_macro", "eval_f1_macro"),
        ("loss mae pearson spearman", None, "eval_spearman"),
        ("reward_std reward exact_match reward/graded", "eval_reward", "eval_reward"),
        ("loss margin reward_chosen accuracy kl", "eval_loss", "eval_accuracy"),
        ("loss/a.jsonl", "eval_loss", None),
        ("", "eval_loss", None),
    ],
)
def test_an_evaluation_is_about_one_metric(names: str, best_by: str, main: str | None) -> None:
    evaluation = {"step": 3, **{f"eval_{name}": 0.5 for name in names.split()}}
    assert main_metric(evaluation, best_by) == main


def test_a_metric_that_could_not_be_computed_is_passed_over() -> None:
    evaluation = {"step": 3, "eval_loss": 0.5, "eval_exact_match": None}
    assert main_metric(evaluation, "eval_loss") == "eval_loss"
    assert main_metric(evaluation, "eval_exact_match") == "eval_loss"
