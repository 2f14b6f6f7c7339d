"""A pod that Kubernetes starts again however it ends must not end while nothing is left to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune.base.signals import STAY

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_final_end_waits_to_be_stopped(tmp_path: Path, stop: signal.Signals) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: a/b\nlearning_rat: 1\n")
    command = [
        sys.executable,
        "-m",
        "kubetune.agent",
        str(tmp_path / "run"),
        "--config",
        str(config),
    ]
    environ = {**os.environ, STAY: "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stderr is not None
        lines: list[str] = []
        while not lines or "waiting to be stopped" not in lines[-1]:
            line = agent.stderr.readline()
            assert line, f"the agent ended instead of staying: {lines}"
            lines.append(line)
        assert "exit code 2 is final" in lines[-1]
        agent.send_signal(stop)
        assert agent.wait(timeout=60) == 2


def test_without_the_variable_it_ends(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kubetune.agent",
        str(tmp_path / "run"),
        "--config",
        str(tmp_path / "missing.yaml"),
    ]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60).returncode == 2
