"""Nothing that a record says is lost in silence: its line is refused, its key counted, or it is among the tokens."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetune.config.schema import DataConfig, ModelConfig, RecordKind, SourceConfig
from kubetune.data.prepared.pipeline import BatchResult, RecordBatch
from kubetune.data.prepared.row_maker import RowMaker
from kubetune.data.reading.record import Record
from kubetune.data.text.class_labels import Labels
from kubetune.data.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import train_tokenizer

SHOWS_ALL = """\
{%- if tools %}{{- tools | tojson + '\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- for part in (message.name, message.tool_call_id, message.reasoning_content, message.content) %}
        {{- part or '' }}
    {%- endfor %}
    {%- if message.tool_calls %}{{- message.tool_calls | tojson }}{% endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

CALL = {"type": "function", "function": {"name": "wfw", "arguments": {"a": "waw"}}}
USER = {"role": "user", "content": "wuw"}
RECORDS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "wsw"},
            USER,
            {"role": "assistant", "content": "wbw", "tool_calls": [CALL], "weight": 0},
            {"role": "tool", "content": "wtw", "name": "wnw"},
            {"role": "assistant", "content": "wcw", "reasoning_content": "wrw", "weight": 1},
        ],
        "tools": [{"name": "wfw", "description": "wdw"}],
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "wuw"}, {"type": "text", "value": "wvw"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "reasoning", "value": "wrw"},
                    {"type": "text", "value": "wcw"},
                    {"type": "tool_call", "value": '{"name": "wfw", "arguments": {}}'},
                ],
                "loss_weight": 1.0,
            },
        ],
        "tools": '[{"name": "wfw"}]',
        "system": "wsw",
    },
    {"prompt": "wuw", "completion": "wcw"},
    {"prompt": [USER], "completion": [{"role": "assistant", "content": "wcw"}], "system": "wsw"},
    {
        "conversations": [
            {"from": "human", "value": "wuw"},
            {"from": "function_call", "value": '{"name": "wfw", "arguments": {"a": "waw"}}'},
            {"from": "observation", "value": "wtw"},
            {"from": "gpt", "value": "wcw", "train": True},
        ],
        "functions": [{"name": "wfw"}],
        "system": "wsw",
    },
    {
        "instruction": "wiw",
        "input": "wuw",
        "output": "wcw",
        "history": [["wqw", "wbw"]],
        "system": "wsw",
    },
    {"text": "wcw wvw"},
]
LABELLED: list[dict[str, Any]] = [
    {"sentence": "wuw", "label": "wlw"},
    {"premise": "wuw", "hypothesis": "wvw", "label": "wlw"},
]
TURNS = [{"from": "human", "value": "wuw"}, {"from": "gpt", "value": "wcw"}]
GOOD = {"role": "assistant", "content": "wcw"}
BAD = {"role": "assistant", "content": "wrw", "tool_calls": [CALL]}
PAIRS: list[dict[str, Any]] = [
    {"prompt": "wuw", "chosen": " wcw", "rejected": " wrw"},
    {
        "prompt": [USER],
        "chosen": [GOOD],
        "rejected": [BAD],
        "tools": [{"name": "wfw"}],
    },
    {"chosen": [USER, GOOD], "rejected": [USER, BAD], "prompt": "wuw"},
    {
        "conversations": TURNS[:1],
        "chosen": TURNS[1],
        "rejected": {"from": "gpt", "value": "wrw"},
        "system": "wsw",
    },
    {"messages": [USER, GOOD], "rejected_response": "wrw"},
    {"instruction": "wiw", "input": "wuw", "output": ["wcw", "wrw"], "history": [["wqw", "wbw"]]},
    {"system": "wsw", "question": "wuw", "chosen": "wcw", "rejected": "wrw", "margin": 1.0},
    {"chosen": "\n\nHuman: wuw\n\nAssistant: wcw", "rejected": "\n\nHuman: wuw\n\nAssistant: wrw"},
    {"chosen": "wuw wuw wcw", "rejected": "wuw wuw wrw"},
]
JUDGED: list[dict[str, Any]] = [
    {"prompt": "wuw", "completion": " wcw", "label": True},
    {"conversations": TURNS, "kto_tag": False, "system": "wsw"},
    {"messages": [USER, GOOD], "label": False, "tools": [{"name": "wfw"}]},
    {"instruction": "wiw", "input": "wuw", "output": "wcw", "kto_tag": True},
]
ADDED = [
    "chosen_response", "rejected_messages", "rejected_tools", "question", "completion", "output", "kto_tag", "margin",
    "id", "system", "system_prompt", "tools", "functions", "weight", "train", "loss", "loss_weight", "label", "chosen",
    "rejected", "history", "input", "images", "videos", "name", "tool_call_id", "thinking", "function_call", "text",
    "prompt", "messages", "content", "value", "chat_template_kwargs", "new key", "\x1b[31m",
]  # fmt: skip
VALUES: list[Any] = [
    "wxw",
    ["wxw"],
    {"k": "wxw"},
    [{"role": "user", "content": "wxw"}],
    [["wxw", "wyw"]],
    7,
    0.5,
    True,
]
VALUES += [0, False]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value in a record, its own first."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from places(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def words(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield every word of a record with where it stands."""
    for place in places(value, path):
        if isinstance(text := at(value, place), str):
            yield from ((place, word) for word in re.findall(r"w[a-z]w", text))


@st.composite
def changed(draw: st.DrawFn, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a record with a key added, a value removed or a value replaced, once or twice."""
    record = copy.deepcopy(draw(st.sampled_from(records)))
    for _ in range(draw(st.integers(1, 2))):
        ways = [place for place in places(record) if place]
        new = copy.deepcopy(draw(st.sampled_from([None, *VALUES])))
        if draw(st.booleans()):
            objects = [(), *(place for place in ways if isinstance(at(record, place), dict))]
            at(record, draw(st.sampled_from(objects)))[draw(st.sampled_from(ADDED))] = new
        elif ways:
            *parent, key = draw(st.sampled_from(ways))
            if draw(st.booleans()):
                del at(record, tuple(parent))[key]
            else:
                at(record, tuple(parent))[key] = new
    return record


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = train_tokenizer(tmp_path_factory.mktemp("shows-all"), SHOWS_ALL)
    return load_tokenizer(ModelConfig(path=str(folder)))


def encode(
    record: dict[str, Any], tokenizer: Tokenizer, labels: Labels | None, kind: RecordKind = "text"
) -> tuple[BatchResult, str]:
    """Return what becomes of a record, and the text that is kept of it."""
    source = SourceConfig(path="a.jsonl")
    worker = RowMaker(
        tokenizer, DataConfig(train=(source,)), {"train": (source,)}, labels, kind=kind
    )
    result = worker.encode(RecordBatch(0, "train", [(0, Record("a.jsonl", 7, record))]))
    return result, tokenizer.decode(result.chunk.tokens.tolist(), skip_special_tokens=False)


MESSAGES = (
    "messages[]",
    "messages[].content[]",
    "messages[].tool_calls[]",
    "messages[].tool_calls[].function",
)


def is_counted(place: tuple[Any, ...], result: BatchResult) -> bool:
    """True if a key above the place, or the place itself, is among those that are not used."""
    names = [key for key in place if isinstance(key, str)]
    above = [names[0], *(f"{before}.{name}" for before in MESSAGES for name in names)]
    return any(name in result.tally.unused_keys for name in above)


def require_nothing_lost(
    record: dict[str, Any],
    tokenizer: Tokenizer,
    labels: Labels | None = None,
    kind: RecordKind = "text",
) -> None:
    json.dumps(record)
    result, text = encode(record, tokenizer, labels, kind)
    if result.problems:
        assert [where for where, _ in result.problems] == ["a.jsonl:7"]
        return
    if result.tally.no_label:
        return
    assert result.tally.rows == 1
    lost = [
        (place, word)
        for place, word in words(record)
        if word not in text
        and not is_counted(place, result)
        and not (labels and place[0] == "label")
    ]
    assert not lost, (text, result.tally)


def test_keys_beside_and_inside_the_function_of_a_call_are_counted(tokenizer: Tokenizer) -> None:
    function = {"name": "wfw", "arguments": {"a": "waw"}, "id": "wxw", "function": {}}
    call = {"id": "wiw", "type": "function", "name": "wzw", "function": function}
    turns = [{"role": "user", "content": "wuw"}, {"role": "assistant", "tool_calls": [call]}]
    encoded, _ = encode({"messages": turns, "tools": [{"name": "wfw"}]}, tokenizer, None)
    assert set(encoded.tally.unused_keys) == {
        f"messages[].tool_calls[].{key}" for key in ("name", "function.id", "function.function")
    }


@pytest.mark.parametrize("key", ["content", "role", "tool_calls"])
def test_a_turn_that_says_a_thing_twice_is_refused(tokenizer: Tokenizer, key: str) -> None:
    call = {"from": "function_call", "value": '{"name": "wfw"}', key: "wxw"}
    turns = [{"from": "human", "value": "wuw"}, call, {"from": "gpt", "value": "wcw"}]
    encoded, _ = encode({"conversations": turns}, tokenizer, None)
    assert [f"and `{key}`; expected one of them" in problem for _, problem in encoded.problems] == [
        True
    ]


@given(record=changed(RECORDS))
def test_nothing_of_a_record_is_lost(record: dict[str, Any], tokenizer: Tokenizer) -> None:
    require_nothing_lost(record, tokenizer)


@given(record=changed(LABELLED))
def test_nothing_of_a_labelled_record_is_lost(record: dict[str, Any], tokenizer: Tokenizer) -> None:
    labels = Labels("single_label_classification", ("wlw", "wxw"))
    require_nothing_lost(record, tokenizer, labels)


@given(record=changed(PAIRS))
def test_nothing_of_a_pair_is_lost(record: dict[str, Any], tokenizer: Tokenizer) -> None:
    require_nothing_lost(record, tokenizer, kind="graded")
    result, _ = encode(record, tokenizer, None, "pair")
    ids = result.chunk.tokens.tolist()
    trained = result.chunk.trained
    for split in result.chunk.splits:
        chosen = trained.index(1)
        rejected = trained.index(1, split)
        assert ids[:chosen] == ids[split:rejected]  # what both are answers to
        assert ids[:split] != ids[split:]


@given(record=changed(JUDGED))
def test_nothing_of_a_judged_answer_is_lost(record: dict[str, Any], tokenizer: Tokenizer) -> None:
    require_nothing_lost(record, tokenizer, kind="judged")


@pytest.mark.parametrize("record", [*PAIRS, *JUDGED])
def test_all_of_sound_answers_is_among_their_tokens(
    record: dict[str, Any], tokenizer: Tokenizer
) -> None:
    result, text = encode(record, tokenizer, None, "graded" if record in PAIRS else "judged")
    assert not result.problems
    assert not result.tally.unused_keys
    assert {word for _, word in words(record)} == set(re.findall(r"w[a-z]w", text))


@pytest.mark.parametrize("record", RECORDS)
def test_all_of_a_sound_record_is_among_its_tokens(
    record: dict[str, Any], tokenizer: Tokenizer
) -> None:
    result, text = encode(record, tokenizer, None)
    assert not result.problems
    assert not result.tally.unused_keys
    assert {word for _, word in words(record)} == set(re.findall(r"w[a-z]w", text))


def test_only_answers_that_are_not_switched_off_are_labels(tokenizer: Tokenizer) -> None:
    result, _ = encode(RECORDS[0], tokenizer, None)
    pairs = zip(result.chunk.tokens, result.chunk.trained, strict=True)
    assert (
        tokenizer.decode([id for id, trained in pairs if trained], skip_special_tokens=False)
        == "wrwwcw<|im_end|>"
    )


def test_a_switch_against_training_on_all_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = SourceConfig(path="a.jsonl")
    worker = RowMaker(tokenizer, DataConfig(train=(source,), train_on="all"), {"train": (source,)})
    result = worker.encode(RecordBatch(0, "train", [(0, Record("a.jsonl", 7, RECORDS[0]))]))
    assert result.problems[0][1].startswith(
        "messages[2] says that it is not to be trained, and `data.train_on` is all"
    )
