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
from kubetune.data.proposed.answers_as_texts import from_parts
from kubetune.data.proposed.proposing import propose
from kubetune.data.reading.examples import Chat, Pair
from kubetune.data.reading.formats import read
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
    "MMLU": {},
    "BoolQ": {"text": "question", "text_pair": "passage", "label": "answer"},
    "SQuAD": {"instruction": "question", "input": "context", "output": "answer"},
    "CNN/DailyMail": {"prompt": "article", "completion": "highlights"},
    "GSM8K": {},
    "DROP": {"instruction": "question", "input": "passage", "output": "answer"},
    "ARC": {},
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


def run_program(text: str) -> str:
    """Run the program that a text gives, and return the file that it makes."""
    [(program, made)] = PROGRAM.findall(text)
    program = program.replace("python3", sys.executable, 1)
    subprocess.run(["bash", "-c", program], check=True, env={"PATH": os.environ["PATH"]})
    return str(made)


def learned(capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Do what `init` says until it writes a run, and return the question and the answer of the second record."""
    path = "rows.jsonl"
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = init(capsys, path)
    for _ in range(3):
        if code == errors.OK:
            break
        path = run_program(text)
        code, text = init(capsys, path)
    assert code == errors.OK, text
    config = load_config(Path("run.yaml"))
    assert config.task == "causal_lm"
    source = config.data.train[0]
    record = json.loads(Path(path).read_text().splitlines()[1])
    example = read(record, source.format, dict(source.columns)).example
    if isinstance(example, Pair):
        return example.prompt, example.completion
    assert isinstance(example, Chat)
    *asked, answer = [str(message["content"]) for message in example.messages]
    return "\n".join(asked), answer


def records(row: str, number: int = 12) -> list[dict[str, Any]]:
    """Return records that differ in the number that stands for {n}, and in that for {m}, the next one."""
    texts = [row.replace("{n}", str(n)).replace("{m}", str(n + 1)) for n in range(number)]
    return [json.loads(text) for text in texts]


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        (
            # The ids are the first texts, and the longest text is no question.
            '{"thread": "Why is pot {n} hot?", "details": "I have seen it, and it was on the stove.", "answers": '
            '{"post_id": ["k3x{n}", "p{n}q"], "body": ["It is on a stove, {n}.", "No idea."], "votes": [7, 2]}}',
            "Why is pot 1 hot?",
            "It is on a stove, 1.",
        ),
        (
            '{"query": "Which town is it, {n}?", "answer": {"synonyms": ["the town {n}", "it"], "kind": "entity", '
            '"text": "Lyon {n}"}}',
            "Which town is it, 1?",
            "Lyon 1",
        ),
        (
            '{"question": "Which town is it, {n}?", "answer": ["Lyon {n}", "the town {n}"]}',
            "Which town is it, 1?",
            "Lyon 1",
        ),
        (
            '{"question": "Which town is it, {n}?", "answers": [{"answer_start": 3, "text": "Lyon {n}"}]}',
            "Which town is it, 1?",
            "Lyon 1",
        ),
        (
            '{"question": {"id": "x{n}", "text": "Which town, {n}?"}, "answers": {"spans": ["Lyon {n}"]}}',
            "Which town, 1?",
            "Lyon 1",
        ),
        (
            '{"question": "Which town, {n}?", "good_answers": ["None"], "gold_answers": ["Lyon {n}"]}',
            "Which town, 1?",
            "Lyon 1",
        ),
        (
            '{"question": "Which town, {n}?", "correct_answers": ["a town", "Lyon {n}"], "best_answer": "Lyon {n}"}',
            "Which town, 1?",
            "Lyon 1",
        ),
        (
            '{"story": "He went to Lyon {n}.", "title": "A man", "question_text": "Where did he go, {n}?", "answers": '
            '{"input_text": ["Lyon {n}"], "answer_start": [11]}}',
            "He went to Lyon 1.\n\nWhere did he go, 1?",
            "Lyon 1",
        ),
        (
            '{"question": "Which is best, {n}?", "answers": [{"body": "This is, {n}.", "rank": 1}, {"body": "No.", '
            '"rank": 2}]}',
            "Which is best, 1?",
            "This is, 1.",
        ),
        (
            '{"question": "Which is it, {n}?", "possible_answers": ["No, {n}.", "Yes, {n}."], "label": 1, "gold": '
            '"Yes, {n}."}',
            "Which is it, 1? A. No, 1. B. Yes, 1.",
            "Yes, 1.",
        ),
        (
            # What is asked for is an object.
            '{"instruction": "Call it, {n}.", "output": [{"name": "call_{n}", "arguments": {"number": {n}}}]}',
            "Call it, 1.",
            '[{"name": "call_1", "arguments": {"number": 1}}]',
        ),
    ],
)
def test_the_text_that_is_the_answer_is_learned(
    row: str, question: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, learns = learned(capsys, records(row))
    assert sorted(asked.split()) == sorted(question.split())
    assert learns == answer


@pytest.mark.parametrize(
    "row",
    [
        '{"instruction": "Write of {n}.", "completions": [{"model": "a", "response": "Of {n}."}, {"model": "b", '
        '"response": "No {n}."}], "correct_answers": ["None"]}',
        '{"question": "Who is {n}?", "responses": ["It is he.", "It is she, {n}."]}',
        '{"question": "Who is {n}?", "response": ["It is he.", "It is she, {n}."]}',
        '{"prompt": "Who is {n}?", "answers": [{"answer": "It is he.", "rank": 2}, {"answer": "She {n}.", "rank": 1}]}',
        '{"question": "Who is {n}?", "answers": {"text": ["It is he.", "She, {n}."], "score": [1, 5]}}',
        '{"question": "Who is {n}?", "answer": ["It is he.", "She, {n}."], "is_correct": [false, true]}',
        '{"question": "Who is {n}?", "possible_answers": ["It is he.", "She, {n}."]}',
        '{"prompt": "Who is {n}?", "turns": 1, "answers": [{"answer": "He.", "score": 2}, {"answer": "She.", "score": 5}]}',
        '{"question": "Who is {n}?", "plausible_answers": ["It is he."], "answers": ["He {n}.", "X."], "votes": [0, 1]}',
        '{"question": "Which are even, {n}?", "options": ["2", "3", "4"], "answer": ["A", "C"]}',
        '{"question": "Who is {n}?", "answer": [{"role": "assistant", "content": "He {n}."}, {"role": "user", '
        '"content": "No?"}]}',
    ],
)
def test_several_answers_are_said_and_none_of_them_is_taken(
    row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records(row)))
    code, text = init(capsys, "rows.jsonl")
    assert code == errors.USER
    assert "to be several answers to one prompt: write a record for each" in text
    assert "correct_answers" not in text
    assert not PROGRAM.findall(text)


@pytest.mark.parametrize(
    "row",
    [
        '{"story": "He went to Lyon {n}.", "questions": ["Who?", "Where?"], "answers": {"text": ["he", "Lyon {n}"]}}',
        '{"account": "He went to Lyon {n}.", "queries": ["Who?", "Where?"], "answers": ["he", "Lyon {n}"]}',
        '{"passage": "He went to Lyon {n}.", "question": ["Who?", "Where {n}?"], "answer": ["he", "Lyon"]}',
    ],
)
def test_several_questions_of_a_record_are_not_one(
    row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records(row)))
    code, text = init(capsys, "rows.jsonl")
    assert code == errors.USER
    assert "holds several questions of a record: write a record for each" in text
    assert not PROGRAM.findall(text)


@pytest.mark.parametrize(
    "row",
    [
        '{"question": "Who is {n}?", "answer": {"id": "e7b{n}", "page_id": "x{n}"}}',
        '{"question": "Who is {n}?", "answer": {"entity": "Ann {n}", "type": "person", "aliases": ["A {n}"]}}',
        '{"question": "Who is {n}?", "answer": ["k{n}x7"]}',
        '{"question": "Who is {n}?", "answer": {"text": "NULL"}}',
        '{"question": "Who is {n}?", "answer": {"text": "{\\"aliases\\": [{n}]}"}}',
    ],
)
def test_no_id_and_no_object_becomes_an_answer(
    row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records(row)))
    code, text = init(capsys, "rows.jsonl")
    assert code == errors.USER
    assert "Write the part of it that is the right answer there as a text" in text
    assert not PROGRAM.findall(text)


@pytest.mark.parametrize(
    ("row", "marks", "choices", "asked", "answer"),
    [
        (
            '{"question": "How many, {n}?", "options": ["(A) {n} cats", "(B) {m} cats"], "rationale": "There are {n}, '
            'so it is A.", "correct": "MARK"}',
            "ABAA",
            ["(A) 1 cats", "(B) 2 cats"],
            "How many, 1?",
            "(B) 2 cats",
        ),
        (
            '{"stem": "What is it, {n}?", "title": "A riddle of {n}.", "choices": {"a": "cat {n}", "b": "dog {n}"}, '
            '"gold": "MARK"}',
            "abab",
            ["a. cat 1", "b. dog 1"],
            "What is it, 1?",
            "dog 1",
        ),
        (
            '{"problem": "What is it, {n}?", "alternatives": ["cat {n}", "dog {n}", "cow {n}"], "why": "It says so, {n}.",'
            ' "right_one": MARK}',
            "1231",
            ["A. cat 1", "B. dog 1", "C. cow 1"],
            "What is it, 1?",
            "dog 1",
        ),
        (
            '{"context": "The cat {n} ran.", "choice1": "It is far {n}.", "choice2": "It is old {n}.", "question": '
            '"What came of it, {n}?", "label": MARK}',
            "0110",
            ["1. It is far 1.", "2. It is old 1."],
            "The cat 1 ran.",
            "It is old 1.",
        ),
        (
            '{"question": "What is it, {n}?", "choices": ["cat {n}", "dog {n}"], "answer": MARK}',
            "0110",
            ["A. cat 1", "B. dog 1"],
            "What is it, 1?",
            "dog 1",
        ),
    ],
)
def test_choices_in_any_column_are_asked_and_the_right_one_is_learned(
    row: str,
    marks: str,
    choices: list[str],
    asked: str,
    answer: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = []
    for n, text in enumerate([row.replace("MARK", mark) for mark in marks * 3]):
        rows.append(records(text)[n])
    question, learns = learned(capsys, rows)
    assert asked in question
    assert set(choices) <= set(question.splitlines())
    assert learns == answer


@pytest.mark.parametrize(
    "row",
    [
        '{"question": "What is it, {n}?", "choices": ["cat {n}", "dog {n}", "cow {n}"], "answer": 1}',
        '{"question": "What is it, {n}?", "options": ["cat {n}", "dog {n}"], "rationale": "It says so, {n}."}',
        '{"question": "What is it, {n}?", "options": ["yes", "no"], "rationale": "It says so, {n}.", "correct": "C"}',
    ],
)
def test_choices_of_which_no_column_tells_the_right_one_are_said(
    row: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records(row, 60)))
    code, text = init(capsys, "rows.jsonl")
    assert code == errors.USER
    assert "beside `question`, and no column tells for sure which is right" in text
    assert not PROGRAM.findall(text)
    assert not list(pasted_columns(text))


def test_choices_are_no_classes_of_columns_that_the_user_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = []
    for n, row in enumerate(
        records('{"question": "Who is {n}?", "options": ["he {n}", "she {n}"]}')
    ):
        rows.append({**row, "right": "AB"[n % 2]})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--task", "sequence_classification", "--columns", "text=question", "label=right")
    code, text = init(capsys, "rows.jsonl", *words)
    assert code == errors.USER
    made = json.loads(Path(run_program(text)).read_text().splitlines()[1])
    assert (made["question"], made["answer"]) == ("Who is 1?\nA. he 1\nB. she 1", "she 1")


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
    assert "`correct_answers` holds the answer" in from_parts(rows, "rows.jsonl")


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
    assert "answers" in from_parts(rows, "rows.jsonl")
    rows[3]["answers"] = {"text": [], "answer_start": []}
    assert not from_parts(rows, "rows.jsonl")
    rows = [LAYOUTS["HellaSwag"](number) for number in range(ROWS)]
    rows[3]["label"] = "4"
    assert not from_parts(rows, "rows.jsonl")


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
