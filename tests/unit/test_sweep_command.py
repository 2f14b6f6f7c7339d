"""The command line of sweeps: what it takes, refuses, and says of a folder. Nothing trains."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli, errors
from kubetune.base.locks import lock
from kubetune.cli.local.demo import EMBEDDED
from kubetune.cli.local.sweep import _limit_trials, add_arguments
from kubetune.config.resolved import resolved
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.library.sweep import ranges
from kubetune.library.sweep.sweep_record import (
    LOCK,
    Record,
    Trial,
    TrialRun,
    read_record,
    write_record,
    write_search,
)
from tests.unit.test_sweep import Functions, load, search_of


def test_a_range_that_would_be_dropped_or_drop_another_value_is_refused() -> None:
    words = [
        "lora.r=8,16",
        "lora.r=4",
        "lora={alpha: 8}",
        "training.seed=1,2",
        "data.eval=a,b",
        "lr=1e-3,1e-2",
    ]
    rest, parsed, problems = ranges.split(
        [*words, "compute.processes=1,2"], ["training.learning_rate"]
    )
    assert (rest, [part.key for part in parsed]) == (words[1:3], ["lora.r", "lr"])
    assert [problem.split("; ")[0] for problem in problems] == [
        "override: training.seed: --repeat N trains each setting with N seeds",
        "override: data.eval: trials are compared by these data",
        "override: compute.processes: a sweep sets this itself",
        "override: training.learning_rate: found a value, and a range of training.learning_rate",
        "override: lora.r: found a value, and a range of lora.r",
    ]


def test_trials_are_of_the_run_file_as_it_was_when_the_sweep_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be edited while they train."""
    pytest.importorskip("optuna")
    file = tmp_path / "run.yaml"
    data = EMBEDDED / "data" / "heldout.jsonl"
    (tmp_path / "rows.jsonl").write_bytes(data.read_bytes())
    text = {
        "model": str(EMBEDDED / "model"),
        "data": {"train": "rows.jsonl", "eval": str(data)},
        "lora": {"r": 4},
    }
    file.write_text(json.dumps(text))
    configs: list[Config] = []

    def search(folder: Path, name: str, load: Any, *_: object) -> int:
        file.write_text("model: another")
        configs.extend(load([f"lora.r={rank}"]) for rank in (8, 16))
        return errors.OK

    monkeypatch.setattr("kubetune.library.sweep.start.sweep", search)
    assert cli.main(["sweep", str(file), "lora.r=8,16", "training.max_steps=3"]) == errors.OK
    assert [config.lora.r for config in configs if config.lora] == [8, 16]
    assert {config.data.train[0].path for config in configs} == {str(tmp_path / "rows.jsonl")}
    assert {config.training.max_steps for config in configs} == {3}


def test_another_sweep_in_the_folder_is_refused_by_what_was_typed(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    from kubetune.library.sweep.wishes import require_same

    write_search(tmp_path, search_of("lora.r=8,16"))
    with pytest.raises(ConfigError) as refused:
        require_same(tmp_path, search_of("lora.r=4,8", "training.learning_rate=1e-3..1e-2"))
    problems = refused.value.problems
    assert (
        problems[0]
        == "ranges was lora.r=8,16, now is lora.r=4,8 training.learning_rate=0.001..0.01"
    )
    assert len(problems) == 2


def test_how_a_sweep_stands_is_told_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_search(tmp_path, search_of())
    write_record(
        tmp_path,
        Record([Trial(0, {"lora.r": "8"}, [TrialRun("000", 42, "done", value=1.5)], value=1.5)]),
    )
    assert cli.main(["sweep", "status", str(tmp_path), "--json"]) == errors.OK
    report = json.loads(capsys.readouterr().out)
    assert (report["metric"], report["trials"][0]["values"]) == ("eval_loss", {"lora.r": "8"})


def test_a_sweep_without_its_driver_is_shown_so_and_put_to_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_search(tmp_path, search_of())
    write_record(tmp_path, Record([Trial(0, {"lora.r": "8"}, [TrialRun("000", 42, "running")])]))
    for driver, message in (
        (os.getpid(), ""),
        (99_999_999, "; the process that ran it has ended; repeat the command to continue it"),
    ):
        (tmp_path / LOCK).write_text(f"process {driver} on {socket.gethostname()}\n")
        assert cli.main(["sweep", "status", str(tmp_path)]) == errors.OK
        assert capsys.readouterr().out.endswith(
            f"0 device hours with the start of each trial{message}\n"
        )
    assert cli.main(["sweep", "stop", str(tmp_path)]) == errors.OK
    assert [run.state for run in read_record(tmp_path).runs] == ["waiting"]


def test_a_process_that_does_not_hold_the_sweep_is_not_asked_to_stop(tmp_path: Path) -> None:
    """It may have got the id of a driver that is gone."""
    write_search(tmp_path, search_of())
    command = [sys.executable, "-c", "input()"]
    with (
        lock(tmp_path / LOCK, wait=False),
        subprocess.Popen(command, stdin=subprocess.PIPE) as foreign,
    ):
        (tmp_path / LOCK).write_text(f"process {foreign.pid} on {socket.gethostname()}\n")
        assert cli.main(["sweep", "stop", str(tmp_path)]) == errors.ENVIRONMENT
        assert foreign.poll() is None
        foreign.communicate(b"\n")
    assert foreign.returncode == 0


@pytest.mark.parametrize(
    ("sampler", "words", "wished", "trials"),
    [
        ("grid", ["lora.r=1..3", "lora.dropout=0,0.1"], None, 6),
        ("grid", ["lora.r=1..3", "lora.dropout=0,0.1"], 9, 6),
        ("grid", ["lora.r=1..3", "lora.dropout=0,0.1"], 2, 2),
        ("random", ["lora.r=1..3", "lora.dropout=0,0.1"], None, 6),
        ("tpe", ["lora.r=8,16"], 5, 2),
        ("random", ["lora.r=8,16", "lora.dropout=0.1..0.5"], None, 20),
    ],
)
def test_a_sweep_has_no_more_trials_than_settings(
    sampler: str, words: list[str], wished: int | None, trials: int
) -> None:
    args = argparse.Namespace(sampler=sampler, trials=wished, budget=[])
    _limit_trials(args, ranges.split(words)[1])
    assert args.trials == trials


def test_what_a_sweep_does_not_heed_and_how_few_settings_there_are_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    from kubetune.library.sweep.start import _conclude
    from kubetune.library.sweep.wishes import Wishes, print_head

    search = search_of("lora.r=8,16")
    wishes = Wishes(search.ranges, "eval_loss", False, "random", "none", 1, 0, 2, None, ())
    for more, message in (
        (
            ["output=here", "push=me/it", "logging.before_after=3"],
            "output, push, logging.before_after of the run file",
        ),
        ([], None),
    ):
        searched = replace(search, config=resolved(load(more)))
        print_head(tmp_path, searched, wishes, Functions(search))
        stdout = capsys.readouterr().out
        assert "at most 2 trials, since these ranges have no more settings" in stdout
        assert (f"not used   {message}: each trial has a directory below {tmp_path}" in stdout) is (
            message is not None
        )
        assert "not used" not in stdout or message
    write_search(tmp_path, search)
    trials = [
        Trial(i, {"lora.r": r}, [TrialRun(f"00{i}", 42)], state="failed")
        for i, r in enumerate(["8", "16"])
    ]
    for record, is_said in ((Record(trials[:1]), False), (Record(trials), True)):
        write_record(tmp_path, record)
        _conclude(tmp_path, search, record, lambda: tmp_path)
        assert ("every setting of these ranges was tried" in capsys.readouterr().out) is is_said


def test_what_a_search_cannot_do_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    data = str(EMBEDDED / "data" / "heldout.jsonl")
    training = {"max_steps": 2}
    file.write_text(
        json.dumps(
            {
                "model": str(EMBEDDED / "model"),
                "data": {"train": data, "eval": data},
                "training": training,
            }
        )
    )
    for more, code, message in (
        (["--json"], errors.USER, "--json is for"),
        (["--output", "x"], errors.USER, "-o FOLDER says where all trials go"),
        (["-o", str(file)], errors.USER, "is no folder; give another place"),
    ):
        assert cli.main(["sweep", str(file), "lora.r=2,4", *more]) == code
        assert message in capsys.readouterr().err


def test_actions_take_no_options_that_they_would_ignore(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ("status f --trials 3 --lr 1", "--lr, --trials"),
        ("stop f --json", "--json"),
    ):
        assert cli.main(["sweep", *words.split()]) == errors.USER
        assert message in capsys.readouterr().err


def test_a_cluster_that_cannot_be_asked_is_told_when_a_sweep_is_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no driver is asked to stop, this process having the lock."""
    pytest.importorskip("lightkube")
    write_search(tmp_path, search_of(namespace="here"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        assert cli.main(["sweep", "stop", str(tmp_path)]) == errors.ENVIRONMENT
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "kubeconfig" in capsys.readouterr().err
    assert asked == []


def test_the_words_below_the_help_fit_a_terminal() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert max(map(len, (parser.epilog or "").splitlines())) <= 80
