"""What is recorded of the machine that a run is on: its parts, its load, and the code that was checked out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kubetune.base import processes
from kubetune.base.cpu import processor
from kubetune.rundir import machine, metrics
from kubetune.rundir.tracking.mlflow_tracker import machine_load


def test_a_checkout_with_changes_is_dirty(tmp_path: Path) -> None:
    assert (machine.git_commit(tmp_path), machine.git_is_dirty(tmp_path)) == (None, None)
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "run.yaml").write_text("a")
    for words in (["init", "-q"], ["add", "run.yaml"], [*name, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    assert len(machine.git_commit(tmp_path) or "") == 40
    assert machine.git_is_dirty(tmp_path) is False
    (tmp_path / "run.yaml").write_text("b")
    assert machine.git_is_dirty(tmp_path) is True


def test_a_command_is_told_as_it_was_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/bin/kubetune", "train", "my run.yaml", "lora.r=4"])
    assert processes.command_line() == "kubetune train 'my run.yaml' lora.r=4"
    monkeypatch.setattr(sys, "argv", ["/x/kubetune/agent.py", "/outputs/a"])
    assert processes.command_line() == "python -m kubetune.agent /outputs/a"
    monkeypatch.setenv(processes.COMMAND, "kubetune train run.yaml")
    assert machine.describe()["command"] == "kubetune train run.yaml"


def test_names_of_parts_are_read_where_the_system_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: AMD EPYC 9654\nflags\t: fpu avx512f avx2 avx512_vnni\n"
    )
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    assert machine.describe()["cpu"] == "AMD EPYC 9654"
    assert processor.instructions() == ["avx2", "avx512f"]
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "none")
    assert processor.model_name()
    assert processor.instructions() == []
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version:  gcc 12.2.0"
    (tmp_path / "version").write_text(line)
    assert machine.gpu_driver(tmp_path / "version") == "570.86.15"
    assert machine.gpu_driver(tmp_path / "none") is None


def test_load_is_measured_between_two_moments(tmp_path: Path) -> None:
    load = machine.Load(tmp_path)
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    measured = load.measure()
    assert 0 < measured["cpu_percent"] <= 100.1
    assert 0 < measured["memory_bytes"] < 2**60
    assert measured["disk_free_bytes"] > 0
    numbers = machine_load(
        {**measured, "gpus": [{"index": 1, "percent": 70, "memory_bytes": 5e6, "watts": 300.0}]}
    )
    assert numbers["system/cpu_utilization_percentage"] == measured["cpu_percent"]
    assert numbers["system/gpu_1_memory_usage_megabytes"] == 5.0


def test_looks_are_kept_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_FIRST_SECONDS", 0.01)
    heard: list[dict[str, Any]] = []
    with machine.recorded(tmp_path, lambda: 7, heard.append):
        until = time.monotonic() + 30
        while not metrics.read_lines(tmp_path / metrics.LOAD) and time.monotonic() < until:
            pass
    lines = (tmp_path / metrics.LOAD).read_text().splitlines()
    assert lines
    assert all(json.loads(line)["step"] == 7 for line in lines)
    assert [load["memory_bytes"] for load in heard] == [
        json.loads(line)["memory_bytes"] for line in lines
    ]
