"""Columns that hold texts or classes: they are read, or refused or named with what would use them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli
from kubetune.cli.local.demo import EMBEDDED
from kubetune.config.load import load_config
from kubetune.config.schema import RecordKind, SourceConfig
from kubetune.data.column_facts import Columns
from kubetune.data.column_names import TRUTHS, names_metadata, names_subject, names_thought
from kubetune.data.findings.references import asked_of
from kubetune.data.reading.examples import Chat, Pair, Preference
from kubetune.data.reading.formats import read
from kubetune.data.unread_columns import left_out
from tests import records

MODEL = str(EMBEDDED / "model")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines(values: Sequence[dict[str, Any]], name: str = "d.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(value) + "\n" for value in values))
    return name


def questions(value: dict[str, Any], columns: dict[str, str], kind: RecordKind = "text") -> str:
    """Return what the user asks in a record."""
    example = read(value, "auto", columns, kind=kind).example
    if isinstance(example, Preference):
        example = example.chosen
    assert isinstance(example, Chat)
    return str(next(m["content"] for m in example.messages if m["role"] == "user"))


PAIR = {
    "question": "How many rows?",
    "context": "CREATE TABLE t (a int)",
    "chosen": "One row.",
    "rejected": "No.",
}
SUBJECTS: list[tuple[dict[str, Any], RecordKind, dict[str, str]]] = [
    (records.SQL_CREATE_CONTEXT, "text", {"instruction": "question", "input": "context", "output": "answer"}),
    (records.DOLLY, "text", {"input": "context", "output": "response"}),
    (PAIR, "pair", {"instruction": "question", "input": "context"}),
    (
        {**records.SQL_CREATE_CONTEXT, "answer": 3},
        "prompt",
        {"instruction": "question", "input": "context", "output": "answer"},
    ),
    (
        {"prompt": "What is he?", "retrieved_documents": ["He is a cook.", "He is old."], "completion": "A cook."},
        "text",
        {"instruction": "prompt", "input": "retrieved_documents", "output": "completion"},
    ),
    (
        {"query": "谁来了?", "参考": 1, "passage": "昨天晚上小王和小李来了。", "response": "小王和小李。"},
        "text",
        {"instruction": "query", "input": "passage", "output": "response"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind", "columns"), SUBJECTS)
def test_a_text_that_the_question_is_about_is_never_left_out_silently(
    value: dict[str, Any], kind: RecordKind, columns: dict[str, str]
) -> None:
    name = columns["input"]
    with pytest.raises(
        ValueError, match=f"has `{name}` beside .* left out of the prompt; give `columns"
    ) as error:
        read(value, kind=kind)
    pairs = " ".join(f"{key}={column}" for key, column in columns.items())
    assert f"--columns {pairs}" in str(error.value)
    # What the refusal says to write works.
    if value.get("answer") == 3:
        value = {**value, "answer": "3"}
    text = value[name] if isinstance(value[name], str) else "\n".join(value[name])
    assert questions(value, columns, kind).endswith(f"\n{text}")
    # Whoever names the question and not the text has decided.
    decided = {key: column for key, column in columns.items() if key != "input"}
    decided.setdefault("instruction", "instruction")
    reading = read(value, columns=decided, kind=kind)
    assert kind == "prompt" or name in reading.unused


def test_the_first_thing_that_one_tries_on_dolly_works() -> None:
    asked = questions(records.DOLLY, {"input": "context"})
    assert asked == f"{records.DOLLY['instruction']}\n{records.DOLLY['context']}"
    assert (
        questions({**records.DOLLY, "context": ""}, {"input": "context"})
        == records.DOLLY["instruction"]
    )


@pytest.mark.parametrize(
    "value",
    [
        {"question": "Q is that?", "context": "", "answer": "A is."},
        {"question": "Read: One two. Who?", "context": "One two.", "answer": "Two."},
        {"question": "Q is that?", "context": [None, {"title": " "}], "answer": "A is."},
        {"question": "Add 80 and 3.5.", "context": [80, "3.5"], "answer": "83.5"},
        {
            "question": "Red or blue? A) A rose. B) The sky.",
            "options": ["A rose.", "The sky."],
            "answer": "A",
        },
        {
            "prompt": [{"role": "user", "content": "Which? A) A rose. B) The sky."}],
            "choices": {"A": "A rose.", "B": "The sky."},
            "completion": [{"role": "assistant", "content": "A"}],
        },
        {"question": "Q is that?", "context_length": "one two", "answer": "A is."},
        {"instruction": "Sum up.", "input": "A text. B.", "output": "AB.", "document": "A text."},
    ],
)
def test_what_says_nothing_more_than_the_question_is_no_subject(value: dict[str, Any]) -> None:
    assert isinstance(read(value).example, Chat)


@pytest.mark.parametrize(
    ("beside", "kind"),
    [
        ({"context": "80, 33, 95, 46", "answer": "It is 254."}, "text"),
        ({"context": {"heat": 27, "damp": 19}, "answer": "It is."}, "text"),
        ({"context": [18, 23.5], "answer": "It is."}, "text"),
        ({"context": 0, "answer": "It is."}, "text"),
        ({"context": "tree", "answer": "It is."}, "text"),
        ({"documents": [{"id": 7}], "chosen": "It is.", "rejected": "No."}, "pair"),
        ({"context": [23, 4], "ground_truth": "27"}, "prompt"),
        ({"table": [[1, 0], [3, 4]], "answer": "The row 0 has it."}, "text"),
        ({"choices": {"A": 3, "B": 4}, "answer": "B"}, "text"),
        ({"options": [0, 2, 3], "answer": "B"}, "text"),
    ],
)
def test_what_a_question_is_about_needs_no_letters(
    beside: dict[str, Any], kind: RecordKind
) -> None:
    value = {"question": "What is 23 and the rest?", **beside}
    name = next(iter(beside))
    with pytest.raises(
        ValueError, match=f"has `{name}` beside `question`, .* left out of the prompt"
    ):
        read(value, kind=kind)


def test_numbers_beside_messages_are_what_they_are_about() -> None:
    turns = [{"role": "user", "content": "Add them."}, {"role": "assistant", "content": "7"}]
    for context in ("0, 3, 4", {"a": 3, "b": 4}, [3, 4]):
        with pytest.raises(ValueError, match="has `context` beside `messages`"):
            read({"messages": turns, "context": context})


def test_options_that_are_no_text_are_refused_too() -> None:
    value = {
        "question": "Which is red?",
        "choices": {"text": ["A rose.", "The sky."]},
        "answer": "A rose.",
    }
    with pytest.raises(
        ValueError, match=r"has `choices` beside `question`.* write its text into `question`"
    ):
        read(value)


def test_a_text_beside_a_question_and_an_answer_is_decided_by_the_user() -> None:
    value = {"text": "Rain fell all day.", "question": "What fell then?", "answer": "Rain fell."}
    with pytest.raises(
        ValueError, match="has `text` beside `question` and `answer`, and either would be lost"
    ):
        read(value)
    assert questions(
        value, {"instruction": "question", "input": "text", "output": "answer"}
    ).endswith("all day.")
    # A text that holds both is how they are written for training.
    whole = {**value, "text": "Q: What fell \n then? A: Rain fell."}
    assert not isinstance(read(whole).example, Chat)
    assert not isinstance(read(value, "text").example, Chat)


@pytest.mark.parametrize("answer", ["Rain", "all day", "yes", "It was snow."])
@pytest.mark.parametrize("asked", ["question", "instruction", "prompt"])
@pytest.mark.parametrize("named", ["answer", "output", "completion"])
def test_a_passage_is_known_whatever_the_answer_takes_from_it(
    answer: str, asked: str, named: str
) -> None:
    value = {"text": "Rain fell all day.", asked: "What fell then?", named: answer}
    with pytest.raises(
        ValueError, match=f"has `text` beside `{asked}` and `{named}`, and either would be lost"
    ) as error:
        read(value)
    pairs = {"instruction": asked, "input": "text", "output": named}
    columns = {key: name for key, name in pairs.items() if key != name}
    words = ", ".join(f"{key}: {name}" for key, name in columns.items())
    assert f"`columns: {{{words}}}`" in str(error.value)
    assert questions(value, columns) == "What fell then?\nRain fell all day."
    assert questions({**value, "text": ""}, {"instruction": asked, "output": named})


def test_a_passage_is_no_text_to_learn_under_other_kinds() -> None:
    passage = {"text": "Rain fell all day.", "question": "Then?"}
    for kind, answers in (
        ("pair", {"chosen": "Rain.", "rejected": "Snow."}),
        ("prompt", {"ground_truth": "Rain"}),
        ("prompt", {}),
    ):
        with pytest.raises(ValueError, match="has `text` beside `question`, and it would be left"):
            read({**passage, **answers}, kind=kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("beside", "columns"),
    [
        ({"response": "7"}, {"prompt": "text", "completion": "response"}),
        ({"summary": "7 cows"}, {"prompt": "text", "completion": "summary"}),
        ({"Translation": "7 Kühe"}, {"prompt": "text", "completion": "Translation"}),
        ({"target": "There are 7 cows"}, {"prompt": "text", "completion": "target"}),
        ({"input": "A cow.", "target": "7"}, {"instruction": "text", "output": "target"}),
        (
            {"prompt": "How many?", "target": "7"},
            {"instruction": "prompt", "input": "text", "output": "target"},
        ),
    ],
)
def test_what_is_written_for_a_text_is_not_lost(
    beside: dict[str, str], columns: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"The farm has 7 cows and {n} other animals.", **beside} for n in range(30)]
    code, output = check(lines(rows), "--model", MODEL, capsys=capsys)
    words = ", ".join(f"{key}: {name}" for key, name in columns.items())
    assert code == 2
    assert f"beside `text`, and it would be lost; give `columns: {{{words}}}`" in output
    given = [f"{key}={name}" for key, name in columns.items()]
    code, output = check("d.jsonl", "--model", MODEL, "--columns", *given, capsys=capsys)
    assert (code, "not used" in output) == (0, False)
    # A class is none, nor is what stands beside a text that was chosen.
    assert not isinstance(read({**rows[0], **beside}, "text").example, Chat)
    assert not isinstance(read({"text": "It rains.", "target": "rain"}).example, Chat)
    if "prompt" not in columns:
        return
    assert inited(rows, capsys=capsys)[0] == 0
    assert load_config(Path("run.yaml")).data.train[0].columns == columns


def test_a_question_with_input_is_one_question() -> None:
    value = {"question": "How many?", "input": "CREATE TABLE t", "output": "SELECT 1"}
    assert questions(value, {}) == "How many?\nCREATE TABLE t"


THOUGHT = "First I add, then I look."


@pytest.mark.parametrize("key", ["reasoning", "thinking"])
def test_formulas_are_thoughts_as_words_are(key: str) -> None:
    for thought in (THOUGHT, "1*3 = 3, 3+5 = 8", "Add.", ["3+5", "= 8"], "= 8"):
        example = read({"question": "Q?", "answer": "a", key: thought}).example
        assert isinstance(example, Chat)
        assert example.messages[-1][key].startswith(thought[0])
    # A number alone may be a grade: it is neither learned nor left out by a guess.
    value = {"question": "Q?", "answer": "a", key: "8"}
    with pytest.raises(
        ValueError, match=rf"has `{key}: \"8\"`, .* `columns: {{reasoning_content: {key}}}`"
    ):
        read(value)
    example = read(value, columns={"reasoning_content": key}).example
    assert isinstance(example, Chat)
    assert example.messages[-1]["reasoning_content"] == "8"


def test_formulas_in_a_column_of_thoughts_are_thoughts() -> None:
    rows = [{"cot": f"{n}*3 = {3 * n}", "reasoning_tokens": 100 + n} for n in range(40)]
    assert meanings([{"question": "Q?", "answer": "a", **row} for row in rows])["cot"] == "thought"
    assert "reasoning_tokens" not in meanings(rows)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    "value", [{"instruction": "Q?", "output": "a"}, {"question": "Q?", "answer": "a"}]
)
def test_thoughts_in_a_column_are_read(key: str, value: dict[str, Any]) -> None:
    example = read({**value, key: THOUGHT}).example
    assert isinstance(example, Chat)
    assert example.messages[-1][key] == THOUGHT
    # An effort is no thought, but under the name that means nothing else.
    example = read({**value, key: "high"}).example
    assert isinstance(example, Chat)
    assert (key in example.messages[-1]) == (key == "reasoning_content")
    # A number of tokens is none under any.
    example = read({**value, key: 512}).example
    assert isinstance(example, Chat)
    assert key not in example.messages[-1]


def test_thoughts_under_other_names_are_read_where_columns_say_so() -> None:
    columns = {"reasoning_content": "thinking_trajectories"}
    example = read(records.S1K, columns=columns).example
    assert isinstance(example, Chat)
    assert example.messages[-1]["reasoning_content"].startswith("Let me add")


def test_names_tell_what_columns_are() -> None:
    assert all(
        map(names_subject, ("Context", "retrieved_docs", "sourceText", "sql_context", "Background"))
    )
    assert not any(map(names_subject, ("context_id", "document_url", "title", "contextual")))
    assert all(
        map(names_thought, ("Complex_CoT", "thinking_trajectories", "rationale", "thoughts"))
    )
    assert not any(map(names_thought, ("cotton", "answer")))
    assert all(
        map(names_metadata, ("ids", "prompt_id", "createdAt_date", "lang", "source", "split"))
    )
    assert not any(map(names_metadata, ("verdict", "emotion", "category")))


_CODE = "Return the sum of all numbers in the list, or nothing if the list is empty"


@pytest.mark.parametrize(
    "name", ["source_code", "source", "user_message", "file_content", "repo_files", "row_data"]
)
def test_a_text_is_a_text_though_its_name_has_a_word_of_an_id(name: str) -> None:
    rows = [{"question": f"What is {n}?", name: f"{_CODE} {n}", "answer": "a"} for n in range(30)]
    assert meanings(rows)[name] == "text"


@pytest.mark.parametrize("value", ["x{}", "The Guardian {}", "Mon Nov 30 {}", "https://a.b/{}"])
def test_where_a_text_is_from_is_no_text(value: str) -> None:
    rows = [{"question": f"What is {n}?", "source": value.format(n)} for n in range(30)]
    assert "source" not in meanings(rows)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"user_message": _CODE, "assistant_message": "A sum"}, "prompt=user_message completion=assistant_message"),
        (
            {"source_text": _CODE, "target_text": "Es ist so", "target_lang": "de"},
            "prompt=source_text completion=target_text",
        ),
        (
            {"title": "A sum of numbers", "file_content": _CODE, "label": "good"},
            "text=title text_pair=file_content label=label",
        ),
    ],
)  # fmt: skip
def test_advice_for_unknown_columns_leaves_out_no_text(
    row: dict[str, str], columns: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for n in range(40):
        record = {name: f"{text} {n}" for name, text in row.items()}
        if "label" in row:
            record["label"] = ("good", "bad")[n % 2]
        if "target_lang" in row:
            record["target_lang"] = "de"
        rows.append(record)
    assert cli.main(["init", lines(rows)]) == 2
    assert f"Say which is which: `--columns {columns}`" in capsys.readouterr().err


def meanings(values: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return what the columns of records are, as far as they hold texts or classes."""
    columns = Columns()
    for value in values:
        for name in value:
            columns.note(name, value, {}, ("A text that is used.",))
    return {name: facts["meaning"] for name, facts in columns.to_json(len(values)).items()}


def test_classes_are_known_by_their_shape() -> None:
    rows = [
        {
            "verdict": ("happy", "unhappy")[n % 2],
            "grade": n % 5,
            "id": n % 3,
            "split": "train" if n % 4 else "test",
            "always": "yes",
            "name": f"n{n}",
            "day": f"2026-01-{n % 9 + 1:02d}",
            "share": f"0.{n % 4}",
            "copy": "A text that is used.",
            "remark": f"This is what was remarked of row {n}.",
            "rationale": "It is so because it is.",
        }
        for n in range(40)
    ]
    assert meanings(rows) == {
        "verdict": "class",
        "grade": "class",
        "id": "group",
        "split": "group",
        "remark": "text",
        "rationale": "thought",
    }
    assert meanings(rows[:20])["verdict"] == "class"
    assert "verdict" not in meanings(rows[:5]), "too few rows to know"


def test_whole_numbers_with_a_point_are_classes_too() -> None:
    seen = Columns()
    for number in range(60):
        record = {"text": f"It was fine {number}.", "stars": float(number % 5 + 1)}
        seen.note("stars", record, {}, ())
    assert seen["stars"].meaning("stars", records=60) == "class"


def test_numbers_beside_a_text_are_named_with_what_would_predict_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"text": f"House {n} is for sale.", "price": n / 7} for n in range(60)]
    words = ["init", lines(rows), "--model", MODEL, "-o"]
    assert cli.main([*words, "texts.yaml"]) == 0
    pasted = "--task sequence_classification --columns text=text label=price"
    assert f"`price` (numbers) is not used. `kubetune init {words[1]} {pasted}`" in (
        capsys.readouterr().out
    )
    assert cli.main([*words, "numbers.yaml", *pasted.split()]) == 0
    assert load_config(Path("numbers.yaml")).classification.problem_type == "regression"


def test_classes_beside_an_answer_are_named_with_what_would_use_them() -> None:
    columns = Columns()
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Say {n}"},
                {"role": "assistant", "content": f"{n}"},
            ],
            "lang": ("en", "de")[n % 2],
            "topic": ("law", "art", "sport")[n % 3],
            "reward": n % 2,
            "is_good": n % 2 == 0,
            "row_id": n,
        }
        for n in range(40)
    ]
    for row in rows:
        for name in row.keys() - {"messages"}:
            columns.note(name, row, {}, ("Say",))
    advice = {column.name: column.advice for column in left_out(columns.to_json(40), "t.jsonl")}
    assert advice.keys() == {"lang", "topic", "reward", "is_good"}
    for name in ("lang", "topic"):
        assert advice[name].startswith("A file for each of its values, as sources of `data.train`")
    for name in ("reward", "is_good"):
        assert f"`data.train.columns: {{label: {name}}}`, `task: preference`" in advice[name]


BAD_IF_TRUE = [
    "is_bad",
    "flagged",
    "toxic",
    "isHallucinated",
    "contains-spam",
    "was_refused",
    "not_helpful",
    "has_errors",
]
GOOD_IF_TRUE = [
    "is_good",
    "correct",
    "non_toxic",
    "not_flagged",
    "error_free",
    "no_mistakes",
    "is_free",
    "verified",
]


def judged(name: str, value: Any) -> list[dict[str, Any]]:
    """Return conversations, of which every second one holds a value in a column."""
    rows = []
    for n in range(40):
        asked = {"role": "user", "content": f"What is river number {n}?"}
        answer = {"role": "assistant", "content": f"It is stone {n}."}
        rows.append({"messages": [asked, answer], name: value(n % 2 == 0)})
    return rows


@pytest.mark.parametrize("name", GOOD_IF_TRUE)
def test_a_column_that_may_say_what_is_good_is_advised_as_the_verdict(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(judged(name, bool))
    assert cli.main(["data", "check", path]) == 0
    label = name if "-" not in name else f'"{name}"'
    assert f"{{label: {label}}}`, `task: preference`" in capsys.readouterr().out


@pytest.mark.parametrize("name", BAD_IF_TRUE)
@pytest.mark.parametrize("value", [bool, int, lambda is_bad: str(is_bad)])
def test_a_column_that_says_what_is_bad_is_never_advised_as_the_verdict(
    name: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(judged(name, value))
    assert cli.main(["data", "check", path]) == 0
    output = capsys.readouterr().out
    assert f"`{name}` seems to be true for bad ones" in output
    assert "{label: " not in output
    # What it says to paste works, and the answers that are called bad are bad.
    subprocess.run(output.split("give d-judged.jsonl: `")[1].split("`")[0], shell=True, check=True)
    made = [json.loads(line) for line in Path("d-judged.jsonl").read_text().splitlines()]
    assert [row["label"] for row in made] == [n % 2 == 1 for n in range(40)]
    assert cli.main(["init", "d-judged.jsonl", "--model", MODEL, "-o", "run.yaml"]) == 0
    assert load_config(Path("run.yaml")).preference.loss == "kto"


@pytest.mark.parametrize("name", ["is_bad", "is_good"])
def test_a_verdict_that_is_called_the_opposite_is_warned_of_by_each_verb(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(judged(name, bool))
    run = {
        "model": MODEL,
        "task": "preference",
        "preference": {"loss": "kto"},
        "data": {"train": {"path": path, "columns": {"label": name}}, "cache": "cache"},
    }
    Path("run.yaml").write_text(json.dumps(run))
    words = ["--model", MODEL, "--task", "preference", "--columns", f"label={name}"]
    for command in (["plan", "run.yaml"], ["data", "check", "run.yaml"], ["init", path, *words]):
        if command[0] == "init":
            command += ["-o", "new.yaml"]
        assert cli.main(command) == 0
        warned = f"`{name}` is read as the verdict on answers, true for good ones"
        assert (warned in capsys.readouterr().out) == (name == "is_bad"), command


def test_a_grade_of_an_answer_is_advised_as_no_class_of_its_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (
        ("helpfulness", lambda n: n % 5),
        ("quality", lambda n: ("low", "high")[n % 2]),
    ):
        rows = [
            {"prompt": f"What is {n}?", "response": f"It is {n + 1}.", name: value(n)}
            for n in range(40)
        ]
        assert cli.main(["data", "check", lines(rows)]) == 0
        output = capsys.readouterr().out
        assert (
            f"`{name}` ({len({value(n) for n in range(40)})} values) is not used. A file for each"
            in output
        )
        assert "sequence_classification" not in output


def test_short_texts_are_texts_but_ids_are_not() -> None:
    rows = [
        {
            "code": f"def f(x): return x + {n}",
            # Empty values say nothing of the others.
            "ctx_b": "" if n % 4 else "then, the man",
            "subject": ("abstract_algebra", "high_school_physics", "anatomy")[n % 3],
            "tests": [f"assert f({n}) == {n}"],
            "entry": f"item_{n}_of_list",
            "uuid_like": f"f37e81fa-ef7b-4583-b671-{n:012d}",
            "number": f"{n} {n + 1}",
            "nothing": "",
        }
        for n in range(24)
    ]
    assert meanings(rows) == {"code": "text", "ctx_b": "text", "subject": "class", "tests": "text"}


def test_the_counts_of_two_batches_are_those_of_all() -> None:
    rows = [{"verdict": str(n % 7), "remark": "One two three four five six"} for n in range(60)]
    parts = []
    for part in (rows[:10], rows[10:], rows):
        columns = Columns()
        for row in part:
            for name in row:
                columns.note(name, row, {}, ())
        parts.append(columns)
    assert (parts[0] + parts[1]).to_json(60) == parts[2].to_json(60)
    assert [column.what for column in left_out(parts[2].to_json(60), "x.csv")] == [
        "7 values",
        "a text",
    ]


def check(path: str, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["data", "check", path, *words])
    output = capsys.readouterr()
    return code, output.out + output.err


def test_init_makes_a_classifier_of_a_column_that_is_a_class(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        {"review": f"The film number {n} was seen.", "verdict": ("happy", "unhappy")[n % 2]}
        for n in range(120)
    ]
    assert cli.main(["init", lines(rows), "--model", MODEL, "-o", "run.yaml"]) == 0
    config = load_config(Path("run.yaml"))
    assert config.task == "sequence_classification"
    assert config.data.train[0].columns == {"text": "review", "label": "verdict"}


def test_a_class_that_is_not_used_is_named_everywhere_with_what_would_use_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        {
            "text": f"The film number {n} was seen.",
            "verdict": ("happy", "unhappy")[n % 2],
            "mood": ("a", "b")[n % 2],
        }
        for n in range(120)
    ]
    path = lines(rows)
    words = "--task sequence_classification --columns text=text label=verdict"
    # Of two classes nobody knows which is meant.
    assert cli.main(["init", path, "--model", MODEL, "-o", "run.yaml"]) == 0
    assert (
        f"`verdict` (2 values) is not used. `kubetune init {path} {words}`"
        in capsys.readouterr().out
    )
    assert words in Path("run.yaml").read_text()
    for output in (check("run.yaml", capsys=capsys)[1], check(path, capsys=capsys)[1]):
        assert "`verdict` (2 values) is not used" in output
        assert words in output
    assert "warning: train: `verdict`" in check("run.yaml", capsys=capsys)[1]
    # What it says to paste works.
    assert cli.main(["init", path, *words.split(), "--model", MODEL, "-o", "c.yaml"]) == 0
    assert check("c.yaml", capsys=capsys)[0] == 0


def test_init_puts_the_text_that_questions_are_about_into_the_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = lines([records.SQL_CREATE_CONTEXT] * 30)
    assert cli.main(["init", path, "--model", MODEL, "-o", "run.yaml"]) == 0
    columns = {"instruction": "question", "input": "context", "output": "answer"}
    assert load_config(Path("run.yaml")).data.train[0].columns == columns
    code, output = check("run.yaml", capsys=capsys)
    assert code == 0
    assert "CREATE TABLE" in output


@pytest.mark.parametrize(
    ("record", "name", "columns"),
    [
        (
            {"question": "Who is it?", "answer": "It is the man."},
            "cot",
            {"reasoning_content": "cot"},
        ),
        (
            {"prompt": "Who is it?", "completion": "It is the man."},
            "cot",
            {"instruction": "prompt", "output": "completion", "reasoning_content": "cot"},
        ),
        ({"messages": [{"role": "user", "content": "Who?"}]}, "cot", {}),
        ({"prompt": "Who?", "chosen": "It is he.", "rejected": "It is not."}, "rationale", {}),
    ],
)
def test_thoughts_are_advised_only_where_they_can_be_read(
    record: dict[str, Any], name: str, columns: dict[str, str]
) -> None:
    row = {**record, name: "They came by the road, so it is the man."}
    seen = Columns()
    seen.note(name, row, {}, ())
    assert seen[name].use == columns
    (column,) = left_out(seen.to_json(1), "x.jsonl")
    assert column.meaning == "thought"
    assert ("columns:" in column.advice) == bool(columns)
    if columns:
        answer = read(row, "auto", columns).example
        assert isinstance(answer, Chat)
        assert answer.messages[-1]["reasoning_content"] == row[name]


def test_init_takes_conversations_whose_thoughts_stand_beside_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk = [{"role": "user", "content": "Who is it?"}, {"role": "assistant", "content": "He."}]
    path = lines(
        [{"messages": talk, "reasoning": f"It is he, for the {n}th time."} for n in range(9)]
    )
    assert cli.main(["init", path, "--model", MODEL, "-o", "run.yaml"]) == 0
    output = capsys.readouterr().out
    assert "`reasoning` (thoughts) is not used. Write them into the messages" in output
    assert check("run.yaml", capsys=capsys)[0] == 0


def test_advice_names_no_columns_that_would_not_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    prose = "a text of more than five words, which nothing reads"
    texts = [f"{prose} {n}" for n in range(40)]
    talk = [
        {"role": "user", "content": "Who is it?"},
        {"role": "assistant", "content": "Ann Lee."},
    ]
    chats = [{"messages": talk, "problem": text, "remark": text, "answer": "4"} for text in texts]
    labelled = [
        {"question": f"Is it {n}?", "remark": text, "answer": n % 2 == 0}
        for n, text in enumerate(texts)
    ]
    pairs = [
        {"premise": text, "hypothesis": text, "label": n % 3, "genre": "ab"[n % 2]}
        for n, text in enumerate(texts)
    ]
    classes = ["--task", "sequence_classification", "--columns", "text=question", "label=answer"]
    for rows, more in ((chats, []), (labelled, classes), (pairs, [])):
        path = lines(rows)
        Path("run.yaml").unlink(missing_ok=True)
        assert cli.main(["init", path, "--model", MODEL, "-o", "run.yaml", *more]) == 0
        output = "".join(capsys.readouterr())
        assert "is not used" in output
        assert "instruction:" not in output
        assert "TEXT" not in output


def test_thoughts_that_nothing_reads_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**records.S1K, "question": f"What is {n} and 2?"} for n in range(30)]
    _, output = check(lines(rows), "--model", MODEL, capsys=capsys)
    assert "warning: train: `thinking_trajectories` (thoughts) is not used, in 30 records" in output
    assert "`data.train.columns: {reasoning_content: thinking_trajectories}`" in output


@pytest.mark.parametrize("word", ["{}{}", "7{}", "wiki"])
def test_single_words_that_a_question_is_about_are_named(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"question": "Translate it.", "context": word.format(n, "a"), "answer": f"das {n}"}
        for n in range(20)
    ]
    columns = ["--columns", "instruction=question", "output=answer"]
    _, output = check(lines(rows), "--model", MODEL, *columns, capsys=capsys)
    assert "warning: train: `context` (a text) is not used, in 20 records" in output
    assert "keys not used: context" not in output


def test_init_reads_thoughts_under_another_name() -> None:
    assert cli.main(["init", lines([records.S1K] * 30), "--model", MODEL, "-o", "run.yaml"]) == 0
    columns = load_config(Path("run.yaml")).data.train[0].columns
    assert columns == {"reasoning_content": "thinking_trajectories"}


@pytest.mark.parametrize(
    ("value", "task", "reward"),
    [
        (records.VERL_GSM8K, "grpo", "numeric"),
        (records.OPENAI_REINFORCEMENT, "grpo", "numeric"),
        (
            {"prompt": [{"role": "user", "content": "Who is it?"}], "ground_truth": "Ann Lee"},
            "grpo",
            "exact_match",
        ),
        (records.OPENAI_DPO, "preference", None),
        (records.ULTRACHAT, "causal_lm", None),
        (records.NO_ROBOTS, "causal_lm", None),
        (records.HERMES, "causal_lm", None),
        (records.PLAIN_GSM8K, "causal_lm", None),
        (records.DOLLY, "causal_lm", None),
    ],
)
def test_what_init_proposes_can_be_checked(
    value: dict[str, Any], task: str, reward: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines([value] * 30)
    assert cli.main(["init", path, "--model", MODEL, "-o", "run.yaml"]) == 0
    config = load_config(Path("run.yaml"))
    assert config.task == task
    assert [item.name for item in config.rewards] == ([reward] if reward else [])
    if value is not records.HERMES:  # the demo's template takes no results of tools
        assert check("run.yaml", capsys=capsys)[0] == 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"messages": [{"role": "user", "content": "Who is it?"}]},
            "prompts without right answers",
        ),
        (
            {
                "prompt": [{"role": "user", "content": "Who is it?"}],
                "ground_truth": "one two " * 20,
            },
            "right answers of 40 words",
        ),
    ],
)
def test_init_proposes_no_reward_that_nobody_can_get(
    value: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", lines([value] * 30), "--model", MODEL, "-o", "run.yaml"]) == 2
    assert words in capsys.readouterr().err
    assert not Path("run.yaml").exists()


def test_labels_that_are_many_numbers_are_a_regression(capsys: pytest.CaptureFixture[str]) -> None:
    for labels in ([n * 0.2 for n in range(30)], [n * n for n in range(30)]):
        rows = [
            {"sentence": f"Sentence {n} here.", "label": label} for n, label in enumerate(labels)
        ]
        Path("run.yaml").unlink(missing_ok=True)
        assert cli.main(["init", lines(rows), "--model", MODEL, "-o", "run.yaml"]) == 0
        assert load_config(Path("run.yaml")).classification.problem_type == "regression"
        assert "numbers to predict" in Path("run.yaml").read_text()
    rows = [{"sentence": f"Sentence {n} here.", "label": n % 50} for n in range(100)]
    Path("run.yaml").unlink()
    assert cli.main(["init", lines(rows), "--model", MODEL, "-o", "run.yaml"]) == 0
    assert load_config(Path("run.yaml")).classification.problem_type == "auto", "fifty intents"


@pytest.mark.parametrize(
    "value",
    [records.XLAM, records.SQUAD, records.SAFE_RLHF, records.HELPSTEER3, records.VERL_GSM8K],
)
def test_advice_names_no_column_that_does_not_fit(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        read(value)
    advice = str(error.value).partition("expected")[2]
    for name in (
        "=id",
        "answers",
        "extra_info",
        "safer",
        "better",
        "domain",
        "overall",
        "response",
    ):
        assert f"completion={name}" not in advice
        assert name not in advice.partition("--columns")[2]


def test_the_preferences_of_openai_are_read() -> None:
    example = read(records.OPENAI_DPO, kind="pair").example
    assert isinstance(example, Preference)
    assert isinstance(example.chosen, Chat)
    assert example.chosen.messages[-1]["content"] == "It is warm today."
    with pytest.raises(ValueError, match="is preference data"):
        read(records.OPENAI_DPO)


def test_a_prompt_is_not_shown_as_what_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = [{"role": "user", "content": "What are 70 and 2?"}]
    answered = {"prompt": prompt, "ground_truth": "72"}
    base = ["--model", MODEL, "task=grpo", "rewards=[exact_match]"]
    _, output = check(lines([answered] * 3), *base, capsys=capsys)
    assert "row 1 (the right answer stands between" in output
    assert "what is trained" not in output
    _, output = check(lines([{"prompt": prompt}] * 3), *base, capsys=capsys)
    assert "row 1 (a prompt: answers to it are drawn, and rewarded)" in output
    assert "⟦" not in output


def inited(
    rows: Sequence[dict[str, Any]], *words: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Return what `init` answers for records, whose run file is run.yaml."""
    Path("run.yaml").unlink(missing_ok=True)
    code = cli.main(["init", lines(rows), "--model", MODEL, "-o", "run.yaml", *words])
    output = capsys.readouterr()
    return code, output.out + output.err


def test_init_says_what_the_file_that_it_writes_leaves_unused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The shape that the file names reads thoughts, which a plain prompt has no place for.
    rows = [
        {"prompt": f"What is {n}?", "thinking": f"{THOUGHT} {n}", "response": f"It is {n}."}
        for n in range(40)
    ]
    code, output = inited(rows, capsys=capsys)
    assert (code, load_config(Path("run.yaml")).data.train[0].format) == (0, "question_answer")
    for said in (output, check("run.yaml", capsys=capsys)[1]):
        assert "is not used" not in said
        assert "reasoning that the chat template leaves out" in said


def test_a_second_answer_is_never_part_of_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"question": f"What is {n}?", "answer": f"It is {n}.", "response": f"That would be {n}."}
        for n in range(40)
    ]
    code, output = inited(rows, capsys=capsys)
    assert code == 0, output
    code, checked = check("run.yaml", capsys=capsys)
    assert code == 0
    for said in (output, checked):
        assert "input:" not in said
        assert "`response` (a text) is not used" in said
    assert "warning: train: `response`" in checked
    words = "--columns instruction=question output=response"
    assert words in output
    code, output = inited(rows, *words.split(), capsys=capsys)
    assert code == 0
    assert "That would be" in check("run.yaml", capsys=capsys)[1]
    # Without columns, the two are named as the file has them.
    for columns in ({}, {"prompt": "question"}):
        with pytest.raises(ValueError, match="has `answer` and `response`; expected one answer"):
            read(rows[0], "question_answer", columns)


@pytest.mark.parametrize(
    "name",
    ["steps", "analysis", "sql_explanation", "feedback", "critiques", "answer_2", "generations"],
)
def test_what_belongs_to_the_answer_is_never_advised_for_the_prompt(name: str) -> None:
    row = {"question": "Who is it?", "answer": "It is the man.", name: "He came by the road."}
    seen = Columns()
    seen.note(name, row, {}, ())
    (column,) = left_out(seen.to_json(1), "x.jsonl")
    assert (seen[name].use, column.advice) == (
        {},
        "Write it into the answer, if it is to be learned",
    )


def test_weights_of_rows_are_named() -> None:
    """A number that other tools train by is no id; a weight that is to be predicted has no answer beside it."""
    for name, answer in (("weight", "output"), ("loss_weight", "output"), ("weight", "")):
        seen = Columns()
        for number in range(60):
            value = {"instruction": f"What is {number}?", name: 0.5 + number / 100}
            if answer:
                value[answer] = f"It is {number}."
            seen.note(name, value, {}, [str(value["instruction"])])
        (column,) = left_out(seen.to_json(60), "x.jsonl")
        assert column.what == "numbers"
        assert column.is_decisive == bool(answer)
        assert ("Every row counts the same" in column.advice) == bool(answer)


def test_tests_of_an_answer_are_for_rewards() -> None:
    row = {"question": "Who is it?", "answer": "It is the man.", "test_list": ["assert f(1) == 2"]}
    seen = Columns()
    seen.note("test_list", row, {}, ())
    (column,) = left_out(seen.to_json(1), "x.jsonl")
    assert "a function of yours in `rewards` of `task: grpo` is given it" in column.advice


def test_few_names_are_classes_and_no_thoughts() -> None:
    """A `chain` may be what leads to an answer, or that of a hotel."""
    for names, meaning in ((("Best Western", "Holiday Inn"), "class"), ((), "thought")):
        seen = Columns()
        for n in range(40):
            chain = names[n % 2] if names else f"First, look at {n}, then think of {n + 1}."
            seen.note("chain", {"text": f"Number {n} is here.", "chain": chain}, {}, ())
        assert seen["chain"].meaning("chain", records=40) == meaning


def test_advice_gives_all_columns_of_the_run() -> None:
    row = {
        "question": "Who?",
        "answer": "It is he.",
        "cot": THOUGHT,
        "email": "Dear sir, it is me.",
    }
    row |= {"reply_to": "The whole talk before."}
    for columns, name, whole in (
        ({"reasoning_content": "cot"}, "email", {"reasoning_content": "cot"}),
        ({"input": "email", "output": "answer"}, "cot", {"input": "email"}),
        ({"system": "reply_to"}, "email", {"system": "reply_to"}),
    ):
        seen = Columns()
        seen.note(name, row, columns, ())
        use = seen[name].use
        assert whole.items() <= use.items()
        assert name in use.values()
        reading = read(row, columns=use)
        assert {name, *whole.values()}.isdisjoint(reading.unused)


def test_thoughts_in_messages_that_nothing_reads_are_named_everywhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = []
    for n in range(20):
        question = {"role": "user", "content": f"Who is {n}?", "attachments": [f"A text of {n}."]}
        answer = {"role": "assistant", "content": "It is he.", "thoughts": f"{THOUGHT} {n}"}
        answer["reasoning_details"] = [{"text": f"Then I add {n}."}]
        rows.append({"messages": [question, answer]})
    _, output = inited(rows, capsys=capsys)
    for said in (output, Path("run.yaml").read_text(), check("run.yaml", capsys=capsys)[1]):
        for name in ("thoughts", "reasoning_details"):
            assert f"`messages[].{name}` (thoughts) is not used" in said
        assert "as `reasoning_content` of the assistant's" in said
        assert "`messages[].attachments`" in said
    assert output.count("`messages[].thoughts`") == 1, "init names a column once"
    assert "`messages[].thoughts` (thoughts)" in check("d.jsonl", capsys=capsys)[1]


def prompts(number: int = 40) -> list[dict[str, Any]]:
    """Return prompts with right answers, and with two columns that no built-in reward reads."""
    rows = []
    for n in range(number):
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": f"What is {n}?"}]}
        row |= {"ground_truth": str(n), "test_cases": f"assert that it is {n}"}
        rows.append({**row, "difficulty": ("easy", "hard")[n % 2]})
    return rows


def test_columns_that_no_reward_reads_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, output = inited(prompts(), capsys=capsys)
    config = load_config(Path("run.yaml"))
    assert [reward.name for reward in config.rewards] == ["numeric"]
    for text in (output, Path("run.yaml").read_text(), check("run.yaml", capsys=capsys)[1]):
        assert "`test_cases` (texts) is not used" in text
        assert "`difficulty` (2 values) is not used" in text
        assert "A function of yours in `rewards` is given all columns" in text
        assert "`ground_truth`" not in text
        assert "--task sequence_classification" not in text
    # What a reward reads by its column, and what a function may read, is used.
    by_column = "rewards=[{name: exact_match, column: test_cases}]"
    output = check("run.yaml", by_column, capsys=capsys)[1]
    assert "test_cases`" not in output
    assert "`difficulty`" in output
    Path("rewards.py").write_text("def score(prompts, completions, **columns):\n    return [0]\n")
    by_function = "rewards=[{file: rewards.py, function: score}]"
    assert "not used" not in check("run.yaml", by_function, capsys=capsys)[1]


def test_a_right_answer_with_its_thoughts_is_learned(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "question": "What is {n}?",
        "thought_process": THOUGHT + " {n}.",
        "final_answer": "It is {n}.",
    }
    rows = [{key: text.replace("{n}", str(n)) for key, text in row.items()} for n in range(40)]
    code, output = inited(rows, capsys=capsys)
    config = load_config(Path("run.yaml"))
    columns = {
        "instruction": "question",
        "output": "final_answer",
        "reasoning_content": "thought_process",
    }
    assert (code, config.task, config.data.train[0].columns) == (0, "causal_lm", columns)
    assert "not used" not in output
    # The same columns are advised where the task is not known, and read by all that is there.
    _, output = check("d.jsonl", capsys=capsys)
    words = [f"{key}={name}" for key, name in columns.items()]
    assert f"`--columns {' '.join(words)}`" in output
    code, output = check("d.jsonl", "--columns", *words, capsys=capsys)
    assert (code, "not used" in output) == (0, False)
    # Whoever rewards answers reads where thoughts are learned, and no column that the file has not.
    assert inited(rows, "--task", "grpo", capsys=capsys)[0] == 0
    _, output = check("run.yaml", capsys=capsys)
    assert "`thought_process` (thoughts) is not used" in output
    assert "`task: causal_lm` learns thoughts" in output
    assert "`question` as the user's message, `final_answer` as the assistant's" in output
    assert "`completion`" not in output
    plain = [
        {"prompt": r["question"], "cot": r["thought_process"], "completion": "A."} for r in rows
    ]
    assert inited(plain, capsys=capsys)[0] == 0
    assert load_config(Path("run.yaml")).data.train[0].columns["reasoning_content"] == "cot"


@pytest.mark.parametrize("name", ["ground_truth", "expected_answer", "reference_answer"])
def test_all_names_of_right_answers_are_answers_with_thoughts(name: str) -> None:
    rows = [
        {"problem": f"What is {n}?", "cot": f"{THOUGHT} {n}", name: f"It is {n}."} for n in range(9)
    ]
    lines(rows)
    assert cli.main(["init", "d.jsonl", "-o", "run.yaml"]) == 0
    assert load_config(Path("run.yaml")).data.train[0].columns["output"] == name


def test_nothing_of_a_prompt_is_called_trained(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("def score(completions, level): return [0.0]")
    lines([{"question": f"What is {n}?"} for n in range(9)])
    base = ["--model", MODEL, "task=grpo", "rewards=[{file: mine.py, function: score}]"]
    _, output = check("d.jsonl", *base, "data.train.columns={prompt: question}", capsys=capsys)
    assert "% trained" not in output
    assert "`completion`" not in output
    lines([{"prompt": f"What is {n}?"} for n in range(9)])
    output = check("d.jsonl", *base, capsys=capsys)[1]
    assert "no record of data.train has such a column; they have `prompt` alone" in output


def test_a_split_is_no_class_and_markup_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = []
    for n in range(40):
        text = f"Here is the text of number {n}."
        rows.append(
            {"text": text, "split": ("train", "test")[n % 2], "raw_html": f"<p>Title</p> {n} words"}
        )
    _, output = check(lines(rows), capsys=capsys)
    assert "`split` (2 values) is not used. A file for each of its values" in output
    assert "label=split" not in output
    assert "`raw_html` (a text) is not used" in output
    assert "completion=raw_html" not in output


def test_of_two_right_answers_the_one_that_is_not_compared_with_is_named() -> None:
    row = {"question": "What is 2?", "solution": "It is 2.", "target": "Two.", "id": 3}
    assert read(row, kind="prompt").unused == ("id", "target")
    verl = {"prompt": "What is 2?", "reward_model": {"ground_truth": "2"}, "data_source": "x"}
    assert read(verl, kind="prompt").unused == ("data_source",)
    talk = [{"role": "user", "content": "What is 2?"}]
    assert read({"messages": talk, "solution": "2"}, kind="prompt").unused == ()
    # The end of a conversation is what somebody answered.
    answered = [*talk, {"role": "assistant", "content": "It may be 3"}]
    for column in ("solution", "answer", "ground_truth", "gold"):
        reading = read({"messages": answered, column: 2}, kind="prompt")
        assert reading.unused == ("messages[-1]",)
        assert _right(reading.example) == "2"
    assert _right(read({"messages": answered}, kind="prompt").example) == "It may be 3"
    spoken = [{"from": "human", "value": "What is 2?"}, {"from": "gpt", "value": "It may be 3"}]
    reading = read({"conversations": spoken, "gold": "2"}, kind="prompt")
    assert _right(reading.example) == "2"


def _right(example: object) -> str:
    """Return the answer that a record of prompts ends with."""
    if isinstance(example, Chat):
        return str(example.messages[-1]["content"])
    assert isinstance(example, Pair)
    return example.completion


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "What is 10+1?"},
        {"problem": "What is 10+1?"},
        {"prompt": [{"role": "user", "content": "What is 10+1?"}]},
    ],
)
@pytest.mark.parametrize(
    "truth",
    [
        *({name: "11"} for name in TRUTHS),
        {"target": 11},
        {"reward_model": {"ground_truth": "11"}},
        {"reward_model": {"ground_truth": 11, "style": "rule"}},
    ],
)
@pytest.mark.parametrize("draft", ["response", "answer", "completion", "output"])
def test_what_is_called_the_right_answer_is_believed_before_a_draft(
    prompt: dict[str, Any], truth: dict[str, Any], draft: str
) -> None:
    value = {**prompt, draft: "I think it is 12", **truth}
    reading = read(value, kind="prompt")
    assert _right(reading.example) == "11"
    assert reading.unused == (draft,)
    # Who names the answer is obeyed.
    key = "completion" if "prompt" in prompt else "output"
    named = read(value, columns={key: draft}, kind="prompt")
    assert _right(named.example) == "I think it is 12"


@pytest.mark.parametrize("asked", ["prompt", "problem", "question"])
@pytest.mark.parametrize(
    "answers",
    [
        {"solution": "Add 1: 11", "answer": "11"},
        {"response": "I think it is 12", "solution": "11"},
        {"answer": "11", "output": "12"},
    ],
)
def test_of_two_answers_nobody_guesses_which_is_right(asked: str, answers: dict[str, str]) -> None:
    value = {asked: "What is 10+1?", **answers}
    with pytest.raises(ValueError, match="expected one right answer, or `data") as error:
        read(value, kind="prompt")
    advised = re.search(r"`columns: {(.*)}`", str(error.value))
    assert advised is not None
    columns = dict(pair.split(": ") for pair in advised[1].split(", "))
    for column in answers:
        example = read(value, columns={**columns, [*columns][-1]: column}, kind="prompt").example
        assert _right(example) == answers[column]
    # Twice the same is one answer.
    same = {asked: "What is 10+1?", **dict.fromkeys(answers, "11")}
    if asked == "prompt":
        assert _right(read(same, kind="prompt").example) == "11"


def test_a_reward_of_the_users_is_given_the_right_answer() -> None:
    record = {"prompt": "What is 10+1?", "response": "I think it is 12", "ground_truth": "11"}
    assert asked_of(record, SourceConfig(path="d.jsonl")).answer == "11"


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        (
            {"instruction": "Write it {n}.", "code": "print({n})"},
            ["prompt=instruction completion=code"],
        ),
        ({"prompt": "Write {n} now.", "responses": ["It is {n}.", "So {n}."], "scores": [1, 2]}, []),
        (
            {"instruction": "Do it, {n}.", "response_a": "So {n}.", "response_b": "No {n}.", "winner": "b"},
            [],
        ),
        ({"instruction": "Write it {n}.", "remark": "So {n} it.", "note": "And {n} it."}, []),
    ],
)  # fmt: skip
def test_advice_leaves_out_no_text_that_may_be_the_answer(
    row: dict[str, Any], advice: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(json.dumps(row).replace("{n}", str(n))) for n in range(40)]
    code, output = inited(rows, capsys=capsys)
    assert code == 2
    assert "text=" not in output.replace("text=NAME", "")
    for words in advice:
        assert f"`--columns {words}`" in output
        code, output = inited(rows, "--columns", *words.split(), capsys=capsys)
        assert code == 0, output
        assert check("run.yaml", capsys=capsys)[0] == 0
    if "responses" in row or "winner" in row:
        assert "seem to be several answers to one prompt: write a record for each" in output


def test_two_texts_with_a_score_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"sentence1": f"It is {n}.", "sentence2": f"So {n}.", "score": n / 40} for n in range(40)
    ]
    code, output = inited(rows, capsys=capsys)
    config = load_config(Path("run.yaml"))
    assert (code, config.task) == (0, "sequence_classification")
    assert config.classification.problem_type == "regression"
    assert check("run.yaml", capsys=capsys)[0] == 0
    _, output = check("d.jsonl", capsys=capsys)
    assert "40 records of kind Labelled" in output


@pytest.mark.parametrize("verdicts", [(0, 1), ("0", "1")])
def test_answers_with_0_or_1_are_judged(
    verdicts: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": f"What is {n}?", "response": f"It is {n}.", "label": verdicts[n % 2]}
        for n in range(40)
    ]
    code, output = inited(rows, capsys=capsys)
    assert code == 0, output
    config = load_config(Path("run.yaml"))
    assert (config.task, config.preference.loss) == ("preference", "kto")
    assert check("run.yaml", capsys=capsys)[0] == 0
    assert "40 records of kind Judged" in check("d.jsonl", capsys=capsys)[1]


def test_conversations_that_end_with_the_user_may_be_learned_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {"role": "user", "content": "Who is it?"}
    talk = [asked, {"role": "assistant", "content": "It is he."}, asked]
    rows = [{"messages": talk}] * 20
    code, output = inited(rows, capsys=capsys)
    assert code == 2
    assert "conversations that end with a message of the user. `--task causal_lm`" in output
    code, output = inited(rows, "--task", "causal_lm", capsys=capsys)
    assert code == 0, output
    assert check("run.yaml", capsys=capsys)[0] == 0


def test_what_only_some_questions_are_about_may_be_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows: list[dict[str, Any]] = []
    for n in range(40):
        row = {"question": f"What is {n}?", "answer": f"It is {n}."}
        rows.append({**row, "context": f"The text of {n}."} if n % 10 == 9 else row)
    code, output = inited(rows, capsys=capsys)
    assert code == 0, output
    assert "`context` is missing, and taken for empty, in 36 records" in output
    code, output = check("run.yaml", capsys=capsys)
    assert code == 0, output
    assert "train: `context` is missing, and taken for empty, in" in output
    words = ["--columns", "instruction=question", "input=context", "output=answer"]
    _, output = check("d.jsonl", *words, capsys=capsys)
    assert "`context` is missing, and taken for empty, in 36 records" in output


def test_a_column_that_no_record_has_is_refused_everywhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"instruction": f"What is {n}?", "output": f"It is {n}."} for n in range(20)]
    words = ["--columns", "input=contxt"]
    refused = "no record has a column 'contxt', which `columns` names"
    code, output = inited(rows, *words, capsys=capsys)
    assert code == 2
    assert refused in output
    assert not Path("run.yaml").exists()
    code, output = check("d.jsonl", *words, capsys=capsys)
    assert code == 2
    assert refused in output
    assert inited(rows, capsys=capsys)[0] == 0
    run = Path("run.yaml").read_text()
    Path("run.yaml").write_text(run.replace("  eval:", "    columns: {input: contxt}\n  eval:"))
    for verb in ("check", "prepare"):
        assert cli.main(["data", verb, "run.yaml"]) == 2
        assert refused in "".join(capsys.readouterr())
    # A question or an answer has to be there.
    for columns in ({"output": "reply"}, {"input": "q"}):
        row = {"output": "It is 2."} if "input" in columns else rows[0]
        with pytest.raises(ValueError, match="has no column"):
            read(row, columns=columns)


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ({"teacher_prompt": "{prompt} {hint[0]} {fact.real:03}"}, ["note", "other"]),
        ({}, ["fact", "hint", "note", "other"]),
        ({"lmbda": 0, "sft_weight": 0.1}, ["fact", "hint", "note", "other", "teacher_prompt"]),
    ],
)
def test_columns_that_a_teacher_is_shown_are_used(
    settings: dict[str, Any], unused: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    record = {
        "prompt": "2 + 2 is", "completion": "4", "hint": ["It is even."], "fact": 4, "note": "no", "other": {"a": 1},
        "teacher_prompt": "What is 2 + 2?",
    }  # fmt: skip
    config = {
        "task": "distill",
        "model": MODEL,
        "data": {"train": lines([record] * 4)},
        "distill": {"teacher": MODEL, **settings},
    }
    Path("run.yaml").write_text(json.dumps(config))
    assert cli.main(["data", "check", "run.yaml"]) == 0
    output = capsys.readouterr().out
    named = " ".join(line for line in output.splitlines() if "not used" in line)
    found = [name for name in sorted(record) if f"`{name}` (" in named or f"{name} × " in named]
    assert found == unused, output


@pytest.mark.parametrize(
    ("template", "column", "message"),
    [
        ("{prompt} {hint}", None, "lack 'hint', which the teacher is to be shown"),
        ("{prompt:d}", None, "cannot be shown to the teacher: Unknown format code 'd'"),
        (
            "{prompt}",
            ["a"],
            "cannot be shown to the teacher: their column `teacher_prompt` holds a list; expected a text",
        ),
    ],
)
def test_what_no_teacher_can_be_shown_is_named(
    template: str, column: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"prompt": "2 + 2 is", "completion": "4", "teacher_prompt": column}
    config = {
        "task": "distill",
        "model": MODEL,
        "data": {"train": lines([record] * 4)},
        "distill": {"teacher": MODEL, "teacher_prompt": template},
    }
    Path("run.yaml").write_text(json.dumps(config))
    assert cli.main(["data", "check", "run.yaml"]) == 2
    output = capsys.readouterr()
    assert f"4 of 4 records of data.train {message}" in output.out + output.err


TOWNS = ["Paris on the Seine", "Rome on the Tiber", "Bern on the Aare"]
QUESTION = "Which of the towns is meant by number {}?"
BESIDE: dict[str, dict[str, Any]] = {
    "columns": {**dict(zip("ABC", TOWNS, strict=True)), "answer": "B"},
    "columns of words": {"opt_a": "Paris", "opt_b": "Rome", "answer": "Rome"},
    "list": {"options": TOWNS, "answer": "B"},
    "list of another name": {"places": TOWNS, "answer": TOWNS[1]},
    "list from 0": {"choices": TOWNS, "answer": "0"},
    "object": {"choices": {"label": ["A", "B"], "text": TOWNS[:2]}, "answer": "B"},
    "objects": {"candidates": [{"id": "A", "text": "Paris"}, {"id": "B", "text": "Rome"}], "answer": "(B)"},
    "two kinds": {"article": "An article of towns.", "options": TOWNS, "answer": "B. Rome on the Tiber"},
    "numbers": {"options": [12, 20, 35], "answer": "B"},
    "numbers by their marks": {"choices": {"A": 12, "B": 20}, "answer": "B"},
    "rows of numbers": {"table": [[1, 90], [2, 80]], "answer": "The first."},
    "table": {"table": {"header": ["land", "town"], "rows": [["Italy", "Rome"]]}, "answer": "Rome"},
    "objects with the answer": {"kb": [{"land": "Italy", "town": "Rome"}], "answer": "Rome"},
}  # fmt: skip


@pytest.mark.parametrize("beside", BESIDE)
def test_choices_and_tables_are_refused_with_a_program_that_puts_them_into_the_question(
    beside: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": QUESTION.format(n), **BESIDE[beside]} for n in range(12)]
    names = [name for name in BESIDE[beside] if name != "answer"]
    with pytest.raises(ValueError, match=r"left out of the prompt; ") as error:
        read(rows[0])
    assert all(f"`{name}`" in str(error.value) for name in names)
    for name in names:
        assert f"input: {name}" not in str(error.value) or isinstance(rows[0][name], list)
    # Who has decided is obeyed.
    decided = {"instruction": "question", "output": "answer"}
    assert set(names) <= set(read(rows[0], columns=decided).unused)

    code, text = inited(rows, capsys=capsys)
    if code != 0:
        program = re.search(r"`(python3 -c .+? > (\S+))`", text, re.DOTALL)
        assert program is not None, text
        subprocess.run(program[1], shell=True, check=True)
        made = [json.loads(line) for line in Path(program[2]).read_text().splitlines()]
        code, text = inited(made, capsys=capsys)
        assert code == 0, text
        rows = made
    columns = load_config(Path("run.yaml")).data.train[0].columns
    asked = questions(rows[0], dict(columns))
    held = [part for name in names for part in _texts(BESIDE[beside][name])]
    assert all(part in asked for part in held), asked
    if beside in ("columns", "list", "two kinds"):
        assert "\nB. Rome on the Tiber" in asked
    if beside == "list from 0":
        assert "\n0. Paris" in asked
    assert "not used" not in text


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [str(value)]


@pytest.mark.parametrize(
    "value",
    [
        {"question": "Who is it?", "hint1": "It is he.", "hint2": "It is old.", "answer": "2"},
        {"question": "Which is it?", "aliases": ["Rome", "Roma"], "answer": "Rome"},
        {"question": "Which is it?", "hints": ["He is old.", "He is a cook."], "answer": "1"},
        {"question": "Which is it?", "entities": [{"text": "Rome"}], "answer": "Rome"},
        {"question": "Which? A. Rome B. Bern", "A": "Rome", "B": "Bern", "answer": "B"},
    ],
)
def test_what_an_answer_does_not_choose_from_is_no_choice(value: dict[str, Any]) -> None:
    assert isinstance(read(value).example, Chat)


@pytest.mark.parametrize("name", ["context", "passage", "documents"])
def test_a_text_beside_messages_becomes_the_message_of_the_system_or_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "He."}]
    text: Any = "It was he, says the almanac."
    if name == "documents":
        text = [{"title": "Almanac", "text": text}]
    rows = [{"messages": turns, name: text}] * 12
    with pytest.raises(ValueError, match=f"has `{name}` beside `messages`, and it would be left"):
        read(rows[0])
    code, output = inited(rows, capsys=capsys)
    if name == "documents":
        assert code == 2
        assert "`columns: {messages: messages}` to leave it out" in output
        assert name in read(rows[0], columns={"messages": "messages"}).unused
        return
    assert code == 0
    columns = load_config(Path("run.yaml")).data.train[0].columns
    example = read(rows[0], columns=columns).example
    assert isinstance(example, Chat)
    assert dict(example.messages[0]) == {"role": "system", "content": text}


TEXTS = {"sentence1": "A man {n} walks along.", "sentence2": "Somebody {n} is outdoors."}
CLASSES: list[tuple[dict[str, Any], list[Any], int, dict[str, str]]] = [
    ({**TEXTS, "pairID": "p{n}"}, ["entailment", "contradiction", "neutral"], 60, {"label": "verdict"}),
    ({"premise": "A man {n} walks.", "hypothesis": "He {n} is out."}, ["e", "c"], 8, {"label": "gold"}),
    (
        {"utterance": "please do thing {n}"},
        [f"intent_{n}" for n in range(25)],
        200,
        {"text": "utterance", "label": "verdict"},
    ),
    ({"text": "This is it {n}."}, [["joy", "fear"], ["joy"], ["anger"], []], 60, {"label": "verdict"}),
]  # fmt: skip


@pytest.mark.parametrize(("row", "classes", "number", "columns"), CLASSES)
def test_classes_of_any_name_make_a_classifier(
    row: dict[str, Any],
    classes: list[Any],
    number: int,
    columns: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = []
    for n in range(number):
        texts = json.loads(json.dumps(row).replace("{n}", str(n)))
        rows.append({**texts, columns["label"]: classes[n % len(classes)]})
    code, output = inited(rows, capsys=capsys)
    assert code == 0, output
    config = load_config(Path("run.yaml"))
    assert config.task == "sequence_classification"
    assert config.data.train[0].columns == columns


def test_of_texts_that_are_compared_none_is_advised_as_an_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for names in (("sentence1", "sentence2"), ("text_a", "text_b")):
        rows = []
        for n in range(8):
            texts = dict(zip(names, TEXTS.values(), strict=True))
            rows.append(
                {**json.loads(json.dumps(texts).replace("{n}", str(n))), "mark": "ecn"[n % 3]}
            )
        code, output = inited(rows, capsys=capsys)
        assert code == 2
        assert "completion=" not in output
        first, second = names
        assert f"`--columns text={first} text_pair={second} label=NAME`" in output


def test_a_short_class_by_a_known_name_is_advised_as_the_label(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"utterance": f"please do thing {n}", "intent": f"go {n % 5}"} for n in range(12)]
    code, output = inited(rows, capsys=capsys)
    assert code == 2
    assert "completion=" not in output
    assert "`--columns text=utterance label=intent`" in output


def test_a_text_of_the_system_gets_one_advice_however_many_rows_have_it() -> None:
    for number in (6, 60):
        columns = Columns()
        for n in range(number):
            row = {
                "sys": f"Be pirate {n % 2}.",
                "prompt": f"Who is {n}?",
                "completion": "It is he.",
            }
            columns.note("sys", row, {}, ())
        (column,) = left_out(columns.to_json(number), "d.jsonl")
        assert column.meaning == "text"
        assert "{instruction: prompt, output: completion, system: sys}" in column.advice


@pytest.mark.parametrize(
    "verdict", ["0.0", 0.0, "-1", -1, "-1.0", "bad", " Bad ", "False", "wrong", "undesirable"]
)
def test_no_answer_is_learned_that_is_called_a_bad_one(verdict: Any) -> None:
    value = {"question": "What is 2 and 1?", "answer": "It is 4."}
    for key in ("label", "kto_tag"):
        with pytest.raises(ValueError, match=f"is preference data: `{key}` is .* a bad one"):
            read({**value, key: verdict})
    # The class of a text, a score and a good answer are none.
    assert not isinstance(read({"text": "It is 4.", "label": verdict}).example, Chat)
    for other in ("1.0", 1, 0.5, "-0.3", "good", "neutral", None, ""):
        assert isinstance(read({**value, "label": other}).example, Chat)


@pytest.mark.parametrize(
    "numbers",
    [
        {"score_chosen": 2.0, "score_rejected": 8.0},
        {"chosen-rating": 1, "rejected-rating": 5},
        {"chosen_avg_score": "2.5", "rejected_avg_score": "7.5"},
        {"margin": -2.0},
    ],
)
def test_pairs_whose_numbers_say_the_opposite_are_counted(
    numbers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pair = {"prompt": "what is", "chosen": "It is 4.", "rejected": "So it is."}
    right = {key: abs(float(number)) for key, number in numbers.items()}
    for key in right:
        if "chosen" in key:
            right[key] = 9.0
    # A longer answer and a tie say nothing.
    ties = dict.fromkeys(numbers, 0.0) | {"chosen_tokens": 1, "rejected_tokens": 7}
    rows = [{**pair, "prompt": f"what is {n}", **numbers} for n in range(3)]
    rows += [{**pair, "prompt": "is it", **right}, {**pair, "prompt": "was it", **ties}]
    code, output = check(lines(rows), "--model", MODEL, "task=preference", capsys=capsys)
    sentence = (
        "3 of 5 records of train whose own score or margin says that the rejected answer is the"
    )
    assert (code, sentence in output) == (0, True), output


def test_answers_that_a_table_has_for_none_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    answers = ["nan", "NULL", "None", "N/A", " <NA> ", "Nan is a bread.", "none of them", "7"]
    text = "".join(f"what is {n},{answer}\n" for n, answer in enumerate(answers))
    Path("d.csv").write_text(f"question,answer\n{text}")
    sentence = "5 of 8 records of train with an answer that is a word for none"
    code, output = check("d.csv", "--model", MODEL, capsys=capsys)
    assert (code, sentence in output) == (0, True)
    assert "Leave these records out, unless the model is to say that" in output
    shapes: list[list[dict[str, Any]]] = [
        [{"prompt": "what is", "completion": answer} for answer in answers],
        [{"text": answer} for answer in answers],
        [{"prompt": "what is", "chosen": answer, "rejected": "So it is."} for answer in answers],
    ]
    for rows in shapes:
        task = ["task=preference"] if "chosen" in rows[0] else []
        _, output = check(lines(rows), "--model", MODEL, *task, capsys=capsys)
        assert sentence in output
