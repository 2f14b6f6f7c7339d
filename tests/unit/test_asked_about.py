"""A question beside the text that it is about: neither takes the place of the other, whatever the two are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli
from kubetune.config.load import load_config
from kubetune.data.column_names import names_question
from kubetune.data.column_uses import likely_columns


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def proposed(row: dict[str, Any], *words: str) -> dict[str, str]:
    """Return the columns that `init` writes for records such as this one."""
    rows = [json.dumps(row).replace("{n}", str(n)) + "\n" for n in range(40)]
    Path("d.jsonl").write_text("".join(rows))
    assert cli.main(["init", "d.jsonl", "-o", "run.yaml", *words]) == 0
    return dict(load_config(Path("run.yaml")).data.train[0].columns)


ABOUT = "There are {n} trees in the wood, and a river."
ASKED = "How many trees are in wood {n}?"
SAID = "There are {n} of them."


@pytest.mark.parametrize(
    "asked", ["q", "user_question", "queryText", "User Request", "task_instruction"]
)
@pytest.mark.parametrize("about", ["context", "source", "input", "text", "passage"])
@pytest.mark.parametrize("said", ["a", "answer", "reply"])
def test_a_text_is_not_asked_while_a_question_is_beside_it(
    asked: str, about: str, said: str
) -> None:
    columns = proposed({about: ABOUT, asked: ASKED, said: SAID})
    expected = {"instruction": asked, "input": about, "output": said}
    if about == "source":
        expected = {"prompt": asked, "completion": said}
    assert columns.get("instruction", columns.get("prompt")) == asked
    assert columns == {key: name for key, name in expected.items() if key != name}


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"context": ABOUT, "response": SAID}, {"prompt": "context", "completion": "response"}),
        ({"source": ABOUT, "target": SAID}, {"prompt": "source", "completion": "target"}),
        ({"input": ABOUT, "reply": SAID}, {"prompt": "input", "completion": "reply"}),
        ({"user": ASKED, "context": ABOUT, "assistant": SAID},
         {"instruction": "user", "input": "context", "output": "assistant"}),
        ({"context": ABOUT, "negative_prompt": "No river, please.", "response": SAID},
         {"prompt": "context", "completion": "response"}),
    ],
)  # fmt: skip
def test_a_text_alone_is_what_is_asked(row: dict[str, Any], columns: dict[str, str]) -> None:
    assert proposed(row) == columns


def test_names_of_questions() -> None:
    for name in ("q", "user_question", "queryText", "problem", "Question Text", "requests"):
        assert names_question(name)
    for name in ("question_id", "system_prompt", "negative_prompt", "context", "question_type"):
        assert not names_question(name)


@pytest.mark.parametrize(
    ("value", "columns"),
    [
        ({"q": ASKED, "context": ABOUT, "a": SAID}, {"instruction": "q", "input": "context", "output": "a"}),
        (
            {"Question": ASKED, "Passage": ABOUT, "Answer": SAID},
            {"instruction": "Question", "input": "Passage", "output": "Answer"},
        ),
        (
            {"Question": ASKED, "Passage": ABOUT, "cot": "So I count them all.", "Answer": SAID},
            {"instruction": "Question", "input": "Passage", "output": "Answer", "reasoning_content": "cot"},
        ),
        ({"Question": ASKED, "Answer": SAID}, {"prompt": "Question", "completion": "Answer"}),
        # No columns make texts of these, or one text of several.
        ({"Question": ASKED, "context": {"title": "A wood", "text": ABOUT}, "Answer": SAID}, {}),
        ({"Question": ASKED, "Passage": ABOUT, "Background": ABOUT, "Answer": SAID}, {}),
    ],
)  # fmt: skip
def test_advice_leaves_no_text_out_that_is_asked_about(
    value: dict[str, Any], columns: dict[str, str]
) -> None:
    assert likely_columns(value) == columns
