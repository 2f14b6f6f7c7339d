"""A sweep on the stand-in cluster: trials as runs of their own, three at once, paused, promoted and told of."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kubetune.config.load import load_config
from kubetune.rundir import metrics
from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk
from tests.cluster.test_operate_training import furnish, model  # noqa: F401 - a fixture

pytest.importorskip("optuna")
SHARED = {"size": "1Gi", "access": "ReadWriteMany"}
PLAIN = {
    "compute.nodes": 1,
    "training.max_steps": 12,
    "training.eval_steps": 2,
    "training.save_steps": 100,
    "training.learning_rate": 1e-2,
    "kubernetes.storage": {"cache": SHARED, "outputs": SHARED},
}
SWEEP = ("sweep", "run.yaml", "training.learning_rate=1e-4,1e-3,1e-2", "--sampler", "grid", "--pruner", "asha")


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path, model: Path) -> Desk:  # noqa: F811
    return furnish(cluster, tmp_path, model, **PLAIN)


@pytest.mark.slow
def test_three_trials_at_once_of_which_the_promoted_is_the_plain_run(desk: Desk) -> None:
    command = desk.command(*SWEEP, "--cluster", "--parallel", "3", "-o", "found")
    done = subprocess.run(
        command, cwd=desk.folder, env=desk.environment(), capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "volumes    fit-cache, fit-outputs, of all trials" in done.stdout
    facts = json.loads(desk.quick("sweep", "status", "found", "--json").stdout)
    values = {trial["number"]: trial["values"]["training.learning_rate"] for trial in facts["trials"]}
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
    assert [event["step"] for event in metrics.read_events(best) if event["event"] == "exit"] == [2, 4, 12]
    # The winner's run file is a run's, which submitted as it is comes to the same numbers to the last bit.
    config = load_config(desk.folder / "found" / "best.yaml", environ={})
    assert config.learning_rate == 1e-2
    (desk.folder / "found" / "best.yaml").rename(desk.folder / "best.yaml")
    subprocess.run(
        desk.command("submit", "best.yaml", "--wait"), cwd=desk.folder, env=desk.environment(), check=True, timeout=600
    )
    assert (best / "metrics.jsonl").read_bytes() == (place / "fit" / "metrics.jsonl").read_bytes()
