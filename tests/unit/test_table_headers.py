"""The first line of a table: a record there is never lost in silence, and names of columns are never refused."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from kubetune import cli
from kubetune.data.reading.readers import read_file
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from tests.unit.test_data_sources import command_of

WORDS = "river stone candle wallet orange island window basket camera summer pencil garden".split()


def text(number: int, words: int = 6) -> str:
    """Return words that differ with the number."""
    return " ".join(WORDS[(number * (at + 1) + at) % 11] for at in range(words))


def read(file: Path) -> tuple[list[Record], Problems]:
    problems = Problems()
    return list(read_file(file, problems)), problems


def table(folder: Path, name: str, rows: list[str]) -> Path:
    file = folder / name
    file.write_text("".join(f"{row}\n" for row in rows))
    return file


# Tables without a header, with the names that the message proposes.
RECORDS = {
    "a class and a text": (
        "sms.tsv",
        [f"{('ham', 'spam')[n % 2]}\t{text(n).capitalize()}!" for n in range(20)],
        "label\ttext",
    ),
    "a text in small letters and a class": (
        "intents.csv",
        [f"{text(n)},{('BookFlight', 'PlayMusic')[n % 2]}" for n in range(20)],
        "text,label",
    ),
    "stars and two texts": (
        "amazon.csv",
        [f'"{n % 5 + 1}","{text(n, 4).title()}","{text(n, 15).capitalize()}."' for n in range(20)],
        "label,column_2,column_3",
    ),
    "an origin, a class, a blank and a text": (
        "cola.tsv",
        [f"gj0{n % 3}\t{n % 2}\t\tThe {text(n)}." for n in range(20)],
        "column_1\tcolumn_2\tcolumn_3\ttext",
    ),
    "questions and answers": (
        "faq.csv",
        [f"Where is the {text(n, 3)}?,In the {text(n + 1, 2)}." for n in range(20)],
        "prompt,completion",
    ),
    "two languages": (
        "pairs.tsv",
        [f"Now the {text(n, 4)}.\tJetzt {text(n + 3, 4)}." for n in range(20)],
        "prompt\tcompletion",
    ),
    "Chinese": (
        "zh.csv",
        [f"第{n}个问题的答案到底是什么呢？,这是第{n}个回答的全部内容。" for n in range(20)],
        "prompt,completion",
    ),
    "one column": ("lines.csv", [f"The {text(n)}." for n in range(20)], "text"),
    "messages in JSON": (
        "chats.tsv",
        [json.dumps([{"role": "user", "content": text(n)}]).replace('"', "'") for n in range(20)],
        "text",
    ),
}


@pytest.mark.parametrize(("name", "rows", "names"), RECORDS.values(), ids=RECORDS.keys())
def test_a_record_in_place_of_the_header_is_refused_with_a_command_that_names_columns(
    name: str, rows: list[str], names: str, tmp_path: Path
) -> None:
    file = table(tmp_path, name, rows)
    records, problems = read(file)
    assert records == []
    (problem,) = problems.first
    assert f"{file}:1: is a record in the place of the header" in problem
    command = problem.split("`")[-2]
    subprocess.run(command, shell=True, check=True)
    named = tmp_path / f"named-{name}"
    assert named.read_text().splitlines() == [names, *rows]
    records, problems = read(named)
    assert (len(records), problems.total, problems.doubts) == (len(rows), 0, [])


def test_small_talk_that_repeats_its_first_line_has_no_header(tmp_path: Path) -> None:
    rows = [*DOUBTFUL["small talk"], DOUBTFUL["small talk"][0]]
    records, problems = read(table(tmp_path, "talk.csv", rows))
    assert records == []
    assert "a line below it is the same" in problems.first[0]


def test_the_command_unpacks_and_takes_the_mark_of_excel_away(tmp_path: Path) -> None:
    rows = RECORDS["a class and a text"][1]
    file = tmp_path / "sms.tsv.gz"
    file.write_bytes(gzip.compress("\ufeff{}\n".format("\n".join(rows)).encode()))
    command = read(file)[1].first[0].split("`")[-2]
    subprocess.run(command, shell=True, check=True)
    assert (tmp_path / "named-sms.tsv").read_text().splitlines() == ["label\ttext", *rows]


# Headers that are none of the records below them.
HEADERS = {
    "text and label": ["text,label", *(f"{text(n)},{n % 2}" for n in range(20))],
    "a class that is called like its column": [
        "tweet,hate",
        *(f"{text(n)},{('hate', 'none')[n % 2]}" for n in range(20)),
    ],
    "texts of one word among others": [
        "review,positive",
        *(f"{('good', text(n))[n % 2]},{('positive', 'negative')[n % 2]}" for n in range(20)),
    ],
    "names of two words": [
        "Input Text,Expected Output",
        *(f"Good {text(n, 1)}.,Fine {text(n, 1)}." for n in range(20)),
    ],
    "a survey with a number": [
        "Timestamp,How old are you today?,What do you like about our product?",
        *(f"2024/01/{n + 10} 10:00,{n + 20},The {text(n)}." for n in range(20)),
    ],
    "a survey of questions alone": [
        "What do you like about it?,What should we change about it?",
        *(f"The {text(n)}.,The {text(n + 1)}." for n in range(20)),
    ],
    "statements to agree with": [
        "I feel valued at my work.,My manager listens to what I say.",
        *(f"{('Agree', 'Strongly agree', 'Disagree')[n % 3]},Disagree" for n in range(20)),
    ],
    "numbers that pandas writes": ["0,1", *(f"The {text(n)}.,{n % 2}" for n in range(20))],
    "an index without a name": [
        ",sentence,stars",
        *(f"{n},The {text(n)}.,{n % 5}" for n in range(20)),
    ],
    "a topic over longer texts": [
        "Reason for contacting support,Department",
        *(f"The {text(n)} {text(n + 1)},{('HR', 'IT')[n % 2]}" for n in range(20)),
    ],
    "years": ["country,2019,2020", *(f"{WORDS[n % 12]},{n}.5,{n}.25" for n in range(20))],
    "languages": ["en,de", *(f"Now the {text(n)}.,Jetzt {text(n)}." for n in range(20))],
    "words of two languages": ["word,Wort", *(f"{text(n, 1)},{text(n + 1, 1)}" for n in range(20))],
    "a long name over numbers": [
        "How often in the last twelve months have you visited a library near you?,comment",
        *(f"{n},The {text(n)}." for n in range(20)),
    ],
    "topics": [
        "Favourite dish,Department",
        *(f"{text(n, 2).title()},{('HR', 'IT')[n % 2]}" for n in range(20)),
    ],
    "Chinese": ["问题,答案", *(f"第{n}个问题是什么？,这是第{n}个回答。" for n in range(20))],
    "JSON": ["messages", *(f"[{{'role': 'user'}} {n}]" for n in range(20))],
    "two records": ["Who is that?,A man.", "Who is this?,A woman."],
}


@pytest.mark.parametrize("rows", HEADERS.values(), ids=HEADERS.keys())
def test_names_of_columns_are_taken_for_no_record(rows: list[str], tmp_path: Path) -> None:
    records, problems = read(table(tmp_path, "table.csv", rows))
    assert (len(records), problems.first, problems.doubts) == (len(rows) - 1, [], [])


DOUBTFUL = {
    "small talk": [f"{text(n)} {n},{text(n + 1)}" for n in range(20)],
    "sentences of which there are few": [
        f"Where is the {text(n)}?,In the {text(n)}." for n in range(5)
    ],
    "a word that is a value below": [
        "hello,greeting",
        *(f"{('bye', text(n))[n % 2]},{('greeting', 'farewell')[n % 2]}" for n in range(20)),
    ],
}


@pytest.mark.parametrize("rows", DOUBTFUL.values(), ids=DOUBTFUL.keys())
def test_what_may_be_a_record_is_said_by_all_that_look(
    rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = table(tmp_path, "table.csv", rows)
    records, problems = read(file)
    assert (len(records), problems.total) == (len(rows) - 1, 0)
    (doubt,) = problems.doubts
    assert "are taken for the names of columns, and look like the records below" in doubt

    prompt, completion = rows[0].split(",")
    words = ["--columns", f"prompt={prompt}", f"completion={completion}"]
    assert cli.main(["data", "check", str(file), *words]) == 0
    assert f"warning: {doubt}" in capsys.readouterr().out
    run_file = tmp_path / "run.yaml"
    assert cli.main(["init", str(file), "--model", "demo", "-o", str(run_file), *words]) == 0
    assert doubt in capsys.readouterr().out
    assert cli.main(["plan", str(run_file)]) == 0
    assert capsys.readouterr().out.count(doubt) == 1
    assert cli.main(["data", "check", str(run_file)]) == 0
    assert capsys.readouterr().out.count(doubt) == 1


@pytest.mark.parametrize("verb", ["init", "check", "plan", "train"])
def test_each_verb_refuses_a_table_without_a_header(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = table(tmp_path, "sms.tsv", RECORDS["a class and a text"][1])
    assert cli.main(command_of(verb, file, tmp_path)) == 2
    assert "sms.tsv:1: is a record in the place of the header" in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_header_among_the_records_of_files_that_were_joined_is_refused(
    name: str, tmp_path: Path
) -> None:
    sign = {"a.csv": ",", "a.tsv": "\t"}[name]
    rows = [sign.join(row) for row in (("text", "label"), ("fine", "text"), ("text", "label"))]
    records, problems = read(table(tmp_path, name, rows))
    assert [record.value["text"] for record in records] == ["fine"]
    (problem,) = problems.first
    assert ":3: is the header again" in problem


# Names, their separators, and what the message says of it.
SEPARATORS = {
    "tabs": ("a.csv", "\t", "has one column, and tabs in its name; expected commas between columns. Name the file a.tsv"),
    "commas": ("a.tsv", ",", "has one column, and commas in its name; expected tabs between columns. Name the file a.csv"),
    "bars": ("a.csv", "|", "has one column, and `|` in its name; expected commas between columns. To convert: "),
    "semicolons": ("a.tsv", ";", "has one column, and `;` in its name; expected tabs between columns. To convert: "),
}  # fmt: skip


@pytest.mark.parametrize(("name", "sign", "message"), SEPARATORS.values(), ids=SEPARATORS.keys())
def test_other_separators_are_named_with_what_makes_a_table(
    name: str, sign: str, message: str, tmp_path: Path
) -> None:
    rows = [f"What is {text(n, 3)}, {n}?{sign}A {text(n, 2)}, that is." for n in range(20)]
    file = table(tmp_path, name, [f"prompt{sign}completion", *rows])
    records, problems = read(file)
    assert records == []
    (problem,) = problems.first
    assert f"{file}:1: {message}" in problem
    new = tmp_path / f"new-{name}"
    if "To convert: " in problem:
        command = problem.split("To convert: ")[1].rstrip(".")
        command = command.replace("FILE", str(file)).replace("NEW", str(new))
        subprocess.run(command, shell=True, check=True)
    else:
        new = file.rename(tmp_path / problem.split("Name the file ")[1].rstrip("."))
    if sign != ",":
        assert [record.value["prompt"] for record in read(new)[0]] == [
            row.split(sign)[0] for row in rows
        ]


@pytest.mark.parametrize(
    "rows",
    [
        ["text", *(f"The {text(n)}; and | more" for n in range(20))],
        ["Well, or badly, said", *(f"The {text(n)}" for n in range(20))],
        ["yes | no", *(f"The {text(n)}" for n in range(20))],
    ],
)
def test_signs_in_the_texts_of_one_column_separate_nothing(rows: list[str], tmp_path: Path) -> None:
    records, problems = read(table(tmp_path, "a.tsv", rows))
    assert (len(records), problems.first) == (20, [])


@pytest.mark.parametrize("sign", [",", ";", "\\t"])
def test_the_line_that_tells_excel_the_separator_is_no_header(sign: str, tmp_path: Path) -> None:
    file = table(tmp_path, "a.csv", [f"sep={sign}", "prompt,completion", *"ab"])
    (problem,) = read(file)[1].first
    assert "which tells Excel what stands between columns" in problem
    subprocess.run(problem.split("`")[-2], shell=True, check=True)
    assert (tmp_path / "table-a.csv").read_text() == "prompt,completion\na\nb\n"
