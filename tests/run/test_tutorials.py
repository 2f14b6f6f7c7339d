"""The tutorials' commands, typed one after the other, with a tiny model in the folder that the page's hub id names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architectures import save_model

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"


def blocks(page: str, language: str) -> list[str]:
    """Return the page's blocks of one language."""
    text = (PAGES / page).read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "data", "words"),
    [
        (
            "first-model.md",
            "faq.csv",
            {"data check": "⟦Monday to Friday, nine to five.", "export": "my-model"},
        ),
        (
            "first-preference-run.md",
            "pairs.csv",
            {"init": "preference", "data check": "Gladly: Monday to Friday", "train": "accuracy"},
        ),
    ],
)
def test_each_command_of_a_tutorial_works(
    page: str, data: str, words: dict[str, str], tmp_path: Path
) -> None:
    save_model(tmp_path / "Qwen" / "Qwen3-0.6B", "qwen3")
    (rows,) = blocks(page, "csv")
    (tmp_path / data).write_text(rows)
    printed = {}
    for line in "".join(blocks(page, "sh")).splitlines():
        program, *arguments = shlex.split(line)
        assert program == "kubetune"
        done = subprocess.run(
            [sys.executable, "-m", "kubetune", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        printed[line] = done.stdout + done.stderr
        assert done.returncode == 0, f"{line}\n{printed[line]}"
    for command, text in words.items():
        (output,) = [p for line, p in printed.items() if line.startswith(f"kubetune {command}")]
        assert text in output, output
