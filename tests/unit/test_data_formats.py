"""Every shape of record, and what is said about those that have none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kubetune.data.column_names import ANSWERS, PROMPTS
from kubetune.data.reading.examples import Chat, Example, Labelled, Pair, Text
from kubetune.data.reading.formats import convert, detect, read
from kubetune.data.reading.record_problems import Problems

USER = {"role": "user", "content": "Ping"}
ANSWER = {"role": "assistant", "content": "Pong"}
PART = {"type": "text"}
TAGGED = {"role": "user", "content": "<image>Ping"}
SPOKEN = {"system": "Be short.", "history": [["Ping", "Pong"]]}
SYSTEM = {"role": "system", "content": "Be short."}
TOOL = {"type": "function", "function": {"name": "add"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"messages": [USER, ANSWER]}, Chat((USER, ANSWER))),
        ({"messages": '[{"role": "user", "content": "Ping"}]'}, Chat((USER,))),
        ({"messages": [USER | {"name": None}]}, Chat((USER,))),
        (
            {"messages": [USER | {"content": [PART | {"text": "Pi"}, PART | {"text": "ng"}]}]},
            Chat((USER,)),
        ),
        ({"messages": [USER, ANSWER], "tools": '[{"name": "add"}]'}, Chat((USER, ANSWER), (TOOL,))),
        ({"prompt": "Hello", "completion": " World"}, Pair("Hello", " World")),
        ({"input": "Hello", "output": " World"}, Pair("Hello", " World")),
        ({"prompt": "", "completion": "World"}, Pair("", "World")),
        ({"prompt": [USER], "completion": [ANSWER]}, Chat((USER, ANSWER), context=1)),
        ({"text": "Hello"}, Text("Hello")),
        ({"text": "Hello", "label": 3}, Text("Hello")),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Ping"},
                    {"from": "gpt", "value": "Pong"},
                ]
            },
            Chat((USER, ANSWER)),
        ),
        (
            {"conversations": [{"from": "human", "value": "Ping"}], "system": "Be short."},
            Chat((SYSTEM, USER)),
        ),
        ({"conversations": [USER, ANSWER]}, Chat((USER, ANSWER))),
        ({"conversations": [{"from": "prompter", "value": "Ping"}]}, Chat((USER,))),
        (
            {
                "conversations": [
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "1"},
                ]
            },
            Chat(
                (
                    {"role": "assistant", "content": "", "tool_calls": [CALL]},
                    {"role": "tool", "content": "1"},
                )
            ),
        ),
        ({"instruction": "Ping", "input": "", "output": "Pong"}, Chat((USER, ANSWER))),
        (
            {"instruction": "Pi", "input": "ng", "output": "Pong", **SPOKEN},
            Chat((SYSTEM, USER, ANSWER, {"role": "user", "content": "Pi\nng"}, ANSWER)),
        ),
        ({"system": "Be short.", "messages": [USER, ANSWER]}, Chat((SYSTEM, USER, ANSWER))),
        ({"system_prompt": "Be short.", "messages": [USER, ANSWER]}, Chat((SYSTEM, USER, ANSWER))),
        ({"system": "Be short.", "messages": [SYSTEM, USER, ANSWER]}, Chat((SYSTEM, USER, ANSWER))),
        (
            {"system": "Be short.", "prompt": [USER], "completion": [ANSWER]},
            Chat((SYSTEM, USER, ANSWER), context=2),
        ),
        (
            {
                "system": "Be short.",
                "conversations": [{"from": "system", "value": "Be short."}, USER],
            },
            Chat((SYSTEM, USER)),
        ),
        ({"messages": None, "text": "Hello"}, Text("Hello")),
        ({"messages": [{"from": "human", "value": "Ping"}, ANSWER]}, Chat((USER, ANSWER))),
        ({"sentence": "good", "label": "1"}, Labelled("good", None, 1)),
        ({"sentence": "good", "label": "pos "}, Labelled("good", None, "pos")),
        ({"sentence": "good", "label": True}, Labelled("good", None, "True")),
        ({"sentence": "good", "label": [True, False]}, Labelled("good", None, (1.0, 0.0))),
        (
            {"premise": "a", "hypothesis": "b", "label": "entailment"},
            Labelled("a", "b", "entailment"),
        ),
    ],
)
def test_shapes(value: dict[str, Any], expected: Example) -> None:
    assert convert(value) == expected


ASKED = "`{}` as the user's message, `{}` as the assistant's"
RENAMED = "`{}` as the prompt, plain text, `{}` as its completion"


@pytest.mark.parametrize(
    ("value", "expected", "taken"),
    [
        ({"query": "Ping", "response": "Pong"}, Chat((USER, ANSWER)), ASKED),
        ({"problem": "Ping", "solution": "Pong"}, Chat((USER, ANSWER)), ASKED),
        ({"question": "Ping", "answer": "Pong"}, Chat((USER, ANSWER)), ASKED),
        ({"instruction": "Ping", "response": "Pong"}, Chat((USER, ANSWER)), ASKED),
        ({"input": "a", "output": "b"}, Pair("a", "b"), RENAMED),
        ({"prompt": "a", "response": "b"}, Pair("a", "b"), "`response` as its completion"),
        ({"prompt": "a", "completion": "b"}, Pair("a", "b"), ""),
        ({"instruction": "Ping", "output": "Pong"}, Chat((USER, ANSWER)), ""),
        ({"text": "b or c: c", "question": "b or c", "answer": "c"}, Text("b or c: c"), ""),
    ],
)
def test_questions_and_answers_are_read_by_their_names_and_it_is_said(
    value: dict[str, Any], expected: Example, taken: str
) -> None:
    reading = read(value)
    assert reading.example == expected
    assert reading.taken == taken.format(*value)
    with_system = {**value, "system": "Be short.", "history": [["Ping", "Pong"]]}
    if isinstance(expected, Chat):
        assert convert(with_system) == Chat((SYSTEM, USER, ANSWER, USER, ANSWER))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            {"question": "a", "query": "b", "answer": "c"},
            "has `question` and `query`; expected one",
        ),
        (
            {"query": "a", "response": "b", "answer": "c"},
            "has `answer` and `response`; expected one",
        ),
        ({"query": "a", "response": 3}, "response is 3; expected a text"),
        ({"query": "a", "response": ""}, "response is empty"),
        ({"query": "a", "response": "b", "rejected_response": "c"}, "is preference data"),
        ({"query": "a", "response": "b", "label": False}, "is preference data"),
    ],
)
def test_questions_that_can_be_read_in_two_ways_are_refused(
    value: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        convert(value)


def test_the_forms_of_openai_responses_are_read() -> None:
    developer = {"role": "developer", "content": "Be short."}
    parts = {"role": "user", "content": [{"type": "input_text", "text": "Ping"}]}
    answer = {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Pong", "annotations": []}],
    }
    reading = read({"messages": [developer, parts, answer]})
    assert reading.example == Chat((SYSTEM, USER, ANSWER))
    assert reading.taken == "`developer` as the system's message"
    picture = {"type": "input_image", "image_url": "a.png"}
    seen = convert({"messages": [USER | {"content": [picture, *parts["content"]]}, ANSWER]})
    assert isinstance(seen, Chat)
    assert seen.images == ("a.png",)


@pytest.mark.parametrize(
    ("value", "contents", "images"),
    [
        ({"messages": [TAGGED, ANSWER], "images": ["a.jpg"]}, ["<image>Ping", "Pong"], ("a.jpg",)),
        ({"messages": [USER, ANSWER], "images": ["a.jpg"]}, ["<image>\nPing", "Pong"], ("a.jpg",)),
        (
            {"messages": [SYSTEM, USER, ANSWER, TAGGED], "images": ["a", "b", "c"]},
            ["Be short.", "<image>\n<image>\nPing", "Pong", "<image>Ping"],
            ("a", "b", "c"),
        ),
        (
            {
                "messages": [USER | {"content": [{"type": "image"}, PART | {"text": "Ping"}]}],
                "images": "a",
            },
            None,
            ("a",),
        ),
        (
            {"conversations": [{"from": "human", "value": "Ping<image>"}], "image": "a"},
            ["Ping<image>"],
            ("a",),
        ),
        (
            {"instruction": "Ping", "output": "Pong", "images": ["a"]},
            ["<image>\nPing", "Pong"],
            ("a",),
        ),
        (
            {"prompt": "Ping", "completion": "Pong", "images": ["a"]},
            ["<image>\nPing", "Pong"],
            ("a",),
        ),
        (
            {"prompt": [USER], "completion": [ANSWER], "images": ["a"]},
            ["<image>\nPing", "Pong"],
            ("a",),
        ),
        ({"messages": [TAGGED]}, ["<image>Ping"], ()),  # text about HTML
        ({"messages": [USER], "images": None, "image": None}, ["Ping"], ()),
        ({"messages": [USER], "images": []}, ["Ping"], ()),
    ],
)
def test_images_and_the_places_of_their_tags(
    value: dict[str, Any], contents: Any, images: Any
) -> None:
    chat = convert(value)
    assert isinstance(chat, Chat)
    assert [message["content"] for message in chat.messages] == (contents or ["<image>Ping"])
    assert chat.images == images
    assert chat.context == ("prompt" in value)


def test_arguments_of_tool_calls_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = convert(
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    )
    assert isinstance(chat, Chat)
    assert chat.messages[1]["tool_calls"] == [CALL | {"id": "1"}]
    tool_call = {"id": "1", "type": "function", "function": {"arguments": {}, "name": "f"}}
    chat = convert({"messages": [USER, {"role": "assistant", "tool_calls": [tool_call]}]})
    assert json.dumps(chat.messages[1]["tool_calls"]) == json.dumps(
        [tool_call]
    )  # in the order of keys that it has
    assert chat.messages[1]["content"] == ""


def test_named_columns_and_a_named_shape() -> None:
    columns = {"prompt": "question", "completion": "answer"}
    assert convert({"question": "Ping", "answer": "Pong"}, columns=columns) == Pair("Ping", "Pong")
    assert convert({"text": "a", "messages": [USER]}, "text") == Text("a")
    assert detect({"text": "a", "label": 1}, kind="labelled") == "labelled"
    for columns in ({"text": "body"}, {"sytem": "body"}):
        with pytest.raises(
            ValueError,
            match=r"is read as messages, in which `data.train.columns` has no `(text|sytem)` \('body'",
        ):
            convert({"body": "a", "messages": [USER]}, columns=columns)
    assert convert({"w": 1, "messages": [USER]}, columns={"weight": "w"}) == Chat((USER,))
    with pytest.raises(
        ValueError,
        match=r"no column 'question', which data\.train\.columns gives for 'prompt'; has the keys",
    ):
        convert({"q": "Ping"}, columns={"prompt": "question"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "has no keys; expected `messages`"),
        ({"question": 1}, "has the keys `question`; expected `messages`"),
        ({"foo": "Who is it?", "bar": "It is me."}, "`--columns prompt=foo completion=bar`"),
        ({"best": "It is me.", "prompt": "Who is it?"}, "`--columns completion=best`"),
        ({"messages": []}, "messages is empty; expected at least one message"),
        ({"messages": "x"}, 'messages is "x", which is not JSON'),
        ({"messages": {}}, "messages is {}; expected a list"),
        ({"messages": ["x"]}, r'messages\[0\] is "x"; expected an object'),
        (
            {"messages": [{"content": "x"}]},
            r"messages\[0\].role is missing; expected system, user, assistant or tool",
        ),
        (
            {"messages": [USER, USER | {"role": "bot"}]},
            r'messages\[1\].role is "bot"; expected system, user',
        ),
        (
            {"messages": [USER, USER | {"role": "developer"}]},
            r"expected system, user, assistant or tool; write system, or make it the first message",
        ),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is missing"),
        ({"messages": [USER | {"content": 1}]}, r"messages\[0\].content is 1; expected a text"),
        ({"messages": [USER | {"content": " "}]}, r"messages\[0\].content is empty"),
        ({"messages": [USER | {"content": "a\0"}]}, "NUL character at position 1"),
        ({"messages": [USER | {"content": "\ud800"}]}, "half a surrogate pair at position 0"),
        (
            {"messages": [USER | {"content": [{"type": "video"}]}]},
            r"content\[0\] is .*expected \{\"type\": \"text\"",
        ),
        (
            {"messages": [TAGGED, TAGGED], "images": ["a"]},
            "has 2 <image> tags for 1 images; expected one tag for each",
        ),
        ({"messages": [TAGGED], "images": []}, "has 1 <image> tags for 0 images"),
        ({"messages": [ANSWER], "images": ["a"]}, "no message of the user to put more into"),
        ({"messages": [TAGGED], "images": [3]}, r"images\[0\] is 3; expected a text"),
        ({"messages": [TAGGED], "images": 3}, "images is 3; expected a list of paths"),
        (
            {"messages": [TAGGED], "images": {"a": 1}},
            r'images\[0\] is {"a": 1}; expected a path, an address',
        ),
        (
            {"messages": [ANSWER | {"tool_calls": [{"x": 1}]}]},
            r"tool_calls\[0\] is .* expected an object with",
        ),
        (
            {"messages": [ANSWER | {"tool_calls": [{"name": "f", "arguments": "{"}]}]},
            r"arguments is .* not JSON",
        ),
        (
            {"messages": [ANSWER | {"tool_calls": [{"name": "f", "args": {"a": 1}}]}]},
            "no `arguments`, and `args` in",
        ),
        (
            {
                "messages": [
                    ANSWER | {"tool_calls": [{"id": "a", "name": "f"}]},
                    {"role": "tool", "tool_call_id": "b", "content": "1"},
                ]
            },
            r'messages\[1\]\.tool_call_id is "b", which no call before it has; "a" is',
        ),
        (
            {"messages": [ANSWER | {"tool_calls": [{"name": "f", "arguments": "3"}]}]},
            "arguments is 3; expected an obj",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "refusal": "No."}]},
            "content is missing, beside a `ref",
        ),
        ({"messages": [USER], "tools": [1]}, "tools is .*; expected a list of function schemas"),
        ({"prompt": "a", "completion": None}, "`completion` is null"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": [], "completion": [ANSWER]}, "prompt is empty"),
        ({"text": 3}, "text is 3; expected a text"),
        (
            {"conversations": [{"from": "dog", "value": "x"}]},
            r'conversations\[0\].from is "dog"; expected human, gpt',
        ),
        (
            {"conversations": [{"value": "x"}]},
            r"conversations\[0\] is .* expected an object with `from` and `value`",
        ),
        ({"instruction": "", "output": "x"}, "instruction is empty"),
        ({"instruction": "x", "output": ""}, "output is empty"),
        (
            {"instruction": "x", "output": "y", "history": [["a"]]},
            r"history\[0\] is .*expected \[question, answer\]",
        ),
        (
            {"system": "S", "messages": [SYSTEM, USER, ANSWER]},
            "has `system` and another message of the system",
        ),
        (
            {"system": "S", "system_prompt": "T", "messages": [USER]},
            "has `system` and another message of the system",
        ),
        (
            {"system": "S", "conversations": [SYSTEM, USER]},
            "has `system` and another message of the system",
        ),
        (
            {"system": "S", "prompt": "a", "completion": "b"},
            "has `system` beside a prompt that is plain text",
        ),
        (
            {"tools": [{"name": "f"}], "prompt": "a", "completion": "b"},
            "has `tools` beside a prompt that is plain text",
        ),
        (
            {"history": [["a", "b"]], "prompt": "a", "completion": "b"},
            "has a `history` besides its prompt",
        ),
        ({"instruction": "x", "output": "y", "history": 5}, "history is 5; expected a list"),
        (
            {"messages": [USER], "videos": ["a.mp4"]},
            "has `videos`, which kubetune cannot show to a model",
        ),
        (
            {"messages": [USER], "image": "a", "images": ["b"]},
            "has images in `images` and `image`; expected",
        ),
        (
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
            r"chat_template_kwargs is",
        ),
        (
            {"sentence": "x", "label": {"a": 1}},
            "expected a class by name or number, a list of them, or a number",
        ),
        ({"sentence": "x", "label": [True, 2]}, "expected a list of names or numbers of classes"),
        ({"sentence": "x", "label": "  "}, 'label is ""'),
    ],
)
def test_what_has_no_shape_is_explained(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(value)


GOOD = {"role": "assistant", "content": "Good"}
BAD = {"role": "assistant", "content": "Bad"}


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ({"prompt": "Ping", "chosen": "Good", "rejected": "Bad"}, {"completion": "chosen"}),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {"completion": "chosen"}),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {"messages": "chosen"}),
        (
            {"messages": [USER], "chosen": "Good", "rejected": "Bad"},
            {"completion": "chosen", "prompt": "messages"},
        ),
        (
            {
                "conversations": [{"from": "human", "value": "Ping"}],
                "chosen": {"from": "gpt", "value": "Good"},
                "rejected": {"from": "gpt", "value": "Bad"},
            },
            {"completion": "chosen", "prompt": "conversations"},
        ),
        (
            {"instruction": "Ping", "input": "", "chosen": "Good", "rejected": "Bad"},
            {"output": "chosen"},
        ),
        (
            {"chosen_messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
            {"messages": "chosen_messages"},
        ),
        ({"messages": [USER, GOOD], "rejected_response": "Bad"}, None),
        ({"messages": [USER, BAD], "label": False}, None),
        ({"prompt": "Ping", "completion": "Bad", "label": 0}, None),
        ({"conversations": [USER, BAD], "kto_tag": "false"}, None),
        ({"prompt": "Ping", "completion": "Bad", "label": "0"}, None),
        ({"instruction": "Ping", "output": "Bad", "kto_tag": False}, None),
    ],
)
def test_preferences_are_no_answers_to_learn(
    value: dict[str, Any], advice: dict[str, str] | None
) -> None:
    with pytest.raises(
        ValueError, match=r"preference data.*`task: causal_lm` would train the bad answers"
    ) as error:
        convert(value)
    if advice is None:
        assert "columns" not in str(error.value)
        return
    assert ", ".join(f"{name}: {column}" for name, column in advice.items()) in str(error.value)
    example, unused = read(value, columns=advice)[:2]
    assert "Good" in str(example)
    assert "Bad" not in str(example)
    assert [key.partition("_")[0] for key in unused] == ["rejected"]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_bad_answer_is_known_by_any_name_of_an_answer(prompt: str, answer: str) -> None:
    for verdict in ({"label": False}, {"kto_tag": "false"}, {"label": 0}):
        with pytest.raises(ValueError, match="is preference data"):
            convert({prompt: "2+2?", answer: "5", **verdict})


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_good_ones_of_two_answers_are_trained_as_advised(prompt: str) -> None:
    pair = {prompt: "2+2?", "chosen": "4", "rejected": "5"}
    with pytest.raises(ValueError, match="is preference data") as error:
        convert(pair)
    advised = re.findall(r"`columns: \{(.*)\}`", str(error.value))[0]
    columns = dict(words.split(": ") for words in advised.split(", "))
    example = read(pair, columns=columns).example
    assert "2+2?" in str(example)
    assert "4" in str(example)


def test_good_answers_and_texts_keep_their_verdicts_to_themselves() -> None:
    assert read({"messages": [USER, GOOD], "label": True})[1] == ("label",)
    assert read({"text": "Hello", "label": False})[1] == ("label",)
    assert read({"text": "Hello", "label": False}, kind="text", shape="text")[1] == ("label",)
    assert read({"sentence": "Hello", "label": 0, "chosen": "x"}, kind="labelled")[1] == ("chosen",)


@pytest.mark.parametrize(
    ("value", "unused"),
    [
        ({"messages": [USER, ANSWER], "id": 7, "source": "", "meta": {}}, ("id",)),
        (
            {"messages": [USER | {"name": "Bo", "time": 3}, ANSWER]},
            ("messages[].name", "messages[].time"),
        ),
        (
            {"messages": [USER | {"content": [PART | {"text": "Ping", "cache": 1}]}]},
            ("messages[].content[].cache",),
        ),
        ({"prompt": "Ping", "input": "more", "completion": "Pong"}, ("input",)),
        ({"text": "Hello", "system": "Be short."}, ("system",)),
        ({"instruction": "Say Ping", "output": "Pong", "text": "Say Ping: Pong"}, ("text",)),
        ({"sentence": "x", "label": 1, "idx": 0}, ("idx",)),
        ({"prompt": "Ping", "completion": "Pong", "weight": "1.0", "train": True}, ()),
        (
            {"prompt": "Ping", "completion": "Pong", "weight": "0.5", "loss": 1.0},
            ("loss", "weight"),
        ),
        (
            {
                "messages": [
                    USER
                    | {
                        "content": [
                            {"type": "image_url", "image_url": {"url": "a", "detail": "low"}}
                        ]
                    }
                ]
            },
            ("messages[].content[].image_url.detail",),
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Ping", "weight": None, "markdown": "x"}
                ]
            },
            ("messages[].markdown",),
        ),
    ],
)
def test_keys_that_nothing_reads_are_named(value: dict[str, Any], unused: tuple[str, ...]) -> None:
    assert read(value)[1] == unused


def test_a_column_that_takes_the_place_of_another_leaves_that_unused() -> None:
    value = {"question": "Ping", "prompt": "other", "completion": "Pong"}
    assert read(value, columns={"prompt": "question"})[:2] == (Pair("Ping", "Pong"), ("prompt",))


SWITCHES = [
    {"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"loss_weight": 0.0},
    {"loss_scale": 0}, {"loss_mask": 0}, {"trainable": False}, {"weight": 0, "train": False},
]  # fmt: skip


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_answers_that_are_not_to_be_trained(switch: dict[str, Any], key: str) -> None:
    answer = ANSWER if key == "messages" else {"from": "gpt", "value": "Pong"}
    on = {name: not value for name, value in switch.items()}
    off_first = {key: [USER, answer | switch, USER, answer | on], "system": "Be short."}
    assert read(off_first)[:2] == (
        Chat((SYSTEM, USER, ANSWER, USER, ANSWER), not_trained=frozenset({2})),
        (),
    )


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (ANSWER | {"weight": 0.5}, r"messages\[0\].weight is 0.5; expected 0, 1, false or true"),
        (ANSWER | {"loss_weight": 2}, "loss_weight is 2; expected 0, 1"),
        (ANSWER | {"train": "no"}, 'train is "no"; expected 0, 1, false or true'),
        (ANSWER | {"loss": [True, False]}, "loss is .* expected 0, 1, false or true"),
        (
            ANSWER | {"weight": 1, "train": False},
            "says by `weight` and `train` both that it is trained and not",
        ),
        (ANSWER | {"Weight": 0}, r"messages\[0\] has the key 'Weight'; did you mean `weight`"),
        (ANSWER | {"masked": True}, r"messages\[0\].masked is true; write `train: false`"),
        (USER | {"train": True}, "train would have a message of the user trained"),
        (ANSWER | {"train_detail": [{"begin_offset": 0}]}, "train_detail marks parts of a message"),
        (
            ANSWER | {"content": [PART | {"text": "Pong", "train": False}]},
            r"content\[0\] is not to be trained",
        ),
    ],
)
def test_switches_that_cannot_be_kept_are_refused(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        convert({"messages": [message]})


@pytest.mark.parametrize(
    "switch",
    [
        {"weight": 0}, {"loss_weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"train": 0},
        {"weight": "0"}, {"weight": "0.0"}, {"train": "False"}, {"loss": "false"}, {"loss_mask": 0}, {"loss_scale": 0},
        {" Weight": "0 "},
    ],
)  # fmt: skip
def test_a_record_that_is_not_to_be_trained_is_refused(switch: dict[str, Any]) -> None:
    records: list[dict[str, Any]] = [
        {"messages": [USER, GOOD]},
        {"prompt": "Hi", "completion": "Yes"},
        {"text": "Hi"},
    ]
    for record in (*records, {"sentence": "Hi", "label": 1}):
        with pytest.raises(
            ValueError, match=rf"has `{next(iter(switch))}: .*not to be trained, as a whole"
        ):
            convert(record | switch, kind="labelled" if "label" in record else "text")
    with pytest.raises(ValueError, match=r"leave such records out$"):
        convert({"prompt": "Hi", "completion": "Yes", "label": True} | switch, kind="labelled")
    assert read({"messages": [USER, GOOD], "loss": 0.0, "weight": 0.5})[1] == ("loss", "weight")


def test_a_prompt_is_never_trained_and_ms_swifts_loss_is_for_answers_alone() -> None:
    with pytest.raises(ValueError, match=r"prompt\[1\] says that it is trained; a prompt never is"):
        convert({"prompt": [USER, ANSWER | {"weight": 1}, USER], "completion": [ANSWER]})
    assert read({"messages": [USER | {"loss": True}, ANSWER]})[1] == ("messages[].loss",)


ADD = {"name": "add", "parameters": {"type": "object"}}
ADD_TOOL = {"type": "function", "function": ADD}


@pytest.mark.parametrize(
    "tools",
    [
        {"tools": [ADD_TOOL]},
        {"tools": [ADD]},
        {"tools": ADD},
        {"tools": json.dumps([ADD])},
        {"tools": [json.dumps(ADD_TOOL)]},
        {"tools": json.dumps(ADD)},
        {"tools": [{"type": "function", "function": ADD | {"parameters": '{"type": "object"}'}}]},
        {"functions": [ADD]},
        {"functions": json.dumps([ADD]), "tools": ""},
    ],
)
def test_tools_in_every_spelling(tools: dict[str, Any]) -> None:
    assert read({"messages": [USER], **tools})[:2] == (Chat((USER,), (ADD_TOOL,)), ())


def test_openais_older_calls_of_functions() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "add", "arguments": '{"a": 1}'},
    }
    messages = [USER, call, {"role": "function", "name": "add", "content": "1"}]
    assert read({"messages": messages})[:2] == (
        Chat(
            (
                USER,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "name": "add", "content": "1"},
            )
        ),
        ("messages[].name",),
    )


PAGE = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.mark.parametrize("line", re.findall(r"^\{.*\}$", PAGE.read_text("utf-8"), re.MULTILINE))
def test_every_record_of_the_page_is_read_whole(line: str) -> None:
    assert read(json.loads(line))[1] == ()


@pytest.mark.parametrize(
    "switch", ["weight", "train", "training", "loss", "loss_weight", "loss_scale"]
)
def test_a_part_of_an_answer_that_is_not_to_be_trained_is_refused(switch: str) -> None:
    parts = [{"type": "text", "text": "Bad. ", switch: 0}, {"type": "text", "text": "Good."}]
    with pytest.raises(
        ValueError, match=r"messages\[1\].content\[0\] is not to be trained, as a part of a message"
    ):
        convert({"messages": [USER, {"role": "assistant", "content": parts}]})
    whole = [part | {switch: 1} for part in parts]
    assert read({"messages": [USER, {"role": "assistant", "content": whole}]})[1] == ()


@pytest.mark.parametrize("text", ["['joy']", "[ 'joy', 'fear']", "[['joy']]", "['joy' 'fear']"])
def test_a_list_with_the_quotes_of_python_is_named_as_such(text: str) -> None:
    with pytest.raises(ValueError, match=r"has Python's quotes; expected JSON, as `json\.dumps`"):
        convert({"text": "Fine.", "label": text}, "auto", {}, kind="labelled")


def test_lists_with_the_quotes_of_python_are_one_problem(tmp_path: Path) -> None:
    problems = Problems()
    for line, text in enumerate(("['joy']", "['joy', 'fear']", "['fear']"), 2):
        with pytest.raises(ValueError, match="Python's quotes") as error:
            convert({"text": "Fine.", "label": text}, "auto", {}, kind="labelled")
        problems.add(f"{tmp_path}:{line}", str(error.value))
    assert len(problems.sentences()) == 1


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_so_are_messages(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is .*, which has Python's quotes"):
        convert({key: "[{'role': 'user', 'content': 'Hi'}]"}, "auto", {}, kind="text")


@pytest.mark.parametrize("text", ["[joy]", '["joy"', "[it's]"])
def test_what_is_no_list_of_python_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match="which is not JSON"):
        convert({"text": "Fine.", "label": text}, "auto", {}, kind="labelled")
