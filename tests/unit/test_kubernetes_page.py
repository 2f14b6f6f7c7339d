"""The run files of docs/kubernetes.md: what a reader copies is accepted as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kubetune.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()


def blocks(heading: str, language: str) -> list[str]:
    """Return the code blocks of a language below a heading, up to the next one."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def test_a_cluster_on_this_machine_takes_five_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is accepted without a word of advice; its volumes belong to one node."""
    heading = "A cluster on this machine: kind, minikube, k3d"
    (run,), (commands,) = blocks(heading, "yaml"), blocks(heading, "sh")
    assert len(commands.splitlines()) == 5
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    file = tmp_path / "local.yaml"
    file.write_text(run)
    assert main(["render", str(file)]) == 0
    out, err = capsys.readouterr()
    advice = [line for line in err.splitlines() if ": advice: " in line]
    assert advice == []
    assert "ReadWriteMany" not in out
    assert "imagePullPolicy: IfNotPresent" in out
