"""Which token is a label: found exactly, trained to the end of the turn, and prompts as they are at inference."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetune.config.schema import ModelConfig
from kubetune.data.reading.examples import Chat, Example, Labelled, Pair, Text
from kubetune.data.reading.formats import convert
from kubetune.data.text.encode import Encoded, Encoder
from kubetune.data.text.tokenizer import Tokenizer, load_tokenizer
from kubetune.errors import ModelError
from tests.tiny import train_tokenizer

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "tokenizers"

# Says itself what is generated, but leaves the end of the turn out.
MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content }}{% endgeneration %}{{- '<|im_end|>\\n' }}
    {%- else %}{{- message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

# Drops the thoughts of earlier turns, so no earlier turn reads as it did when it was the last.
FORGETFUL = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and message.thought and loop.last %}{{- '(' + message.thought + ')' }}{% endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

# Writes other texts than it is given.
SHOUTING = """\
{%- for message in messages %}{{- message.role + message.content | upper + '<|im_end|>' }}{%- endfor %}
"""

# Knows no special tokens, and its turns end with a line break only.
SPEECHLESS = (
    "{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}"
    + ("{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}")
)


def make(folder: Path, template: str | None, **settings: Any) -> Encoder:
    return Encoder(
        load_tokenizer(ModelConfig(path=str(train_tokenizer(folder, template)))), **settings
    )


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = tmp_path_factory.mktemp("stable")
    return Encoder(load_tokenizer(ModelConfig(path=str(train_tokenizer(folder)))))


def chat(*contents: str, **extra: Any) -> Chat:
    roles = ("user", "assistant")
    return Chat(
        tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(contents)), **extra
    )


def trained(tokenizer: Tokenizer, row: Encoded) -> list[str]:
    """Return the texts of the runs of labels."""
    runs: list[list[int]] = []
    for i, (id, trained) in enumerate(zip(row.ids, row.trained, strict=True)):
        if trained and (i == 0 or not row.trained[i - 1]):
            runs.append([])
        if trained:
            runs[-1].append(id)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def whole(tokenizer: Tokenizer, row: Encoded) -> str:
    return tokenizer.decode(row.ids, skip_special_tokens=False)


def test_every_answer_of_a_chat_is_trained_with_its_end_and_nothing_else(stable: Encoder) -> None:
    row = stable.encode(chat("Ping", "Pong", "How?", "So."))
    assert trained(stable.tokenizer, row) == ["Pong<|im_end|>", "So.<|im_end|>"]
    assert whole(stable.tokenizer, row) == (
        "<|im_start|>user\nPing<|im_end|>\n<|im_start|>assistant\nPong<|im_end|>\n"
        "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\nSo.<|im_end|>\n"
    )


@pytest.mark.parametrize("template", [MARKED, FORGETFUL], ids=["marked", "forgetful"])
def test_other_templates_give_the_same_labels(template: str, tmp_path: Path) -> None:
    encoder = make(tmp_path, template)
    example = chat("Ping", "Pong", "How?", "So.")
    example.messages[1]["thought"] = "hm"
    row = encoder.encode(example)
    assert trained(encoder.tokenizer, row) == ["Pong<|im_end|>", "So.<|im_end|>"]
    assert "hm" not in whole(encoder.tokenizer, row)


def test_an_answer_that_quotes_the_end_of_a_turn_or_another_message_is_found_whole(
    tmp_path: Path,
) -> None:
    encoder = make(tmp_path, FORGETFUL)
    example = chat("Ping", "a<|im_end|>\n<|im_start|>user\nHow?<|im_end|>b", "How?", "So.")
    example.messages[1]["thought"] = "hm"
    assert (
        trained(encoder.tokenizer, encoder.encode(example))[0]
        == example.messages[1]["content"] + "<|im_end|>"
    )


def test_a_template_that_hides_where_answers_are_is_refused(tmp_path: Path) -> None:
    encoder = make(tmp_path, SHOUTING)
    with pytest.raises(
        ValueError, match=r"messages\[1\] cannot be found exactly: the tokenizer's chat"
    ):
        encoder.encode(chat("Ping", "Pong"))
    assert encoder.encode_batch([chat("Ping", "Pong"), Text("a")])[0] != ""
    everything = make(tmp_path, SHOUTING, train_on="all")
    assert all(everything.encode(chat("PING", "PONG")).trained[1:])


def test_eos_is_added_where_the_template_ends_no_turn(tmp_path: Path) -> None:
    encoder = make(tmp_path, SPEECHLESS)
    row = encoder.encode(chat("Ping", "Pong"))
    assert trained(encoder.tokenizer, row) == [" Pong\n<|im_end|>"]  # one token is " P"
    assert "begins_inside_token" in row.notes
    assert not encoder.encode(chat("Ping", "Pong", "More?")).trained[-1]


def test_context_is_never_trained(stable: Encoder) -> None:
    answer = {"role": "assistant", "content": "d"}
    example = convert({"prompt": list(chat("a", "b", "c").messages), "completion": [answer]})
    assert trained(stable.tokenizer, stable.encode(example)) == ["d<|im_end|>"]


@pytest.mark.parametrize("content", ["Pong", " Pong", "\tPong\n", "é", "'s", "<|im_start|>"])
def test_what_stands_before_an_answer_is_tokenised_as_at_inference(
    content: str, stable: Encoder
) -> None:
    row = stable.encode(chat("Ping", content))
    prompt = stable.tokenizer.encode_prompt(chat("Ping").messages)
    assert row.ids[: len(prompt)] == prompt
    assert row.trained[: len(prompt) + 1] == [False] * len(prompt) + [True]
    assert trained(stable.tokenizer, row) == [content + "<|im_end|>"]
    assert "begins_inside_token" not in row.notes


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)


@given(question=TEXTS, answer=TEXTS)
def test_a_chat_has_the_ids_of_its_text_and_the_prompt_is_a_prefix(
    question: str, answer: str, stable: Encoder
) -> None:
    row = stable.encode(chat(question, answer))
    text = stable.tokenizer.require_chat().render(chat(question, answer).messages)
    prompt = stable.tokenizer.encode_prompt(chat(question).messages)
    assert row.ids == stable.tokenizer.encode_text(text)
    differs = row.ids[: row.trained.index(True)] != prompt
    assert differs is ("begins_inside_token" in row.notes)
    assert "".join(trained(stable.tokenizer, row)).endswith(answer + "<|im_end|>")
    if not answer[0].isspace():
        assert row.ids[: len(prompt)] == prompt


@pytest.mark.parametrize("content", ["\n\nPong", "\n 'Pong'"])
def test_a_token_across_the_border_is_trained_and_said(content: str, stable: Encoder) -> None:
    row = stable.encode(chat("Ping", content))
    text = stable.tokenizer.require_chat().render(chat("Ping", content).messages)
    assert row.ids == stable.tokenizer.encode_text(text)
    assert "begins_inside_token" in row.notes
    assert trained(stable.tokenizer, row)[0].strip("\n") == content.strip("\n") + "<|im_end|>"


@given(prompt=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), completion=TEXTS)
def test_a_pair_loses_nothing_at_its_border(prompt: str, completion: str, stable: Encoder) -> None:
    row = stable.encode(Pair(prompt, completion))
    before = stable.tokenizer.encode_prompt(prompt)
    assert row.ids[: len(before)] == before
    assert whole(stable.tokenizer, row) == prompt + completion + "<|im_end|>"
    if before:
        assert trained(stable.tokenizer, row) == [completion + "<|im_end|>"]


def test_text_is_trained_whole_but_for_its_first_token(stable: Encoder) -> None:
    row = stable.encode(Text("Hello World"))
    assert row.trained == [False] + [True] * (len(row.ids) - 1)
    assert whole(stable.tokenizer, row) == "Hello World<|im_end|>"
    assert whole(stable.tokenizer, stable.encode(Text("Hi<|im_end|>"))) == "Hi<|im_end|>"


def test_train_on_all(tmp_path: Path) -> None:
    encoder = make(tmp_path, MARKED, train_on="all")
    row = encoder.encode(chat("Ping", "Pong"))
    assert trained(encoder.tokenizer, row)[0].endswith(
        "Ping<|im_end|>\n<|im_start|>assistant\nPong<|im_end|>\n"
    )
    assert row.trained[1:].count(False) == 0
    assert row.ids == encoder.tokenizer.encode_text(
        encoder.tokenizer.require_chat().render(chat("Ping", "Pong").messages)
    )
    assert encoder.encode(Pair("Hello", " World")).trained[1:].count(False) == 0


def test_a_batch_equals_its_rows_and_says_what_is_wrong_in_their_places(stable: Encoder) -> None:
    examples: list[Example] = [
        Pair("a", "b"),
        chat("Ping", "Pong"),
        Labelled("a", None, 1),
        chat("a", "b", "c", "d"),
    ]
    rows = stable.encode_batch(examples)
    assert [rows[i] for i in (0, 1, 3)] == [stable.encode(examples[i]) for i in (0, 1, 3)]
    assert isinstance(rows[2], str)
    assert "sequence_classification" in rows[2]


def test_without_a_template_chats_are_refused_and_chatml_can_be_chosen(tmp_path: Path) -> None:
    folder = train_tokenizer(tmp_path, None)
    encoder = Encoder(load_tokenizer(ModelConfig(path=str(folder))))
    with pytest.raises(ModelError, match=r"no chat template.*`model\.chat_template: chatml`"):
        encoder.encode(chat("Ping", "Pong"))
    built_in = Encoder(load_tokenizer(ModelConfig(path=str(folder), chat_template="chatml")))
    row = built_in.encode(chat("Ping", "Pong", "How?", "So."))
    assert trained(built_in.tokenizer, row) == ["Pong<|im_end|>", "So.<|im_end|>"]
    assert row == Encoder(
        load_tokenizer(ModelConfig(path=str(train_tokenizer(tmp_path / "b"))))
    ).encode(chat("Ping", "Pong", "How?", "So."))


@cache
def real(name: str) -> Encoder:
    """Return the encoder of a real tokenizer, whose reading takes a second."""
    if not (SHARED / name).is_dir():
        pytest.skip("the real tokenizers are not on this machine")
    return Encoder(load_tokenizer(ModelConfig(path=str(SHARED / name))))


CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}]
WITH_TOOLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "1 + ü?"},
        {
            "role": "assistant",
            "reasoning_content": "I should add.",
            "content": "",
            "tool_calls": CALLS * 2,
        },
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "<think>\nsure\n</think>\n\nYes."},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
}
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'


def test_qwen25_with_tools() -> None:
    encoder = real("qwen2.5")
    row = encoder.encode(convert(WITH_TOOLS))
    assert trained(encoder.tokenizer, row) == [
        f"{CALL_TEXT}\n{CALL_TEXT}<|im_end|>",
        "It is 3.<|im_end|>",
        "<think>\nsure\n</think>\n\nYes.<|im_end|>",
    ]


def test_qwen3_with_tools_and_thinking() -> None:
    encoder = real("qwen3")
    row = encoder.encode(convert(WITH_TOOLS))
    # Qwen3 drops the reasoning before the last question, so that is what it learns, and what it will see.
    assert trained(encoder.tokenizer, row) == [
        f"{CALL_TEXT}\n{CALL_TEXT}<|im_end|>",
        "It is 3.<|im_end|>",
        "<think>\nsure\n</think>\n\nYes.<|im_end|>",
    ]
    first_round = convert({**WITH_TOOLS, "messages": WITH_TOOLS["messages"][:5]})
    assert trained(encoder.tokenizer, encoder.encode(first_round)) == [
        f"<think>\nI should add.\n</think>\n\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>",
        "<think>\n\n</think>\n\nIt is 3.<|im_end|>",
    ]


def test_reasoning_that_a_template_leaves_out_is_noticed(tmp_path: Path) -> None:
    forgetful = make(tmp_path, FORGETFUL.replace("message.thought", "message.reasoning_content"))
    first, last = (
        {"role": "assistant", "content": "Pong", "reasoning_content": thought}
        for thought in ("Easy.", "Again.")
    )
    question = {"role": "user", "content": "Ping"}
    for messages, dropped in (([question, last], False), ([question, first, question, last], True)):
        (row,) = forgetful.encode_batch([convert({"messages": messages})])
        assert isinstance(row, Encoded)
        assert ("reasoning_dropped" in row.notes) is dropped
    inline = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nPong"}
    (row,) = real("qwen3").encode_batch(
        [convert({"messages": [question, inline, question, inline | {"content": "P"}]})]
    )
    assert isinstance(row, Encoded)
    assert "reasoning_dropped" in row.notes


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_real_prompts_are_prefixes(name: str) -> None:
    encoder = real(name)
    for content in ("Pong", "  Pong", "ü\u0301", "12345"):
        row = encoder.encode(chat("Ping", content))
        prompt = encoder.tokenizer.encode_prompt(chat("Ping").messages)
        assert row.ids[: len(prompt)] == prompt
        assert row.trained[: len(prompt) + 1] == [False] * len(prompt) + [True]


def test_words_change_nothing(tmp_path: Path) -> None:
    by_words, as_a_whole = (make(tmp_path / name, MARKED) for name in ("words", "whole"))
    assert by_words._tokens._words is not None
    as_a_whole._tokens._words = None
    answers = ["Pong", "\n Pong  ", " 1 2", "çà", "", "it's\n\n", "<|im_end|>"]
    examples = [
        chat(question, answer) for question in ["Ping", "Ping \n", "你好"] for answer in answers
    ]
    assert by_words.encode_batch(examples) == as_a_whole.encode_batch(examples)
