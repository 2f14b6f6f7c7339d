"""Every shape of record, and what is said about those that have none."""

from __future__ import annotations

from typing import Any

import pytest

from kubetune.data.formats import Chat, Example, Labelled, Pair, Text, convert, detect

USER, ANSWER = {"role": "user", "content": "Ping"}, {"role": "assistant", "content": "Pong"}
PART = {"type": "text"}
TAGGED = {"role": "user", "content": "<image>Ping"}
SPOKEN = {"system": "Be short.", "history": [["Ping", "Pong"]]}
SYSTEM = {"role": "system", "content": "Be short."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"messages": [USER, ANSWER]}, Chat((USER, ANSWER))),
        ({"messages": '[{"role": "user", "content": "Ping"}]'}, Chat((USER,))),
        ({"messages": [USER | {"name": None}]}, Chat((USER,))),
        ({"messages": [USER | {"content": [PART | {"text": "Pi"}, PART | {"text": "ng"}]}]}, Chat((USER,))),
        ({"messages": [USER, ANSWER], "tools": '[{"name": "add"}]'}, Chat((USER, ANSWER), ({"name": "add"},))),
        ({"prompt": "Hello", "completion": " World"}, Pair("Hello", " World")),
        ({"input": "Hello", "output": " World"}, Pair("Hello", " World")),
        ({"prompt": "", "completion": "World"}, Pair("", "World")),
        ({"prompt": [USER], "completion": [ANSWER]}, Chat((USER, ANSWER), context=1)),
        ({"text": "Hello"}, Text("Hello")),
        ({"text": "Hello", "label": 3}, Text("Hello")),
        (
            {"conversations": [{"from": "human", "value": "Ping"}, {"from": "gpt", "value": "Pong"}]},
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
            Chat(({"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "1"})),
        ),
        ({"instruction": "Ping", "input": "", "output": "Pong"}, Chat((USER, ANSWER))),
        (
            {"instruction": "Pi", "input": "ng", "output": "Pong", **SPOKEN},
            Chat((SYSTEM, USER, ANSWER, {"role": "user", "content": "Pi\nng"}, ANSWER)),
        ),
        ({"sentence": "good", "label": "1"}, Labelled("good", None, 1)),
        ({"premise": "a", "hypothesis": "b", "label": "entailment"}, Labelled("a", "b", "entailment")),
    ],
)
def test_shapes(value: dict[str, Any], expected: Example) -> None:
    assert convert(value) == expected


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
        ({"messages": [USER | {"content": [{"type": "image"}, PART | {"text": "Ping"}]}], "images": "a"}, None, ("a",)),
        ({"conversations": [{"from": "human", "value": "Ping<image>"}], "image": "a"}, ["Ping<image>"], ("a",)),
        ({"instruction": "Ping", "output": "Pong", "images": ["a"]}, ["<image>\nPing", "Pong"], ("a",)),
        ({"prompt": "Ping", "completion": "Pong", "images": ["a"]}, ["<image>\nPing", "Pong"], ("a",)),
        ({"prompt": [USER], "completion": [ANSWER], "images": ["a"]}, ["<image>\nPing", "Pong"], ("a",)),
        ({"messages": [TAGGED]}, ["<image>Ping"], ()),  # text about HTML
        ({"messages": [USER], "images": None, "image": None}, ["Ping"], ()),
        ({"messages": [USER], "images": []}, ["Ping"], ()),
    ],
)
def test_images_and_the_places_of_their_tags(value: dict[str, Any], contents: Any, images: Any) -> None:
    chat = convert(value)
    assert isinstance(chat, Chat)
    assert [message["content"] for message in chat.messages] == (contents or ["<image>Ping"])
    assert chat.images == images
    assert chat.context == ("prompt" in value)


def test_arguments_of_tool_calls_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = convert({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert isinstance(chat, Chat)
    assert chat.messages[1]["tool_calls"] == [CALL | {"id": "1"}]
    assert chat.messages[1]["content"] == ""


def test_named_columns_and_a_named_shape() -> None:
    columns = {"prompt": "question", "completion": "answer"}
    assert convert({"question": "Ping", "answer": "Pong"}, columns=columns) == Pair("Ping", "Pong")
    assert convert({"text": "a", "messages": [USER]}, "text") == Text("a")
    assert detect({"text": "a", "label": 1}, labelled=True) == "labelled"
    with pytest.raises(ValueError, match=r"no column 'question', which data\.columns gives for 'prompt'; has the keys"):
        convert({"q": "Ping"}, columns={"prompt": "question"})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({}, "has no keys; expected `messages`"),
        ({"question": 1}, "has the keys `question`; expected `messages`"),
        ({"messages": []}, "messages is empty; expected at least one message"),
        ({"messages": "x"}, 'messages is "x", which is not JSON'),
        ({"messages": {}}, "messages is {}; expected a list"),
        ({"messages": ["x"]}, r'messages\[0\] is "x"; expected an object'),
        ({"messages": [{"content": "x"}]}, r"messages\[0\].role is missing; expected system, user, assistant or tool"),
        ({"messages": [USER, USER | {"role": "bot"}]}, r'messages\[1\].role is "bot"; expected system, user'),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is missing"),
        ({"messages": [USER | {"content": 1}]}, r"messages\[0\].content is 1; expected a text"),
        ({"messages": [USER | {"content": " "}]}, r"messages\[0\].content is empty"),
        ({"messages": [USER | {"content": "a\0"}]}, "NUL character at position 1"),
        ({"messages": [USER | {"content": "\ud800"}]}, "half a surrogate pair at position 0"),
        ({"messages": [USER | {"content": [{"type": "video"}]}]}, r"content\[0\] is .*expected \{\"type\": \"text\""),
        ({"messages": [TAGGED, TAGGED], "images": ["a"]}, "has 2 <image> tags for 1 images; expected one tag for each"),
        ({"messages": [TAGGED], "images": []}, "has 1 <image> tags for 0 images"),
        ({"messages": [ANSWER], "images": ["a"]}, "no message of the user to put more into"),
        ({"messages": [TAGGED], "images": [3]}, r"images\[0\] is 3; expected a text"),
        ({"messages": [TAGGED], "images": 3}, "images is 3; expected a list of paths"),
        ({"messages": [TAGGED], "images": {"a": 1}}, r'images\[0\] is {"a": 1}; expected a path, an address'),
        ({"messages": [ANSWER | {"tool_calls": [{"x": 1}]}]}, r"tool_calls\[0\] is .* expected an object with"),
        ({"messages": [ANSWER | {"tool_calls": [{"name": "f", "arguments": "{"}]}]}, r"arguments is .* not JSON"),
        ({"messages": [USER], "tools": [1]}, "tools is .*; expected a list of function schemas"),
        ({"prompt": "a", "completion": None}, "`completion` is null"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": [], "completion": [ANSWER]}, "prompt is empty"),
        ({"text": 3}, "text is 3; expected a text"),
        ({"conversations": [{"from": "dog", "value": "x"}]}, r'conversations\[0\].from is "dog"; expected human, gpt'),
        ({"conversations": [{"value": "x"}]}, r"conversations\[0\] is .* expected an object with `from` and `value`"),
        ({"instruction": "", "output": "x"}, "instruction is empty"),
        ({"instruction": "x", "output": ""}, "output is empty"),
        ({"instruction": "x", "output": "y", "history": [["a"]]}, r"history\[0\] is .*expected \[question, answer\]"),
        ({"sentence": "x", "label": {"a": 1}}, "expected a class by name or number, a list of them, or a number"),
        ({"sentence": "x", "label": [True]}, "expected a list of names or numbers of classes"),
        ({"sentence": "x", "label": True}, "label is true"),
    ],
)
def test_what_has_no_shape_is_explained(value: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        convert(value)
