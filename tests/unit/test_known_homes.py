"""A place in the home of nobody here, as `~models/qwen` for `~/models/qwen`, is refused in words wherever it stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kubetune import cli
from kubetune.cli.local.demo import EMBEDDED
from kubetune.errors import USER

MODEL = str(EMBEDDED / "model")
FUNCTION = "{file: ~nobody-here/f.py, function: f}"
TYPED = [
    "output=~nobody-here/run", "model=~nobody-here/m", "model.tokenizer=~nobody-here/m", "data.cache=~nobody-here/c",
    "model.chat_template=~nobody-here/t.jinja", "data.train=~nobody-here/a.jsonl", "logging.report_json=~nobody-here/r",
    "data.train=[a.jsonl, ~nobody-here/a.jsonl]", f"task=grpo rewards=[{FUNCTION}]",
    "data.train=[{path: ~nobody-here/a.jsonl}]", "evaluation.benchmarks.tasks_folder=~nobody-here/t",
    "tracking.trackio.dir=~nobody-here/t",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "What is it?", "completion": "It is a cat."}
    Path("a.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    Path("run.yaml").write_text(f"model: {MODEL}\ndata: {{train: a.jsonl}}\n")


@pytest.mark.parametrize("typed", TYPED)
def test_a_run_names_no_home_of_nobody(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    task, _, rest = typed.rpartition("task=grpo ")
    words = [word for word in (task.strip(), rest) if word]
    assert cli.main(["plan", "run.yaml", *words]) == USER
    text = " ".join(capsys.readouterr().err.split())
    assert "~nobody-here/" in text
    assert "is in the home of a user who is not known here; expected ~/… for your own" in text


@pytest.mark.parametrize(
    "command",
    ["data check ~nobody-here/a.jsonl", "init ~nobody-here/a.jsonl", "init a.jsonl --model ~nobody-here/m"],
)  # fmt: skip
def test_a_command_says_that_nothing_is_there(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.split()) == USER
    text = capsys.readouterr().err
    assert "~nobody-here/" in text
    assert "does not exist" in text or "no such folder" in text


def test_other_texts_may_begin_with_a_tilde(capsys: pytest.CaptureFixture[str]) -> None:
    reward = "rewards=[{name: regex, settings: {pattern: ~nobody}}]"
    assert cli.main(["plan", "run.yaml", "task=grpo", reward]) == 0, capsys.readouterr().err
    assert "home of a user" not in capsys.readouterr().err
