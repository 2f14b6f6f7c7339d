"""Sweeps of real runs: pauses that change no bit, and the whole on this machine, stopped and killed on its way."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kubetune import errors
from kubetune.base.files import read_object
from kubetune.library.sweep.sweep_record import Record, read_record, read_search
from kubetune.plugins.diagnostics.resume_proof import facts_of, first_difference
from kubetune.rundir import metrics
from kubetune.rundir.status import progress
from kubetune.training import step_digest
from tests import toy
from tests.ranks import wait_until

SWEEP = ("training.learning_rate=1e-3,3e-3,1e-2", "--sampler", "grid", "--pruner", "asha")
SECONDS = 600.0


def test_a_run_that_paused_goes_on_bit_by_bit(inputs: Path, tmp_path: Path) -> None:
    """Paused at the first evaluation from a step on, with its whole schedule; then again at a later one."""

    def train(name: str, pause: int | None) -> Path:
        changes = {"max_steps": 9, "pause_at_step": pause}
        run_dir = toy.make_run(
            tmp_path / name, toy.make_config(inputs, changes, lora={"r": 4, "dropout": 0.1})
        )
        digests = run_dir / "step_digests"
        digests.mkdir(exist_ok=True)
        assert toy.train(run_dir, environ={step_digest.FOLDER: str(digests)}) == [errors.OK]
        return run_dir

    plain = train("plain", None)
    for pause, step in ((2, 3), (6, 6), (None, 9)):
        paused = train("paused", pause)
        status = read_object(paused / "logs" / "rank-0.exit.json")
        assert (status["code"], status["step"], status["error"]) == (
            0,
            step,
            "Paused" if pause else None,
        )
        assert metrics.read_metrics(paused)[-1]["step"] == step
        assert (paused / metrics.REPORT).exists() == (pause is None)
        best = min(
            (line for line in metrics.read_metrics(paused) if "eval_loss" in line),
            key=lambda x: x["eval_loss"],
        )
        assert progress(paused)["best"] == {"step": best["step"], "value": best["eval_loss"]}
    assert first_difference(facts_of(plain), facts_of(paused)) is None
    assert toy.digests(paused) == toy.digests(plain)


def start(folder: Path, *argv: str) -> subprocess.Popen[bytes]:
    with (folder / "out").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "kubetune", *argv],
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def drive(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    return start(folder, "sweep", "run.yaml", *SWEEP, "-o", "found", *more)


def run_file(folder: Path, inputs: Path) -> Path:
    config = toy.make_config(inputs, {"max_steps": 12, "eval_steps": 2, "save_steps": 100})
    text = json.loads(config.model_dump_json(exclude_unset=True))
    path = folder / "run.yaml"
    path.write_text(json.dumps({**text, "compute": {"gpus_per_node": 0}}))
    return path


def wait_for(folder: Path, test: Callable[[Record], object]) -> None:
    wait_until(lambda: bool(test(read_record(folder / "found"))), SECONDS)


def runs_of(process: subprocess.Popen[bytes], module: str) -> list[psutil.Process]:
    directories = []
    for below in psutil.Process(process.pid).children(recursive=True):
        try:
            if module in below.cmdline():
                directories.append(below)
        except psutil.Error:
            continue
    return directories


@pytest.mark.slow
def test_a_sweep_goes_on_after_kills_and_its_winner_is_the_plain_run(
    inputs: Path, tmp_path: Path
) -> None:
    """A rank is killed, then the driver, and the next driver is asked to stop: nothing is lost, and no bit changes."""
    pytest.importorskip("optuna")
    run_file(tmp_path, inputs)
    driver = drive(tmp_path)
    wait_until(lambda: bool(runs_of(driver, "kubetune.worker")), SECONDS)
    runs_of(driver, "kubetune.worker")[0].kill()
    wait_for(
        tmp_path, lambda record: record.trials[0].rung > 0
    )  # it was started again, and promoted
    children = runs_of(driver, "kubetune.library.child")
    driver.kill()
    driver.wait()
    psutil.wait_procs(children, timeout=SECONDS)
    assert not [child for child in children if child.is_running()], "a trial outlived its driver"

    second = drive(tmp_path)
    wait_for(
        tmp_path,
        lambda record: (
            len(record.trials) > 1 and any(run.state == "running" for run in record.runs)
        ),
    )
    wait_until(lambda: bool(runs_of(second, "kubetune.worker")), SECONDS)
    other = start(tmp_path, "sweep", "run.yaml", *SWEEP, "-o", "found")
    assert other.wait(SECONDS) == errors.ENVIRONMENT  # it has a driver
    second.send_signal(signal.SIGTERM)
    assert second.wait(SECONDS) == errors.PREEMPTED
    assert "repeat the command to continue" in (tmp_path / "out").read_text()

    assert drive(tmp_path).wait(SECONDS) == errors.OK, (tmp_path / "out").read_text()
    record = read_record(tmp_path / "found")
    best = record.ranked(greater=False)[0]
    assert best.values == {"training.learning_rate": "1e-2"}
    assert {trial.state for trial in record.trials} <= {"done", "pruned"}
    assert len(record.trials) == 3
    assert read_search(tmp_path / "found").rungs == (1, 3, 9)
    assert (tmp_path / "found" / "report.html").read_text().count('<path class="trial ') == 3
    plain = start(tmp_path, "train", "found/best.yaml", "output=plain")
    assert plain.wait(SECONDS) == errors.OK
    assert toy.digests(tmp_path / "plain") == toy.digests(
        tmp_path / "found" / "trials" / best.runs[0].name
    )


@pytest.mark.slow
def test_two_trials_at_once_share_the_machine(inputs: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    run_file(tmp_path, inputs)
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [
        sys.executable,
        "-m",
        "kubetune",
        "sweep",
        "run.yaml",
        "lora.r=2,4",
        "lora.dropout=0,0.1",
    ]
    argv = [*command, "--sampler", "grid", "--parallel", "2", "--budget", "3h", "-o", "found"]
    done = subprocess.run(
        argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(tmp_path / "found")
    assert [trial.state for trial in record.trials] == ["done"] * 4
    spans = [
        [metrics.read_events(tmp_path / "found" / "trials" / run.name)[i]["time"] for i in (0, -1)]
        for run in record.runs
    ]
    assert any(span[0] < other[0] < span[1] for span in spans for other in spans)
    assert record.importance is None
    page = (tmp_path / "found" / "report.html").read_text()
    assert "Too few trials: 4 done, at least 10 are needed" in page


@pytest.mark.slow
def test_the_demos_learning_rate_is_found_in_a_range_of_four_decades(tmp_path: Path) -> None:
    """By the words that the example begins with. The demo has 4e-3, found by trying."""
    pytest.importorskip("optuna")
    example = Path(__file__).parents[2] / "examples" / "sweep.yaml"
    words = next(
        line for line in example.read_text().splitlines() if "kubetune sweep examples" in line
    )
    argv = [
        str(example) if word.startswith("examples/") else word
        for word in shlex.split(words.strip("# "))[1:]
    ]
    assert "training.learning_rate=log(1e-5,1e-1)" in argv
    search = start(tmp_path, *argv, "-o", "found")
    assert search.wait(2 * SECONDS) == errors.OK, (tmp_path / "out").read_text()
    record = read_record(tmp_path / "found")
    best = record.ranked(greater=False)[0]
    assert 8e-4 < float(best.values["training.learning_rate"]) < 2e-2
    assert {trial.state for trial in record.trials} == {"done", "pruned"}
    trained = sum(run.step for run in record.runs)
    assert trained < 75 * len(record.trials), "no trial was stopped early"
