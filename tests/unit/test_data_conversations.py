"""Conversations whose messages are spelt, split or wrapped in other ways: joined, read, or counted in a finding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli
from kubetune.config.schema import ModelConfig
from kubetune.data.reading.examples import Chat
from kubetune.data.reading.formats import convert, read
from kubetune.data.reading.images import image_of_row
from kubetune.data.reading.readers import read_file
from kubetune.data.reading.record_problems import Problems
from kubetune.data.text.encode import Encoder
from kubetune.data.text.tokenizer import load_tokenizer
from tests import records
from tests.tiny import CHATML, train_tokenizer

CALL = '{"name": "add", "arguments": {"a": 1}}'
USER = {"role": "user", "content": "Ping?"}


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chat(value: dict[str, Any]) -> Chat:
    example = convert(value)
    assert isinstance(example, Chat)
    return example


@pytest.mark.parametrize(
    "value",
    [
        {
            "conversations": [
                {"from": "human", "value": "Ping?"},
                {"from": "gpt", "value": "One moment."},
                {"from": "function_call", "value": CALL},
                {"from": "observation", "value": "3"},
                {"from": "gpt", "value": "It is 3."},
            ]
        },
        {"messages": [USER, say("assistant", "One moment."), say("tool_call", CALL), say("tool_response", "3"),
                      say("assistant", "It is 3.")]},
        {"messages": [USER, say("assistant", "One moment."), {"role": "assistant", "tool_calls": [json.loads(CALL)]},
                      say("tool", "3"), say("assistant", "It is 3.")]},
    ],
    ids=["sharegpt", "ms-swift", "openai"],
)  # fmt: skip
def test_a_text_and_the_call_behind_it_are_one_message(value: dict[str, Any]) -> None:
    example = chat(value)
    assert [message["role"] for message in example.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    asked = example.messages[1]
    assert (asked["content"], asked["tool_calls"][0]["function"]["name"]) == ("One moment.", "add")


def test_calls_behind_each_other_are_one_message() -> None:
    turns = [
        USER,
        *[say("tool_call", CALL)] * 2,
        *[say("tool_response", "3")] * 2,
        say("assistant", "Three."),
    ]
    example = chat({"messages": turns})
    assert [len(message.get("tool_calls", ())) for message in example.messages] == [0, 2, 0, 0, 0]


def test_what_is_trained_otherwise_is_not_joined() -> None:
    turns = [USER, say("assistant", "One moment.", train=False), say("tool_call", CALL)]
    example = chat({"messages": turns})
    assert len(example.messages) == 3
    assert example.not_trained == {1}
    # A prompt ends where the data say.
    prompt = [USER, say("assistant", "One moment.")]
    completion = [{"role": "assistant", "tool_calls": [json.loads(CALL)]}]
    assert chat({"prompt": prompt, "completion": completion}).context == 2
    before = [*prompt, *completion, say("tool", "3")]
    example = chat({"prompt": before, "completion": [say("assistant", "It is 3.")]})
    assert (example.context, len(example.messages)) == (3, 4)


def test_a_call_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match=r"messages\[1\].content is .*not JSON"):
        convert({"messages": [USER, say("tool_call", "add(1)")]})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = CHATML.replace("message.content", "(message.content or '')")
    template = template.replace(
        "{%- for message in messages %}", "{%- for message in messages %}{# <tool_response> #}"
    )
    return train_tokenizer(tmp_path_factory.mktemp("model"), template)


def check(
    values: Sequence[dict[str, Any]], folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    cli.main(["data", "check", str(path), "--model", str(model), "--samples", "0"])
    output = capsys.readouterr()
    return output.out + output.err


ANSWER = say("assistant", "Pong.")
FLAWS = [
    ({"messages": [USER, ANSWER, say("assistant", "And on.")]}, "with two answers in a row"),
    (
        {"messages": [USER, say("assistant", "<think>\nHm.\n</think>\nPong.", reasoning_content="Hm, hm.")]},
        "with thoughts in a field and in the content too",
    ),
    (
        {"messages": [USER, ANSWER, say("tool", "<tool_response>\n3\n</tool_response>"), ANSWER]},
        "with results of tools that begin with a tag that the chat template writes too",
    ),
    ({"prompt": "", "completion": "Pong."}, "with an empty prompt, after no BOS"),
    ({"prompt": "OTHER", "messages": [USER, ANSWER]}, "`prompt` (a text that differs from the others in 1 record)"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "sentence"), FLAWS, ids=[sentence[:24] for _, sentence in FLAWS])
def test_what_the_author_hardly_meant_is_a_warning(
    value: dict[str, Any],
    sentence: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = check([value], tmp_path, model, capsys)
    assert sentence in output
    assert "warning: " in output


def test_a_prompt_that_the_messages_hold_is_none(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = check([records.ULTRACHAT, records.NO_ROBOTS], tmp_path, model, capsys)
    assert "differs" not in output
    assert "prompt × 2" in output


def test_an_image_may_be_an_address_of_a_file() -> None:
    assert image_of_row("/data/a.jsonl", "file:///images/a%20b.png") == Path("/images/a b.png")


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.jsonl"])
def test_carriage_returns_alone_are_refused_with_what_converts_them(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(b"one\rtwo\rthree")
    problems = Problems()
    assert list(read_file(file, problems)) == []
    assert f"`tr '\\r' '\\n' < {name} > lines-{name}`" in problems.first[0]
    # What it says to paste makes lines; those of Windows are read as they are.
    file.write_bytes(b"text\r\none\r\n")
    problems = Problems()
    list(read_file(file, problems))
    assert "carriage returns only" not in str(problems.first)


def test_a_prompt_in_messages_is_not_called_plain_text() -> None:
    assert (
        read({"input": [USER], "output": "Pong."}).taken
        == "`input` as the prompt, in messages, `output` as its completion"
    )


QWEN3 = Path(__file__).parents[2].parent / "shared" / "data" / "tokenizers" / "qwen3"


@pytest.mark.skipif(not QWEN3.is_dir(), reason="the real tokenizers are not on this machine")
def test_a_text_and_its_call_are_one_turn_to_qwen3(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    turns = [
        {"from": "human", "value": "Ping?"},
        {"from": "gpt", "value": "One moment."},
        {"from": "function_call", "value": CALL},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "It is 3."},
    ]
    example = chat({"conversations": turns})
    row = Encoder(load_tokenizer(ModelConfig(path=str(QWEN3)), tmp_path)).encode(example)
    theirs = AutoTokenizer.from_pretrained(QWEN3)
    assert row.ids == theirs.apply_chat_template(
        list(example.messages), tokenize=True, return_dict=False
    )
    trained = theirs.decode(
        [id for id, is_trained in zip(row.ids, row.trained, strict=True) if is_trained]
    )
    assert trained.count("<|im_end|>") == 2, "one end for each turn"
    assert "One moment.\n<tool_call>" in trained
