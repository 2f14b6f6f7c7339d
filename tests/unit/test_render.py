"""The folder that `kubetune render` writes: for kustomize, for git, and safe for the files of others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubetune.cli import main
from tests.golden.manifests import CASES, FOLDER, rendered

FULL = FOLDER / "full.yaml"


def by_name(text: str) -> dict[tuple[str, str], Any]:
    return {(o["kind"], o["metadata"]["name"]): o for o in yaml.load_all(text, yaml.CSafeLoader)}


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed (Debian: kubernetes-client)"
)
@pytest.mark.parametrize("case", ["minimal", "job", "trainjob"])
def test_kustomize_builds_the_same_objects(case: str, tmp_path: Path) -> None:
    file, *words = CASES[case]
    assert main(["render", str(FOLDER / file), *words, "-o", str(tmp_path)]) == 0
    built = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert by_name(built) == by_name(rendered(case))


def test_a_folder_can_be_rendered_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are no longer needed go, files of others stay, and none of them is ever overwritten."""
    assert main(["render", str(FULL), "-o", str(tmp_path)]) == 0
    before = {path.name for path in tmp_path.iterdir()}
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    assert (
        main(
            [
                "render",
                str(FULL),
                "--kind",
                "jobset",
                "kubernetes.tensorboard=false",
                "-o",
                str(tmp_path),
            ]
        )
        == 0
    )
    after = {path.name for path in tmp_path.iterdir()}
    gone = {"job-support-bot.yaml", "service-support-bot.yaml", "job-support-bot-preprocess.yaml"}
    gone |= {"deployment-support-bot-tensorboard.yaml", "service-support-bot-tensorboard.yaml"}
    assert before - after == gone
    assert after - before == {"jobset-support-bot.yaml", "mine.yaml"}
    assert "jobset-support-bot.yaml" in (tmp_path / "kustomization.yaml").read_text()
    (tmp_path / "jobset-support-bot.yaml").write_text("precious: true\n")
    capsys.readouterr()
    assert main(["render", str(FULL), "--kind", "jobset", "-o", str(tmp_path)]) == 2
    assert "jobset-support-bot.yaml was not made by kubetune and" in capsys.readouterr().err
    assert (tmp_path / "jobset-support-bot.yaml").read_text() == "precious: true\n"
