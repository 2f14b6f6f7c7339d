"""Each piece of advice that `init` and `data check` print for data in published layouts works when it is pasted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli, errors
from kubetune.cli.local.demo import EMBEDDED
from kubetune.config.load import load_config
from kubetune.config.schema import SourceConfig
from kubetune.data.proposed.answers_as_texts import from_choices
from kubetune.data.proposed.proposing import propose
from tests.layouts import LAYOUTS, ROWS, medmcqa

MODEL = str(EMBEDDED / "model")
# What is printed in backticks: words of the command line, and programs that write new data.
COLUMNS = re.compile(r"`[^`]*?((?:--task \w+ )?--columns [^`]+?)`")
PROGRAM = re.compile(r"`(python3 -c .+? > (\S+))`", re.DOTALL)
# The same for files that hold no lines of JSON.
STATEMENT = re.compile(r"Write `(r.+?)` for each record r in Python", re.DOTALL)

# The columns that init takes by other names than ours, where need be after the program that it prints.
USED = {
    "MBPP": {},
    "HellaSwag": {},
    "MMLU": {"instruction": "question", "input": "choices", "output": "answer"},
    "BoolQ": {"text": "question", "text_pair": "passage", "label": "answer"},
    "SQuAD": {"instruction": "question", "input": "context", "output": "answer"},
    "CNN/DailyMail": {"prompt": "article", "completion": "highlights"},
    "GSM8K": {},
    "DROP": {"instruction": "question", "input": "passage", "output": "answer"},
    "ARC": {"instruction": "question", "input": "choices", "output": "answer"},
    "WinoGrande": {"prompt": "sentence", "completion": "answer"},
    "TruthfulQA": {},
    "Alpaca": {},
    "Dolly": {"input": "context", "output": "response"},
    "UltraFeedback": {},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(layout: str) -> str:
    rows = [LAYOUTS[layout](number) for number in range(ROWS)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "rows.jsonl"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(list(words))
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def init(capsys: pytest.CaptureFixture[str], path: str, *words: str) -> tuple[int, str]:
    Path("run.yaml").unlink(missing_ok=True)
    return said(capsys, "init", path, "--model", MODEL, "-o", "run.yaml", *words)


def pasted_columns(text: str) -> Iterator[list[str]]:
    """Yield the words of each `--columns …` that a text gives to paste."""
    for words in dict.fromkeys(COLUMNS.findall(text)):
        yield words.split()


def require_used(capsys: pytest.CaptureFixture[str], path: str, words: list[str]) -> str:
    """Paste words behind `init`, and return what the check of the run says; the columns are used as said."""
    code, text = init(capsys, path, *words)
    assert code == errors.OK, text
    columns = dict(word.split("=", 1) for word in words if "=" in word)
    assert columns.items() <= load_config(Path("run.yaml")).data.train[0].columns.items()
    code, checked = said(capsys, "data", "check", "run.yaml")
    assert code == errors.OK, checked
    for name in columns.values():
        assert f"`{name}` (" not in text + checked, "it is named as not used"
    return checked


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_advice_works_when_pasted(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(layout)
    code, text = init(capsys, path)
    programs = PROGRAM.findall(text)
    if code != errors.OK:
        # A refusal says what would be taken, and that is.
        assert programs or list(pasted_columns(text)), text
    for program, made in programs:
        program = program.replace("python3", sys.executable, 1)
        subprocess.run(["bash", "-c", program], check=True, env={"PATH": os.environ["PATH"]})
        path = made
        code, text = init(capsys, path)
    if programs or code == errors.OK:
        assert code == errors.OK, text
        assert dict(load_config(Path("run.yaml")).data.train[0].columns) == USED[layout]
        text += require_used(capsys, path, [])
    for words in pasted_columns(text):
        require_used(capsys, path, words)


def test_a_text_beside_a_plain_text_is_named_with_the_words_that_use_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write("MBPP")
    words = "--columns prompt=text completion=code"
    _, text = init(capsys, path)
    assert "`code` (a text) is not used. " in text
    assert words in text
    # The run file, the check of the data with a run and without, and the plan name it too.
    assert words in Path("run.yaml").read_text()
    for verb in (("data", "check", "run.yaml"), ("data", "check", path), ("plan", "run.yaml")):
        assert "`code` (a text) is not used" in said(capsys, *verb)[1], verb


def ends_alone(number: int) -> dict[str, Any]:
    row = LAYOUTS["HellaSwag"](number)
    return {key: row[key] for key in ("ctx", "endings", "label")}


@pytest.mark.parametrize("layout", [LAYOUTS["ARC"], medmcqa, ends_alone])
def test_a_label_that_chooses_one_of_several_texts_is_no_class(
    layout: Callable[[int], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    # In so many rows four letters are classes by their values.
    rows = [layout(number) for number in range(60)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = init(capsys, "rows.jsonl")
    assert code == errors.USER
    assert "holds a multiple choice" in text
    [(program, made)] = PROGRAM.findall(text)
    program = program.replace("python3", sys.executable, 1)
    subprocess.run(["bash", "-c", program], check=True, env={"PATH": os.environ["PATH"]})
    first = json.loads(Path(made).read_text().splitlines()[1])
    question = first.get("prompt") or first["question"]
    assert "\nA. " in question
    assert f". {first['answer']}" in question
    code, text = init(capsys, made)
    assert code == errors.OK, text
    assert load_config(Path("run.yaml")).task == "causal_lm"


@pytest.mark.parametrize(
    "layout",
    [*(LAYOUTS[name] for name in ("ARC", "MMLU", "HellaSwag", "SQuAD", "WinoGrande")), medmcqa],
)
def test_the_program_for_other_files_makes_the_same_records(
    layout: Callable[[int], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [layout(number) for number in range(60)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path("rows.jsonl").write_text(lines)
    _, text = init(capsys, "rows.jsonl")
    [(program, made)] = PROGRAM.findall(text)
    program = program.replace("python3", sys.executable, 1)
    subprocess.run(["bash", "-c", program], check=True, env={"PATH": os.environ["PATH"]})

    Path("rows.json").write_text(json.dumps(rows))
    code, text = init(capsys, "rows.json")
    assert code == errors.USER
    [statement] = STATEMENT.findall(text)
    for row in rows:
        exec(statement, {"json": json, "r": row})
    assert rows == [json.loads(line) for line in Path(made).read_text().splitlines()]


def test_options_beside_a_sentence_become_part_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = init(capsys, write("WinoGrande"))
    assert code == errors.USER
    assert "has `option1` and `option2` beside `sentence`, and they would be left out" in text
    [(program, made)] = PROGRAM.findall(text)
    program = program.replace("python3", sys.executable, 1)
    subprocess.run(["bash", "-c", program], check=True, env={"PATH": os.environ["PATH"]})
    first = json.loads(Path(made).read_text().splitlines()[0])
    assert first["sentence"].endswith("too small.\n1. box 0\n2. bag")


def test_wrong_answers_are_never_offered_as_the_answer() -> None:
    rows = [LAYOUTS["TruthfulQA"](number) for number in range(ROWS)]
    assert "`correct_answers` holds the answer" in from_choices(rows, "rows.jsonl")


def test_texts_that_are_the_same_in_each_record_are_names_of_classes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["good news", "bad news", "no news"]
    rows = [{"text": f"House {n} is on fire.", "names": names, "label": n % 3} for n in range(60)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = init(capsys, "rows.jsonl")
    assert code == errors.OK, text
    assert load_config(Path("run.yaml")).task == "sequence_classification"


def test_of_answers_that_differ_in_form_no_program_is_given() -> None:
    rows = [LAYOUTS["SQuAD"](number) for number in range(ROWS)]
    assert "answers" in from_choices(rows, "rows.jsonl")
    rows[3]["answers"] = {"text": [], "answer_start": []}
    assert not from_choices(rows, "rows.jsonl")
    rows = [LAYOUTS["HellaSwag"](number) for number in range(ROWS)]
    rows[3]["label"] = "4"
    assert not from_choices(rows, "rows.jsonl")


def test_advice_never_makes_a_question_the_answer() -> None:
    write("SQuAD")
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    for row in rows:
        del row["answers"]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(errors.DataError) as error:
        propose(SourceConfig(path="rows.jsonl"))
    assert "completion=question" not in str(error.value)


def test_records_within_one_object_are_written_on_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(ROWS)]
    Path("all.json").write_text(json.dumps({"version": 1, "data": rows}))
    code, text = said(capsys, "init", "all.json", "--model", MODEL)
    assert code == errors.USER
    assert f"its `data` is a list of {ROWS} objects" in text
    program = PROGRAM.search(text)
    assert program is not None
    subprocess.run(program[1], shell=True, check=True)
    assert [json.loads(line) for line in Path(program[2]).read_text().splitlines()] == rows
    code, text = said(capsys, "init", program[2], "--model", MODEL, "-o", "run.yaml")
    assert code == errors.OK, text
