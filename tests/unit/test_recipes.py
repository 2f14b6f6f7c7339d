"""Records of FIRE and Volcano to rows: every oddity they are known to have, and that training can read the outcome."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetune.data.reading.examples import Chat
from kubetune.data.reading.formats import convert
from kubetune.plugins.recipes import fire, volcano
from kubetune.plugins.recipes.recipe import Converted, Options, Skipped

SHARED = Path(__file__).parents[2].parent / "shared" / "data"

GRAY, WHITE = "Thought: hm\nAnswer: gray", "Thought: I see\nAnswer: white"
CLOSE, RIGHT = "Score: 4.\nFeedback: Not quite.\n", "Score: 10.\nFeedback: Well done!\n"


def student(text: Any) -> dict[str, Any]:
    return {"role": "student", "type": "response", "value": text}


def teacher(text: Any) -> dict[str, Any]:
    return {"role": "teacher", "type": "feedback", "value": text}


def trajectory(**changes: Any) -> dict[str, Any]:
    turns = [student(GRAY), teacher(CLOSE), student(f"{WHITE}\n\n"), teacher(RIGHT)]
    record = {
        "id": "r1",
        "image": "coco/a.jpg",
        "question": {"value": "What colour?"},
        "conversations": turns,
    }
    return record | changes


def rows(
    record: dict[str, Any], *, recipe: Any = fire, **options: Any
) -> tuple[list[dict[str, Any]], Converted]:
    """Return rows as a conversion writes them, but for their `id`."""
    chosen = Options(**{"style": "bc", "max_history_rounds": 6, **options})
    image = record.get("image")
    converted = recipe.convert(record, bool(image), chosen)
    images = {"images": [image]} if image else {}
    return [{**row, **images} for row in converted.rows], converted


def texts(messages: list[dict[str, str]]) -> list[str]:
    return [f"{message['role'][0]}: {message['content']}" for message in messages]


def test_each_attempt_is_trained_from_the_state_before_it() -> None:
    (first, second), tally = rows(trajectory())
    assert texts(first["prompt"]) == ["u: <image>\nWhat colour?"]
    assert texts(first["completion"]) == [f"a: {GRAY}"]
    assert texts(second["prompt"]) == [
        "u: <image>\nWhat colour?",
        f"a: {GRAY}",
        "u: Score: 4.\nFeedback: Not quite.",
    ]
    assert texts(second["completion"]) == [f"a: {WHITE}"]
    assert (first["round"], second["round"], tally.rounds) == (1, 2, 2)
    chat = convert(second)
    assert isinstance(chat, Chat)
    assert chat.context == 3  # so only the completion is trained
    assert chat.images == ("coco/a.jpg",)


@pytest.mark.parametrize(
    ("most", "attempts"), [(0, []), (1, ["3"]), (2, ["2", "3"]), (6, ["0", "1", "2", "3"])]
)
def test_a_state_holds_the_last_attempts_with_their_feedback(
    most: int, attempts: list[str]
) -> None:
    turns = [turn for n in range(5) for turn in (student(str(n)), teacher(f"no {n}"))]
    examples, _ = rows(trajectory(conversations=turns), max_history_rounds=most)
    state = [word for n in attempts for word in (f"a: {n}", f"u: no {n}")]
    assert texts(examples[4]["prompt"]) == ["u: <image>\nWhat colour?", *state]
    assert len(examples) == 5


def test_a_record_as_one_conversation() -> None:
    (row,), _ = rows(trajectory(), style="sharegpt")
    feedback = "u: A score of 4 is given to the answer. Not quite."
    assert texts(row["messages"]) == ["u: <image>\nWhat colour?", "a: gray", feedback, "a: white"]
    assert isinstance(convert(row), Chat)


@pytest.mark.parametrize(
    ("feedback", "message"),
    [
        ("Score: 7.5\nFeedback: Close.", "A score of 7.5 is given to the answer. Close."),
        ("Score: 8/10.\nFeedback: Close.", "A score of 8 is given to the answer. Close."),
        ("Score: 3.", "A score of 3 is given to the answer."),
        ("Not correct.", "Not correct."),
        ("Score: ten\nFeedback: Good.", "Score: ten\nFeedback: Good."),
        ("Score: 2.\nTry again.", "A score of 2 is given to the answer. Try again."),
    ],
)
def test_feedback_in_words(feedback: str, message: str) -> None:
    turns = [student("It is gray."), teacher(feedback), student("Thought: hm\nAnswer:")]
    (row,), tally = rows(trajectory(conversations=turns), style="sharegpt")
    assert texts(row["messages"])[1:] == [
        "a: It is gray.",
        f"u: {message}",
        "a: Thought: hm\nAnswer:",
    ]
    assert tally.notes["feedback_without_score"] == (not message.startswith("A score"))


def test_turns_out_of_order() -> None:
    turns = [teacher("early"), student("A"), student("B"), teacher("no"), teacher("really")]
    record = trajectory(conversations=[*turns, student("C")])
    examples, tally = rows(record)
    question = "u: <image>\nWhat colour?"
    assert [texts(row["prompt"]) for row in examples] == [
        [question],
        [question],
        [question, "a: B", "u: no\nreally"],
    ]
    assert [texts(row["completion"]) for row in examples] == [["a: A"], ["a: B"], ["a: C"]]
    assert +tally.notes == {"feedback_before_any_attempt": 1, "attempts_without_feedback": 1}
    (row,), _ = rows(record, style="sharegpt")
    assert texts(row["messages"]) == [question, "a: B", "u: no\nreally", "a: C"]


@pytest.mark.parametrize(
    ("question", "asked", "removed"),
    [
        ("What colour?", "<image>\nWhat colour?", 0),
        ({"value": " <image>\nWhat? "}, "<image>\nWhat?", 0),
        ({"value": "What?<image>"}, "<image>\nWhat?", 0),
        ({"value": "<image>\nCompare <image> please."}, "<image>\nCompare  please.", 1),
    ],
)
def test_questions_have_one_tag(question: Any, asked: str, removed: int) -> None:
    (first, _), tally = rows(trajectory(question=question))
    assert first["prompt"][0]["content"] == asked
    assert tally.notes["image_tags_removed"] == removed


def test_tags_in_answers_are_no_images() -> None:
    turns = [student("The <image> shows a bear"), teacher("Look at the <image>"), student("gray")]
    examples, tally = rows(trajectory(conversations=turns))
    assert all(
        sum(m["content"].count("<image>") for m in row["prompt"] + row["completion"]) == 1
        for row in examples
    )
    assert tally.notes["image_tags_removed"] == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": None}, "no_image"),
        ({"question": None}, "bad_text"),
        ({"question": {"value": "  "}}, "no_question"),
        ({"question": {"value": "<image>"}}, "no_question"),
        ({"question": {"value": 3}}, "bad_text"),
        ({"question": "a\0"}, "bad_text"),
        ({"question": "\ud800"}, "bad_text"),
        ({"conversations": []}, "no_conversations"),
        ({"conversations": None}, "no_conversations"),
        ({"conversations": "x"}, "no_conversations"),
        ({"conversations": ["x"]}, "bad_turn"),
        ({"conversations": [student("A"), None]}, "bad_turn"),
        ({"conversations": [student("A"), {"role": "examiner", "value": "B"}]}, "bad_turn"),
        ({"conversations": [student("A"), {"role": "teacher", "type": 1}]}, "bad_turn"),
        ({"conversations": [student("A"), teacher(4)]}, "bad_text"),
        ({"conversations": [student("A"), student(" ")]}, "empty_turn"),
        ({"conversations": [student("A"), teacher("<image>")]}, "empty_turn"),
        ({"conversations": [{"role": ["student"], "value": "x"}]}, "bad_turn"),
        ({"conversations": [teacher("no")]}, "no_student_turn"),
        ({"conversations": [student(None)]}, "bad_text"),
    ],
)
def test_trajectories_that_cannot_be_used(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Skipped) as caught:
        rows(trajectory(**changes))
    assert caught.value.reason == reason


def spoken(*texts: Any, image: str | None = "a.jpg") -> dict[str, Any]:
    turns = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]
    return {"id": "v1", "conversations": turns} | ({"image": image} if image else {})


def test_volcano_is_read_as_other_data_of_its_form() -> None:
    asked = "What is it?\n<image>"
    (row,), tally = rows(spoken(asked, "A pot.", "Which?", "Red."), recipe=volcano)
    assert texts(row["messages"]) == [f"u: {asked}", "a: A pot.", "u: Which?", "a: Red."]
    assert (row["images"], tally.rounds) == (["a.jpg"], 2)
    (row,), _ = rows(spoken("Who wrote Hamlet?", "Shakespeare.", image=None), recipe=volcano)
    assert "images" not in row
    (row,), _ = rows(spoken("What is it?", "A pot."), recipe=volcano)
    assert texts(row["messages"])[0] == "u: <image>\nWhat is it?"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (spoken("<image>\nWhat?", "x", image=None), "no_image"),
        (spoken(), "bad_record"),
        (spoken("What?"), "no_answer"),
        (spoken("What?", " "), "bad_record"),
        (spoken("What?", 3), "bad_record"),
        (spoken("Which <image>?", "This.", "And <image>?", "That."), "bad_record"),
        ({"conversations": [{"from": "dog", "value": "x"}]}, "bad_record"),
    ],
)
def test_volcano_records_that_cannot_be_used(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(Skipped) as caught:
        rows(record, recipe=volcano)
    assert caught.value.reason == reason


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published fragments are not here")
@pytest.mark.parametrize("style", ["bc", "sharegpt"])
def test_the_published_fragments(style: str) -> None:
    examples = []
    for name in ("fire_schema_reconstructed", "fire_schema_edge_cases_synthetic"):
        for record in json.loads((SHARED / "fire" / f"{name}.json").read_text()):
            if record["id"] in ("e_no_image", "e_no_conversations", "e_empty_question"):
                with pytest.raises(Skipped):
                    rows(record, style=style)
            else:
                examples += rows(record, style=style)[0]
    for record in json.loads(
        (SHARED / "volcano" / "volcano_train_schema_reconstructed.json").read_text()
    ):
        examples += rows(record, recipe=volcano)[0]
    assert len(examples) == (48 if style == "bc" else 25)
    chats = [convert(row) for row in examples]
    assert all(
        isinstance(chat, Chat) and chat.messages[-1]["role"] == "assistant" for chat in chats
    )
    assert sum(not chat.images for chat in chats if isinstance(chat, Chat)) == 1


ADDED = [
    "system",
    "loss",
    "weight",
    "groundtruth",
    "image",
    "images",
    "value",
    "question",
    "type",
    "role",
    "from",
    "new",
]
VALUES: list[Any] = [
    "wxw",
    ["wxw"],
    {"value": "wxw"},
    [{"from": "human", "value": "wxw"}],
    0,
    0.5,
    False,
    True,
]


@given(
    st.sampled_from([(fire, trajectory()), (volcano, spoken("What?", "A pot.", "Which?", "Red."))]),
    st.integers(0, 9),
    st.sampled_from(ADDED),
    st.sampled_from(VALUES),
)
def test_what_is_added_to_a_record_is_in_a_row_or_counted_or_the_record_is_skipped(
    base: tuple[Any, dict[str, Any]], place: int, key: str, value: Any
) -> None:
    recipe = base[0]
    record = copy.deepcopy(base[1])
    objects = [record, *record["conversations"], *([record["question"]] if recipe is fire else [])]
    objects[place % len(objects)][key] = value
    try:
        examples, tally = rows(record, recipe=recipe)
    except Skipped:
        return
    counted = {name.rpartition(".")[2] for name in tally.unused_keys}
    text = "wxw" if "wxw" in json.dumps(value) else json.dumps(value)
    assert key in counted or tally.notes.total() or text in json.dumps(examples)


def test_keys_that_are_in_no_row_are_counted_by_their_place() -> None:
    record = trajectory(
        groundtruth={"value": "gray"}, split="", question={"value": "What?", "lang": "en"}
    )
    record["conversations"][0]["loss"] = False
    expected = {"groundtruth", "question.lang", "conversations[].loss"}
    assert rows(record)[1].unused_keys == expected
    assert rows(trajectory())[1].unused_keys == set()
