"""Warnings of references that a measure compares in part, and of answers that an evaluation cuts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli
from kubetune.cli.local.demo import EMBEDDED
from kubetune.config.load import load_config
from kubetune.config.schema import ModelConfig
from kubetune.data.findings.checked import prepare_run
from kubetune.data.inspect.known_findings import known_findings
from kubetune.data.text.tokenizer import load_tokenizer

MODEL = str(EMBEDDED / "model")
IN_PART = "numeric reads only the last number of"


def run_file(answers: list[str], **settings: Any) -> str:
    """Write a run of four rows for each answer to evaluate, and return the name of its file."""
    rows = [{"prompt": f"What is {n}?", "completion": text} for n, text in enumerate(answers * 4)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    # JSON is YAML.
    run = {
        "model": {"path": MODEL, "chat_template": "chatml"},
        "data": {"train": "rows.jsonl", "eval": "rows.jsonl", "max_length": 128},
        "lora": True,
        "output": "out",
        **settings,
    }
    Path("run.yaml").write_text(json.dumps(run))
    return "run.yaml"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    cli.main([*words])
    written = capsys.readouterr()
    return " ".join((written.out + written.err).split())


@pytest.mark.parametrize("verb", [("data", "check"), ("plan",)])
def test_numbers_that_are_read_in_part_are_counted(
    capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
) -> None:
    answers = ["between 3 and 10", "7/10", "14:30", "5"]
    file = run_file(answers, evaluation={"generate": {"metric": "numeric"}})
    output = told(capsys, *verb, file)
    assert f"{IN_PART} 4 of 16 references of eval, such as 'between 3 and 10'" in output
    assert "4 of 16 references of eval are no single number, such as '14:30'" in output
    file = run_file(["7/10", "5"], evaluation={"generate": {"metric": "numeric"}})
    assert "numeric" not in told(capsys, "data", "check", file)


def test_rewards_that_read_right_answers_in_part_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = run_file(["x=4, y=5", "5"], task="grpo", rewards=["numeric"])
    output = told(capsys, "data", "check", file)
    assert f"rewards: {IN_PART} 4 of 8 right answers of train, such as 'x=4, y=5'" in output


def test_answers_longer_than_those_of_the_model_may_be_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "one two three four five six seven"
    tokens = len(load_tokenizer(ModelConfig(path=MODEL)).encode_text(long))
    generate = {"metric": "exact_match", "max_new_tokens": tokens - 1}
    output = told(capsys, "data", "check", run_file(["a", long], evaluation={"generate": generate}))
    assert f"max_new_tokens is {tokens - 1}, and 4 of 8 answers of eval are longer" in output
    assert f"Set it to {tokens}" in output
    generate["max_new_tokens"] = tokens
    file = run_file(["a", long], evaluation={"generate": generate})
    assert "max_new_tokens" not in told(capsys, "data", "check", file)


def test_warnings_keep_no_run_from_training_and_are_told_of_prepared_rows() -> None:
    generate = {"metric": "numeric", "max_new_tokens": 1}
    config = load_config(Path(run_file(["between 3 and 10"], evaluation={"generate": generate})))
    tokenizer = prepare_run(config).tokenizer
    findings = known_findings(config, {}, lambda: tokenizer)
    assert findings is not None
    assert {"numbers_in_part", "cut_answers"} <= {finding.id for finding in findings}
