"""Talking to a run: what belongs to a conversation, what the model is shown of it, and batches of prompts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.cli import main
from kubetune.cli.chat import Conversation, obey
from tests import toy


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was taught conversations."""
    inputs = toy.make_inputs(tmp_path_factory.mktemp("inputs"))
    turns = [{"role": "user", "content": "What is the capital?"}, {"role": "assistant", "content": "Paris"}]
    (inputs / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    config = toy.make_config(inputs, {"num_train_epochs": 3, "eval_steps": 15, "save_steps": 15}, data={"eval": 0.1})
    return toy.finished(inputs / "run", config)


def talk(run_dir: Path, lines: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", str(run_dir), "--max-new-tokens", "8", *words])


def test_a_conversation_grows_by_whole_turns_and_is_forgotten() -> None:
    talked = Conversation("Be brief.", compare=True)
    talked.tuned += [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    roles = [turn["role"] for turn in talked.prompt(talked.tuned, "c", True)]  # type: ignore[index,union-attr]
    assert roles == ["system", "user", "assistant", "user"]
    assert talked.prompt(talked.tuned, "c", False) == "c"
    assert obey("/history", talked) == "user: a\nassistant: b"
    assert obey("/system Speak.", talked) == "system: Speak."
    assert talked.tuned == []
    assert obey("/system", talked) == "no system message"
    assert obey("/reset", talked) == "forgotten"
    assert "/exit" in obey("/what", talked)


@pytest.mark.slow
def test_chat_answers_as_it_was_taught_and_beside_its_base(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(run_dir, "What is the capital?\n/history\n/exit\n", monkeypatch, "--compare") == 0
    said = capsys.readouterr().out
    base, tuned = said.split("base:  ")[1].split("tuned: ")
    assert tuned.splitlines()[0] == "Paris"
    assert "Paris" not in base
    assert "assistant: Paris" in said


@pytest.mark.slow
def test_a_batch_of_prompts_becomes_lines_of_json(run_dir: Path, tmp_path: Path) -> None:
    asked = [{"prompt": "What is the capital?", "id": 7}, {"messages": [{"role": "user", "content": "Hello"}]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    words = ["--file", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"), "--compare"]
    assert main(["generate", str(run_dir), "--max-new-tokens", "8", *words]) == 0
    first, second = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert first == {**asked[0], "answer": "Paris", "base_answer": first["base_answer"]}
    assert second["messages"] == asked[1]["messages"]
    answered = {"messages": [*asked[1]["messages"], {"role": "assistant", "content": "Bye"}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(answered) + "\n")
    assert main(["generate", str(run_dir), "--max-new-tokens", "8", *words]) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text()) == second
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert main(["generate", str(run_dir), *words[:4]]) == errors.USER
