"""What prepares the data is killed, stopped, refused or slow: it is said in words, and the next start works."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.base import locks, processes, reminders
from kubetune.base.signals import Relay
from kubetune.data.findings import prepare_worker
from kubetune.rundir import exit_status
from kubetune.supervisor.place import read_place
from kubetune.supervisor.supervise import supervise
from kubetune.training import worker
from kubetune.training.start import data_preparation
from tests import toy
from tests.ranks import started, wait_all, wait_until

BEFORE_RANKS, OF_THE_ONLY_RANK = "before ranks exist", "of the only rank"


@pytest.fixture
def run_dir(toy_inputs: Path, tmp_path: Path) -> Path:
    config = toy.make_config(
        toy_inputs, data={"cache": str(tmp_path / "cache")}, compute={"processes": 2}
    )
    return toy.make_run(tmp_path / "run", config, 2)


@pytest.mark.parametrize(
    ("where", "fault", "code", "words"),
    [
        (BEFORE_RANKS, "signal 9", -signal.SIGKILL, ""),
        (BEFORE_RANKS, "error 28", errors.ENVIRONMENT, "No space left on device"),
        (
            OF_THE_ONLY_RANK,
            "signal 9",
            errors.ENVIRONMENT,
            "the process that prepares the data was killed",
        ),
        (OF_THE_ONLY_RANK, "error 28", errors.ENVIRONMENT, "No space left on device"),
    ],
)
def test_what_ends_preparing_is_told_and_nothing_is_kept(
    run_dir: Path, tmp_path: Path, where: str, fault: str, code: int, words: str
) -> None:
    main: Any = prepare_worker.main if where == BEFORE_RANKS else worker.main
    with started(
        main, 1, [str(run_dir)], environ={"KUBETUNE_FAULT": f"{fault}:prepare:1"}
    ) as ranks:
        assert wait_all(ranks) == [code]
    log = toy.log_of(run_dir)
    assert words in log
    assert "Traceback" not in log
    assert "this is a bug" not in log
    assert not list((tmp_path / "cache").glob("prepared/*/manifest.json"))
    if code > 0:
        assert words in exit_status.read_rank_exit_statuses(run_dir)[0].reason
    with started(prepare_worker.main, 1, [str(run_dir)]) as ranks:
        assert wait_all(ranks) == [errors.OK]


@pytest.mark.slow
def test_a_stopped_process_that_prepares_is_told_of_by_the_agent(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reminders, "PATIENT_SECONDS", 0.5)
    monkeypatch.setenv("KUBETUNE_FAULT", "signal 19:prepare:1")
    before = processes.children(os.getpid())
    codes = []
    log = ""
    agent = threading.Thread(
        target=lambda: codes.append(supervise(run_dir, read_place(run_dir), Relay()))
    )
    agent.start()

    def stopped() -> list[int]:
        return [
            pid
            for pid in processes.children(os.getpid())
            if pid not in before and toy.is_stopped(pid)
        ]

    wait_until(stopped)
    (pid,) = stopped()
    capfd.readouterr()

    def is_told() -> bool:
        nonlocal log
        log += capfd.readouterr().out
        return "look whether its process is stopped" in log

    wait_until(is_told)
    os.kill(pid, signal.SIGKILL)
    agent.join()
    assert codes == [errors.LOST_PEER]
    monkeypatch.delenv("KUBETUNE_FAULT")
    assert toy.train(run_dir, 2) == [0, 0]


def test_who_waits_for_data_that_another_prepares_says_so_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reminders, "SECONDS", 0.01)
    path = tmp_path / "data.lock"

    def wait() -> None:
        with locks.lock(path, wait=True):
            pass

    waiting = threading.Thread(target=wait)
    with caplog.at_level(logging.INFO), locks.lock(path, wait=True):
        waiting.start()
        holder = f"process {os.getpid()} on "
        wait_until(
            lambda: (
                sum(" has held " in message and holder in message for message in caplog.messages)
                >= 2
            )
        )
    waiting.join()


def test_a_rank_whose_data_are_long_in_coming_says_so(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reminders, "PATIENT_SECONDS", 0.01)
    config = worker.open_run([str(run_dir)], 0)[0]
    caplog.set_level(logging.INFO)
    with data_preparation.Preparation(config, run_dir) as prepared:
        assert prepared.result()[0].train
    assert any("the data have been in preparation for " in message for message in caplog.messages)


def stopped_as_it_forks(run_dir: str) -> int:
    """Be a rank that is asked to stop in the moment in which it has forked the process that prepares."""
    submit = data_preparation.ProcessPoolExecutor.submit

    def submit_and_stop(self: Any, *args: Any) -> Any:
        future = submit(self, *args)
        os.kill(os.getpid(), signal.SIGTERM)
        return future

    data_preparation.ProcessPoolExecutor.submit = submit_and_stop  # type: ignore[method-assign]
    return worker.main([run_dir])


def test_a_stop_while_the_process_that_prepares_is_forked_waits_for_nobody(run_dir: Path) -> None:
    environ = {"KUBETUNE_FAULT": "hang:prepare"}
    with started(stopped_as_it_forks, 1, str(run_dir), environ=environ) as ranks:
        assert wait_all(ranks, 60) == [errors.PREEMPTED]
