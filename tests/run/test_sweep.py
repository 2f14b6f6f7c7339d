"""Sweeps of real runs: pauses that change no bit, and the whole on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kubetune.base.files import read_object
from kubetune.rundir import metrics
from kubetune.rundir.exit_status import read_exit_status
from kubetune.rundir.status import progress
from tests import toy


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))


def test_a_run_that_paused_goes_on_bit_by_bit(inputs: Path, tmp_path: Path) -> None:
    """Paused at the first evaluation from a step on, with its whole schedule; then again at a later one."""
    plain = toy.finished(tmp_path / "plain", toy.make_config(inputs, {"max_steps": 9}, lora={"r": 4, "dropout": 0.1}))
    paused = tmp_path / "paused"
    for pause, step in ((2, 3), (6, 6), (None, 9)):
        config = toy.make_config(inputs, {"max_steps": 9, "pause_at_step": pause}, lora={"r": 4, "dropout": 0.1})
        toy.finished(paused, config)
        said = read_object(paused / "logs" / "rank-0.exit.json")
        assert (said["code"], said["step"], said["error"]) == (0, step, "Paused" if pause else None)
        assert metrics.read_metrics(paused)[-1]["step"] == step
        assert (paused / metrics.REPORT).exists() == (pause is None)
        best = min((line for line in metrics.read_metrics(paused) if "eval_loss" in line), key=lambda x: x["eval_loss"])
        assert progress(paused)["best"] == {"step": best["step"], "value": best["eval_loss"]}
    assert toy.digests(paused) == toy.digests(plain)
    assert read_exit_status(paused) is None  # ranks without an agent
