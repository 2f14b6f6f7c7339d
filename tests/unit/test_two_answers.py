"""A right answer beside one that somebody else gave: the other is not learned in its place, or put into the prompt."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli
from kubetune.data.column_uses import likely_columns, use_of
from kubetune.data.reading.examples import Chat, Pair
from kubetune.data.reading.formats import read


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def learned(value: dict[str, Any], columns: dict[str, str] | None = None) -> str:
    """Return the answer that is learned of a record."""
    example = read(value, columns=columns).example
    if isinstance(example, Chat):
        return str(example.messages[-1]["content"])
    assert isinstance(example, Pair)
    return example.completion


def pasted(message: str) -> list[dict[str, str]]:
    """Return the columns that a message has, as a run file would have them."""
    return [
        dict(pair.split(": ") for pair in columns.split(", "))
        for columns in re.findall(r"`columns: {(.*?)}`", message)
    ]


@pytest.mark.parametrize(
    ("drafted", "right"),
    [
        ({"answer": "yes"}, {"ground_truth": "no"}),
        ({"response": "It is in Rome."}, {"reference_answer": "It is in Paris."}),
        ({"completion": "3"}, {"gold": "30"}),
        ({"output": "So 12 are left."}, {"expected_answer": 11}),
        ({"response": "Bread."}, {"target": "Butter."}),
        ({"answer": "I do not know."}, {"Correct Answer": "In the year 1066."}),
        ({"answer": "The answer is (B)."}, {"final_answer": "C"}),
        ({"response": "It is 3.14."}, {"groundTruth": 3}),
        ({"output": "\u7b54\u6848\u662f\u5317\u4eac\u3002"}, {"golden_answer": "\u4e0a\u6d77"}),
        ({"answer": "B"}, {"gold_response": "A"}),
        (
            {"answer": "B", "choices": ["bread", "butter"], "input": "A) bread B) butter"},
            {"gold": "A"},
        ),
    ],
)
@pytest.mark.parametrize("asked", ["question", "instruction", "prompt", "input"])
def test_an_answer_that_contradicts_the_right_one_is_not_learned_unasked(
    asked: str, drafted: dict[str, Any], right: dict[str, Any]
) -> None:
    value = {**drafted, asked: "Is it bread or butter?", **right}
    with pytest.raises(ValueError, match=r"beside `.*`, and they differ;") as error:
        read(value)
    advised = pasted(str(error.value).replace('"', ""))
    answer = next(iter(right.values()))
    if isinstance(answer, str):
        assert learned(value, advised.pop(0)) == answer
    else:
        assert "write the right answer as a text" in str(error.value)
    (other,) = advised
    assert learned(value, other) == next(iter(drafted.values()))


@pytest.mark.parametrize(
    "value",
    [
        # Steps that lead to the right answer.
        {"question": "10 + 1?", "answer": "10 + 1 is 11.\n#### 11", "final_answer": "11"},
        {"problem": "1 / 2?", "output": r"So \boxed{\frac{1}{2}}.", "expected_answer": "1/2"},
        {"question": "How many?", "response": "There are 1,200.", "ground_truth": 1200.0},
        {"question": "Is it so?", "answer": "Yes, it is.", "reference_answer": "yes"},
        {"question": "Where?", "answer": "Paris", "ground_truth": "It is in Paris, as all know."},
        {"question": "Where?", "answer": "\u5728\u5317\u4eac\u3002", "gold_answer": "\u5317\u4eac"},
        # The same choice, by its letter and by its text.
        {"question": "A) bread or B) butter?", "answer": "butter", "gold": "B"},
        {"question": "bread or butter?", "choices": ["bread", "butter"], "answer": "butter", "correct_answer": "B"},
        # A language, a class, a grade.
        {"instruction": "Translate it.", "output": "Das ist ein Brot.", "target": "German"},
        {"question": "What is it?", "answer": "It is bread.", "gold": 1},
        {"question": "What is it?", "answer": "It is bread.", "ground_truth": True},
        # A `solution` is believed before both; tests of code are no answers.
        {"problem": "10 + 1?", "solution": "Add them, and you get a dozen.", "final_answer": "11"},
        {"prompt": "Write it.", "output": "print(1 + 1)", "expected_output": "2"},
        {"question": "What is it?", "answer": "It is bread.", "target_audience": "children"},
        {"question": "What is it?", "answer": "It is bread.", "draft": "It is butter."},
    ],
)  # fmt: skip
def test_answers_that_agree_are_learned_as_they_are(value: dict[str, Any]) -> None:
    answer = next(
        value[name] for name in ("answer", "output", "response", "solution") if name in value
    )
    assert learned(value) == answer


@pytest.mark.parametrize(
    "name",
    ["ground_truth", "gold", "target", "gold_answer", "expected_response", "label", "labels"],
)
def test_no_advice_puts_the_right_answer_into_the_prompt(name: str) -> None:
    value = {"question": "What is it?", "answer": "It is bread.", name: "It is butter."}
    use = use_of(name, value, {})
    assert "input" not in use
    if not name.startswith("label"):
        assert use["output"] == name


def test_init_takes_no_other_answer_in_place_of_the_right_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        {
            "user": f"What is {n}?",
            "assistant": f"It is {n} or so.",
            "gold_answer": f"It is {n + 1}.",
        }
        for n in range(9)
    ]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["init", "d.jsonl", "-o", "run.yaml"]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "has `assistant` beside `gold_answer`, and they differ" in words
    right, other = pasted(words)
    assert right == {"prompt": "user", "completion": "gold_answer"}
    assert other == {"prompt": "user", "completion": "assistant"}
    assert not Path("run.yaml").exists()
    given = [f"{key}={name}" for key, name in right.items()]
    assert cli.main(["init", "d.jsonl", "-o", "run.yaml", "--columns", *given]) == 0


def test_advice_for_other_spellings_names_neither_of_two_answers() -> None:
    value = {"Question": "What is it?", "Answer": "It is bread."}
    assert likely_columns({**value, "Final Answer": "So it is bread."})
    assert not likely_columns({**value, "Final Answer": "It is butter."})
