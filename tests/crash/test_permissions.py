"""What this user may not read or write ends with exit code 2 or 3 and the path, never with a traceback or a loss."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.config.resolved import as_yaml
from kubetune.rundir import checkpoints
from tests import toy

_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 24, 1, 2
_libc = ctypes.CDLL(None)


def obey_permissions() -> None:
    """Let the permission bits of files count for root too, between fork and exec."""
    for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def run(module: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder, preexec_fn=obey_permissions, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """Return a folder that nobody may enter, and a file that nobody may read."""
    folder = tmp_path / "closed"
    folder.mkdir()
    (folder / "train.jsonl").touch()
    (tmp_path / "secret.jsonl").touch(0o000)
    folder.chmod(0o000)
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["train", "run.yaml", "output=closed/run"],
            errors.USER,
            "closed is not yours to write; give a place that is",
        ),
        pytest.param(
            ["train", "run.yaml", "output=closed"],
            errors.USER,
            "closed is not yours to write; give a place that is",
            marks=pytest.mark.slow,
        ),
        (
            ["train", "run.yaml", "output=out", "data.train=secret.jsonl"],
            errors.USER,
            "secret.jsonl cannot be read",
        ),
        (
            ["data", "check", "run.yaml", "data.train=closed/train.jsonl"],
            errors.ENVIRONMENT,
            "closed/train.jsonl: Perm",
        ),
        pytest.param(
            ["report", "closed/run"],
            errors.ENVIRONMENT,
            "closed/run: Permission denied",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_light_verbs(
    toy_inputs: Path, tmp_path: Path, closed: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "run.yaml").write_text(as_yaml(toy.make_config(toy_inputs)))
    done = run("kubetune", *arguments, folder=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "mode"), [("logs", 0o500), ("checkpoints", 0o500), ("metrics.jsonl", 0o400)]
)
def test_a_run_that_may_not_go_on_loses_nothing(
    toy_inputs: Path, tmp_path: Path, what: str, mode: int
) -> None:
    run_dir = toy.make_run(tmp_path / "run", toy.make_config(toy_inputs))
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": "signal 15:step:5"}) == [errors.PREEMPTED]
    target = run_dir / what
    before = (run_dir / what).stat().st_mode
    target.chmod(mode)
    done = run("kubetune.agent", str(run_dir), folder=tmp_path)
    output = done.stdout + done.stderr
    assert (done.returncode, "Traceback" in output) == (errors.ENVIRONMENT, False)
    assert "Permission denied" in output
    assert str(target) in output
    assert checkpoints.newest_step(run_dir) == 5
    target.chmod(before)
    assert toy.train(run_dir) == [0]
