"""A sweep on the stand-in cluster: trials as runs of their own, three at once, paused, promoted and told of."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubetune import errors
from kubetune.config.load import load_config
from kubetune.library.sweep.sweep_record import Record, TrialRun, read_record
from kubetune.rundir import metrics
from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk
from tests.cluster.test_operate_queue import queue
from tests.cluster.test_operate_training import furnish, model  # noqa: F401 - a fixture
from tests.ranks import wait_until

pytest.importorskip("optuna")
SECONDS = 600.0
SHARED = {"size": "1Gi", "access": "ReadWriteMany"}
PLAIN = {
    "compute.nodes": 1,
    "training.max_steps": 12,
    "training.eval_steps": 2,
    "training.save_steps": 100,
    "training.learning_rate": 1e-2,
    "kubernetes.storage": {"cache": SHARED, "outputs": SHARED},
}
SWEEP = (
    "sweep",
    "run.yaml",
    "training.learning_rate=1e-4,1e-3,1e-2",
    "--sampler",
    "grid",
    "--pruner",
    "asha",
)


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path, model: Path) -> Desk:  # noqa: F811
    return furnish(cluster, tmp_path, model, **PLAIN)


@pytest.mark.slow
def test_three_trials_at_once_of_which_the_promoted_is_the_plain_run(desk: Desk) -> None:
    command = desk.command(*SWEEP, "--cluster", "--parallel", "3", "-o", "found")
    done = subprocess.run(
        command,
        cwd=desk.folder,
        env=desk.environment(),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "volumes    fit-cache, fit-outputs, shared by all trials" in done.stdout
    facts = json.loads(desk.quick("sweep", "status", "found", "--json").stdout)
    values = {
        trial["number"]: trial["values"]["training.learning_rate"] for trial in facts["trials"]
    }
    assert sorted(values.values()) == ["1e-2", "1e-3", "1e-4"]
    assert {trial["state"] for trial in facts["trials"]} <= {"done", "pruned"}
    assert values[facts["best"]["number"]] == "1e-2"
    assert facts["device_hours"] > 0
    # Runs like all others, found by their labels; their volumes are one.
    jobs = desk.cluster.find("Job", "kubetune/sweep=fit")
    assert sorted(job["metadata"]["labels"]["kubetune/trial"] for job in jobs) == ["0", "1", "2"]
    starts = [job["metadata"]["creationTimestamp"] for job in jobs]
    assert len(starts) == 3
    place = desk.cluster.claim_folder("fit-outputs")
    best = place / f"fit-{facts['best']['runs'][0]['name']}"
    assert [event["step"] for event in metrics.read_events(best) if event["event"] == "exit"] == [
        2,
        4,
        12,
    ]
    # The winner's run file is a run's, which submitted as it is comes to the same numbers to the last bit.
    config = load_config(desk.folder / "found" / "best.yaml", environ={})
    assert config.learning_rate == 1e-2
    (desk.folder / "found" / "best.yaml").rename(desk.folder / "best.yaml")
    subprocess.run(
        desk.command("submit", "best.yaml", "--wait"),
        cwd=desk.folder,
        env=desk.environment(),
        check=True,
        timeout=600,
    )
    assert (best / "metrics.jsonl").read_bytes() == (place / "fit" / "metrics.jsonl").read_bytes()


def drive(desk: Desk, *more: str) -> subprocess.Popen[bytes]:
    with (desk.folder / "out").open("ab") as out:
        return subprocess.Popen(
            desk.command(*SWEEP, "--cluster", "-o", "found", *more),
            cwd=desk.folder, env=desk.environment(), stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip


def output_of(desk: Desk) -> str:
    return (desk.folder / "out").read_text()


def wait_for(desk: Desk, test: Callable[[Record], object]) -> None:
    wait_until(lambda: bool(test(read_record(desk.folder / "found"))), SECONDS)


def trainers(desk: Desk) -> list[dict[str, Any]]:
    return desk.cluster.find("Pod", "app.kubernetes.io/component=trainer,kubetune/sweep=fit")


def change(desk: Desk, section: str, **values: Any) -> None:
    path = desk.folder / "run.yaml"
    text = yaml.safe_load(path.read_text())
    text[section] |= values
    path.write_text(yaml.safe_dump(text))


@pytest.mark.slow
def test_a_sweep_in_a_queue_is_stopped_with_and_without_its_driver_and_goes_on(desk: Desk) -> None:
    queue(desk)
    change(desk, "kubernetes", queue="gpu")
    change(desk, "training", max_steps=1_000_000, eval_steps=1_000)

    def active() -> bool:
        (workload,) = desk.cluster.find("Workload")
        return bool(workload["spec"]["active"])

    def first() -> TrialRun:
        return read_record(desk.folder / "found").trials[0].runs[0]

    def goes_on() -> subprocess.Popen[bytes]:
        before = first().step if (desk.folder / "found" / "trials.json").exists() else 0
        driver = drive(desk, "--parallel", "1")
        wait_for(desk, lambda record: record.trials and record.trials[0].runs[0].step > before)
        return driver

    driver = goes_on()  # asked to stop by `sweep stop`
    (job,) = desk.cluster.find("Job", "kubetune/sweep=fit")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    assert "was asked to stop" in desk.quick("sweep", "stop", "found").stdout
    assert driver.wait(SECONDS) == errors.PREEMPTED, output_of(desk)
    assert "asked to stop by SIGTERM; repeat the command to continue" in output_of(desk)
    assert not active()
    wait_until(lambda: not trainers(desk), SECONDS)

    driver = goes_on()  # stopped by its label, its driver having been killed
    driver.kill()
    driver.wait()
    assert "running" in desk.quick("sweep", "status", "found").stdout
    assert (
        "no driver that runs here; stopped fit-000" in desk.quick("sweep", "stop", "found").stdout
    )
    assert not active()
    assert "running" not in desk.quick("sweep", "status", "found").stdout
    wait_until(lambda: not trainers(desk), SECONDS)

    driver = goes_on()
    driver.kill()
    driver.wait()
    held = first()
    driver = goes_on()  # it takes up a run that never stopped, and counts no second of it twice
    assert first().earlier_seconds == held.earlier_seconds > 0
    driver.send_signal(signal.SIGINT)
    assert driver.wait(SECONDS) == errors.PREEMPTED, output_of(desk)
    assert not active()


@pytest.mark.slow
def test_the_driver_heeds_a_stop_while_a_trial_is_prepared(desk: Desk) -> None:
    """And looks after the others meanwhile; nothing trains after it."""
    change(desk, "kubernetes", preprocess={"command": ["sleep", "600"]})
    driver = drive(desk, "--parallel", "2")
    desk.cluster.wait_pods("app.kubernetes.io/component=preprocess,kubetune/sweep=fit", 2, SECONDS)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(SECONDS) == errors.PREEMPTED, output_of(desk)
    assert {run.state for run in read_record(desk.folder / "found").runs} == {"waiting"}
    assert trainers(desk) == []
