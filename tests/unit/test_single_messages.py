"""Rows that are one message of a conversation each, and conversations in one text: none is learned for what it is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli
from kubetune.config.load import load_config
from kubetune.data.reading.formats import read
from kubetune.data.single_messages import speaker_column


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said_by(verb: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(list(verb))
    output = capsys.readouterr()
    return code, " ".join((output.out + output.err).split())


def written(rows: Sequence[dict[str, Any]]) -> None:
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tree() -> list[dict[str, Any]]:
    """Return rows as OpenAssistant has them."""
    rows = []
    for n in range(40):
        rows.append(
            {
                "message_id": f"m{n}",
                "parent_id": f"m{n - 1}" if n % 2 else None,
                "text": f"I say {n} of them here.",
                "role": ("prompter", "assistant")[n % 2],
                "rank": 0,
                "labels": {"name": ["spam"], "value": [0.5]},
            }
        )
    return rows


def test_check_and_init_refuse_rows_of_a_tree_alike(capsys: pytest.CaptureFixture[str]) -> None:
    written(tree())
    sentence = "has `role: prompter` beside `text`, so it is one message of a conversation"
    for verb in (["data", "check", "d.jsonl"], ["init", "d.jsonl", "-o", "run.yaml"]):
        code, text = said_by(verb, capsys)
        assert code == 2
        assert sentence in text
        assert "Next:" not in text
        assert "`kubetune data convert FILE -o train.jsonl`" in text
    assert cli.main(["data", "convert", "d.jsonl", "-o", "train.jsonl"]) == 0
    assert cli.main(["init", "train.jsonl", "-o", "run.yaml"]) == 0
    # Whoever wants the messages by themselves says so.
    assert cli.main(["init", "d.jsonl", "-o", "own.yaml", "--columns", "text=text"]) == 0


@pytest.mark.parametrize("text", ["text", "content", "utterance", "message"])
@pytest.mark.parametrize(
    ("name", "speakers"),
    [
        ("role", ("user", "assistant")),
        ("speaker", ("Human", "GPT")),
        ("sender", ("customer", "agent")),
        ("author_role", ("user", "system")),
        ("from", ("human", "bot")),
    ],
)
def test_init_learns_no_single_message(
    text: str, name: str, speakers: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"conversation_id": n // 2, name: speakers[n % 2], text: f"I say {n} of them here."}
        for n in range(60)
    ]
    written(rows)
    code, message = said_by(["init", "d.jsonl", "-o", "run.yaml"], capsys)
    assert code == 2
    assert f"has `{name}: {speakers[0]}` beside `{text}`" in message
    assert f"`columns: {{text: {text}}}` to learn each message by itself" in message
    assert not Path("run.yaml").exists()
    assert cli.main(["init", "d.jsonl", "-o", "run.yaml", "--columns", f"text={text}"]) == 0


def test_messages_with_a_class_of_their_own_are_classified() -> None:
    rows = [
        {"text": f"I say {n} of them.", "speaker": ("user", "bot")[n % 2], "intent": ("buy", "ask", "go")[n % 3]}
        for n in range(60)
    ]  # fmt: skip
    written(rows)
    assert cli.main(["init", "d.jsonl", "-o", "run.yaml"]) == 0
    assert load_config(Path("run.yaml")).data.train[0].columns == {"label": "intent"}


@pytest.mark.parametrize(
    "value",
    [
        {"text": "All the world is a stage.", "speaker": "Jaques"},
        {"text": "We look for somebody.", "role": "agent"},
        {"text": "A job.", "role": {"name": "user"}},
        {"question": "Who is it?", "answer": "He is.", "role": "user"},
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "He."}], "from": "user"},
    ],
)  # fmt: skip
def test_other_records_are_read_as_before(value: dict[str, Any]) -> None:
    assert read(value).example


def test_whose_role_is_a_speaker() -> None:
    assert speaker_column({"text": "x", "role": "agent", "thread_id": 3}) == "role"
    assert speaker_column({"text": "x", "role": "agent"}) == ""
    assert speaker_column({"text": "x", "user_role": "Assistant"}) == "user_role"
    assert speaker_column({"text": "x", "controller": "user"}) == ""


@pytest.mark.parametrize(
    "talk",
    [
        "USER: Who is {n}?\n\nASSISTANT: He is. <|endoftext|>",
        "### Human: Who is {n}?\n### Assistant: He is.",
        "Customer: Where is {n}?\nAgent: Here it is.\nCustomer: Thanks.",
        "[user]: Who is {n}?\n[bot]: He is.",
    ],
)
@pytest.mark.parametrize("name", ["chat", "dialog", "transcript_text", "log"])
def test_a_conversation_in_one_text_is_no_answer(
    name: str, talk: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written(
        [
            {"system": "SYSTEM: You are of help.", name: talk.replace("{n}", str(n))}
            for n in range(30)
        ]
    )
    for verb in (["data", "check", "d.jsonl"], ["init", "d.jsonl", "-o", "run.yaml"]):
        code, text = said_by(verb, capsys)
        assert code == 2
        assert f"`{name}` is a conversation written as one text" in text
        assert "completion=" not in text
        assert "not JSON" not in text


def test_a_number_of_turns_is_no_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [{"answer": f"It is {n}.", "rank": n} for n in range(3)]
    written([{"prompt": f"What is {n}?", "answers": answers, "turns": 1} for n in range(30)])
    code, text = said_by(["data", "check", "d.jsonl"], capsys)
    assert code == 2
    assert "has 3 `answers` to one prompt; expected two, `chosen` and `rejected`" in text
    code, text = said_by(["init", "d.jsonl", "-o", "run.yaml"], capsys)
    assert code == 2
    assert "messages is" not in text
