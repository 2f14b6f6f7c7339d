"""A question beside the text that it is about: neither takes the place of the other, whatever the two are called."""

from __future__ import annotations

import json
import re
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


MESSAGES = [{"role": "user", "content": ASKED}]
CHOICES = {"choices": ["There are {n}.", "There are none.", "There is one."]}
LETTERS = {"A": "all", "B": "none", "C": "one"}


@pytest.mark.parametrize(
    "said", ["ground_truth", "solution", "target", "final_answer", "response", "reply"]
)
@pytest.mark.parametrize(
    "about", [{"passage": ABOUT}, CHOICES, {"documents": [{"text": ABOUT}]}, LETTERS]
)
@pytest.mark.parametrize("asked", [{"prompt": MESSAGES}, {"messages": MESSAGES}])
def test_columns_that_init_chooses_leave_no_text_out(
    asked: dict[str, Any], about: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same records with their columns under the names that the readers know are refused as well."""
    talk = next(iter(asked))
    answer = "C" if about is LETTERS else "one"
    if about is LETTERS and talk != "prompt":
        pytest.skip("single letters beside a conversation may be anything")
    rows = [json.dumps({**asked, **about, said: answer}).replace("{n}", str(n)) for n in range(40)]
    Path("d.jsonl").write_text("\n".join(rows))
    code = cli.main(["init", "d.jsonl", "-o", "run.yaml"])
    text = " ".join(capsys.readouterr().err.split())
    if Path("run.yaml").exists():
        # A text may be the message of the system.
        assert code == 0
        assert "passage" in load_config(Path("run.yaml")).data.train[0].columns.values()
        return
    assert code == 2
    if "prompts without right answers" in text:
        return
    assert f"has `{next(iter(about))}`" in text
    assert "would be left out" in text
    # What is advised to leave it out is read so.
    advised = re.search(r"give `columns: {([^}]*)}` to leave", text)
    if advised is not None:
        pairs = [pair.replace(": ", "=") for pair in advised[1].split(", ")]
        if talk == "messages":
            pairs += ["--task", "grpo"]
        assert cli.main(["init", "d.jsonl", "-o", "run.yaml", "--columns", *pairs]) == 0
