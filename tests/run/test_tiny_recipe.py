"""The recipe of docs/vision.md for a tiny model that sees works as it is pasted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.cli import main
from tests.pictures import paint

PAGE = Path(__file__).parents[2] / "docs" / "vision.md"


@pytest.mark.slow
def test_a_tiny_model_that_sees_is_made_by_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = PAGE.read_text().partition("### A tiny model to try things")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", code[1]], check=True)
    rows = []
    for number in range(8):
        paint(tmp_path / f"{number}.png", "red", number)
        rows.append({"image": f"{number}.png", "prompt": "What colour?", "completion": "red"})
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["init", "train.jsonl", "--model", "tiny-vlm", "-o", "run.yaml"]
    assert main(words) == errors.OK, capsys.readouterr().err
    assert "vision_language" in Path("run.yaml").read_text()
    assert main(["plan", "run.yaml"]) == errors.OK, capsys.readouterr().err
