"""Reading files: every bad record is named with its line, wherever it stands, and the good ones are read around it."""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kubetune.config.schema import SourceConfig
from kubetune.data.reading import record as record_module
from kubetune.data.reading.files.delimited import read_csv
from kubetune.data.reading.files.json_files import count_lines, read_json
from kubetune.data.reading.files.parquet import parquet_rows, read_parquet
from kubetune.data.reading.formats import convert
from kubetune.data.reading.readers import read_file, reader_of
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import SHOWN, Problems
from kubetune.data.reading.sources import count_rows, locate, read_source
from kubetune.errors import DataError

GOOD = b'{"prompt": "Ping", "completion": "Pong"}'

BAD_LINES = {
    "broken JSON": (b'{"prompt": "Ping", ', "is not JSON: "),
    "not an object": (b'["Ping"]', "is a list; expected a JSON object"),
    "key missing": (b'{"prompt": "Ping"}', "has the keys `prompt`; expected `messages`"),
    "role": (
        b'{"messages": [{"role": "bot", "content": "x"}]}',
        'messages[0].role is "bot"; expected system, user',
    ),
    "empty": (b'{"messages": []}', "messages is empty"),
    "invalid UTF-8": (b'{"text": "\xff"}', "is not UTF-8: byte 0xff at column 11"),
    "NUL": (b'{"text": "\0"}', "holds a NUL byte at column 11"),
    "key twice": (
        b'{"prompt": "a", "completion": "b", "prompt": "c"}',
        'has the key "prompt" twice; all but the last',
    ),
    "key twice within": (
        b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
        'has the key "content" twice',
    ),
    "key twice in a text": (b'{"messages": "[{\\"role\\": 1, \\"role\\": 2}]"}', 'messages is "[{'),
    "NaN": (
        b'{"text": "a", "score": NaN}',
        "holds NaN, which is no JSON; expected a number or null",
    ),
    "Infinity": (b'{"text": "a", "score": [-Infinity]}', "holds -Infinity, which is no JSON"),
    "huge number": (
        b'{"text": "a", "id": ' + b"1" * 4301 + b"}",
        "holds a number of more than 4,300 digits",
    ),
    "huge": (b'{"text": "' + b"x" * 6000 + b'"}', "is longer than 5,000 bytes"),
    "label unknown": (b'{"sentence": "x", "label": ""}', 'label is ""'),
    "BOM": (b"\xef\xbb\xbf" + GOOD, "begins with a byte order mark"),
}


def read(file: Path) -> tuple[list[Record], Problems]:
    """Return all records of a file that convert, and all problems."""
    problems = Problems()
    records = []
    for record in reader_of(file).read(file, problems):
        try:
            convert(record.value)
            records.append(record)
        except ValueError as error:
            problems.add(record.where, str(error))
    return records, problems


@pytest.mark.parametrize("kind", BAD_LINES)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.integers(0, 5), after=st.integers(0, 5), ends=st.booleans())
def test_a_bad_line_is_named_wherever_it_stands(
    kind: str, before: int, after: int, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "MAX_RECORD_BYTES", 5000)
    line, message = BAD_LINES[kind]
    file = tmp_path / "train.jsonl"
    content = b"\n".join([GOOD] * before + [line] + [GOOD] * after) + (b"\n" if ends else b"")
    file.write_bytes(content)
    records, problems = read(file)
    assert [record.line for record in records] == [
        n for n in range(1, before + after + 2) if n != before + 1
    ]
    assert problems.total == 1
    assert problems.first[0].startswith(f"{file}:{before + 1}: {message}")
    assert file.read_bytes() == content
    assert count_lines(file) == before + after + 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": 1', "is not JSON: Expecting ',' delimiter at column 8."),
        ('{"a": "b', "is not JSON: an open string at column 7."),
        ('{"a": "b\tc"}', "is not JSON: a control character in a string at column 9."),
        ('{"a": 1} x', "is not JSON: Extra data at column 10."),
    ],
)
@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_broken_json_is_told_with_its_column(
    line: str, message: str, ending: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes((line + ending).encode())
    assert read(file)[1].first == [f"{file}:1: {message}"]


def test_an_open_string_in_a_list_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('[{"text": "a"},\n {"text": "b}\n]')
    assert read(file)[1].first == [f"{file}:2: is not JSON: an open string."]


@pytest.mark.parametrize(
    "what",
    [
        'messages[0] is "The {n}th text"; expected an object',
        'messages[{n}] is "A \\"quoted\\" text of {n} that is cut sho…; expected an object',
        "answer is {n}; expected a text",
        'answer is {{"steps": [{n}]}}; expected a text',
        "has {n},122 tokens; data.max_length is 2,048",
    ],
)
def test_a_problem_that_shows_each_record_s_own_values_is_shown_once(what: str) -> None:
    problems = Problems()
    for n in range(1, 31):
        problems.add(f"a.jsonl:{n}", what.format(n=n))
    (sentence,) = problems.sentences()
    assert sentence.startswith("a.jsonl:1: " + what.format(n=1))
    assert "The same in 29 more records: lines 2, 3, 4 …" in sentence


def test_problems_of_other_keys_or_words_are_shown_apart() -> None:
    problems = Problems()
    for n, what in enumerate(('role is "bot"', 'role is "ai"', "`a1` is 3", "`a2` is 3")):
        problems.add(f"a.jsonl:{n + 1}", f"{what}; expected a text")
    assert len(problems.sentences()) == 4


def test_many_problems_are_counted_and_the_first_shown() -> None:
    problems = Problems()
    for n in range(45):
        problems.add(f"a.jsonl:{n + 1}", f"has no key k{n}")
    lines = problems.error().problems
    assert [line.split(": ")[0] for line in lines[:-1]] == [
        f"a.jsonl:{n}" for n in range(1, SHOWN + 1)
    ]
    assert lines[-1] == f"45 problems, of which {SHOWN} are shown. Nothing was written."


def test_the_same_mistake_at_another_place_is_said_once(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"".join(b"{" + b" " * n + b"x\n" for n in reversed(range(45))))
    _, problems = read(file)
    (sentence,) = problems.sentences()
    assert sentence.startswith(f"{file}:1: is not JSON: ")
    assert "column 46. The same in 44 more records: lines 2, 3, 4" in sentence


def test_the_message_reads_as_documented(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"messages": [{"role": "bot", "content": "x"}]}\n')
    assert str(read(file)[1].error()) == (
        f'{file}:1: messages[0].role is "bot"; expected system, user, assistant or tool. Nothing was written.'
    )


VALUES = st.lists(
    st.fixed_dictionaries(
        {"prompt": st.text(st.characters(exclude_categories=["Cs"]), max_size=30)}
    ),
    min_size=1,
    max_size=6,
)


GAPS = st.sampled_from(["", "\n", " \r\n\t\n"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=VALUES, indent=st.sampled_from([None, 0, 2]), gap=GAPS, data=st.data())
def test_a_json_list_is_read_in_pieces_with_its_lines(
    values: list[dict[str, Any]],
    indent: int | None,
    gap: str,
    data: st.DataObject,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "a.json"
    text = "["
    lines = []
    for number, value in enumerate(values):
        text += ("," if number else "") + gap
        lines.append(text.count("\n") + 1)
        text += json.dumps(value, indent=indent, ensure_ascii=False)
    file.write_text(text + gap + "]", newline="")
    monkeypatch.setattr(record_module, "BLOCK", data.draw(st.integers(1, 50)))
    problems = Problems()
    records = list(read_json(file, problems))
    assert [record.value for record in records] == values
    assert [record.line for record in records] == lines
    assert problems.total == 0


def test_a_record_nested_too_deeply_is_named(tmp_path: Path) -> None:
    nested = '{"a":' * 100_000 + "1" + "}" * 100_000
    for name, content in (("a.jsonl", nested), ("a.json", f"[{nested}]")):
        (tmp_path / name).write_text(content)
        assert read(tmp_path / name)[1].first == [f"{tmp_path / name}:1: is nested too deeply."]


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (
            '[{"text": "a"}]\n[{"text": "b"}]',
            2,
            "has '[' after the end of the list; expected one JSON list",
        ),
        ('[]\n\n{"text": "b"}', 3, "has '{' after the end of the list"),
        ('[{"text": "a"},\n {"text": "b",}]', 2, "is not JSON"),
        ('[{"text": "a"}\n {"text": "b"}]', 2, "found '{' after an object; expected `,` or `]`"),
        ('[{"text": "a"},\n 3]', 2, "is a number; expected a JSON object"),
        ('[{"text": "a"},\n', 2, "is not JSON"),
        ("7", 1, "does not begin with `[`"),
        ("", 1, "does not begin with `[`"),
    ],
)
def test_a_broken_json_list_is_named(tmp_path: Path, content: str, line: int, message: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    _, problems = read(file)
    assert problems.total == 1
    assert problems.first[0].startswith(f"{file}:{line}: ")
    assert message in problems.first[0]


def test_json_lines_in_a_file_called_json(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert [record.line for record in read(file)[0]] == [1, 2]


@pytest.mark.parametrize("indent", [1, 4])
def test_pretty_printed_objects_are_read_one_after_the_other(tmp_path: Path, indent: int) -> None:
    file = tmp_path / "a.json"
    values = [{"prompt": "Ping", "completion": "Pong", "more": ["}", "{"]}, {"text": "b"}]
    file.write_text("\n".join(json.dumps(value, indent=indent) for value in values))
    records, problems = read(file)
    assert problems.total == 0
    assert [(record.line, record.value) for record in records] == [(1, values[0]), (9, values[1])]


def test_a_pretty_printed_object_that_is_no_record_is_one_problem(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"version": 1, "data": [{"text": "a"}] * 50}, indent=2))
    assert [problem.partition(";")[0] for problem in read(file)[1].first] == [
        f"{file}:1: has the keys `version`, `data`"
    ]


def test_records_around_a_flawed_one_of_a_list_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "BLOCK", 7)
    file = tmp_path / "a.json"
    digits = "1" * 5000
    file.write_text(
        '[{"text": "a"},\n {"text": "b", "text": "c"},\n {"text": "d", "n": NaN},\n'
        f'{{"n": {digits}}},\n {{"text": "e"}}]'
    )
    records, problems = read(file)
    assert [record.value["text"] for record in records] == ["a", "e"]
    assert [problem.partition(";")[0] for problem in problems.first] == [
        f'{file}:2: has the key "text" twice',
        f"{file}:3: holds NaN, which is no JSON",
        f"{file}:4: holds a number of more than 4,300 digits.",
    ]


def test_a_record_of_a_list_that_is_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "BLOCK", 10)
    monkeypatch.setattr(record_module, "MAX_RECORD_BYTES", 100)
    file = tmp_path / "a.json"
    file.write_text('[{"text": "a"},\n {"text": "' + "b" * 1000 + '"}]')
    records, problems = read(file)
    assert len(records) == 1
    assert problems.first == [f"{file}:2: is longer than 100 bytes."]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "A.JSON.GZ", "a.csv.gz", "a.txt.gz", "a.jsonl"])
def test_what_gzip_packed_is_read(tmp_path: Path, name: str) -> None:
    text = {"csv": "text\nx\ny\n", "txt": "x\n\ny\n"}.get(
        name.split(".")[1], '{"text": "x"}\n{"text": "y"}\n'
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_bytes(gzip.compress(text.encode()))
    for path in (tmp_path / "data" / name, tmp_path / "data"):
        problems = Problems()
        source = SourceConfig(path=str(path))
        assert [record.value for record in read_source(source, problems)] == [
            {"text": "x"},
            {"text": "y"},
        ]
        assert not problems.total
        assert count_rows(source) == 2


@pytest.mark.parametrize("kept", [0.5, 0.9])
def test_what_gzip_packed_and_was_cut_off_is_refused(tmp_path: Path, kept: float) -> None:
    packed = gzip.compress(b"".join(b'{"text": "%d"}\n' % number for number in range(1000)))
    (file := tmp_path / "a.jsonl.gz").write_bytes(packed[: int(kept * len(packed))])
    for read in (
        lambda: list(read_file(file, Problems())),
        lambda: count_rows(SourceConfig(path=str(file))),
    ):
        with pytest.raises(
            DataError,
            match=r"a.jsonl.gz is damaged, or its download incomplete: .*Nothing was written",
        ):
            read()


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "txt"])
@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (
            lambda text: text.encode("utf-16"),
            "is UTF-16; expected UTF-8: `iconv -f UTF-16 -t UTF-8 ",
        ),
        (
            lambda text: text.encode("utf-16-le"),
            "is UTF-16LE; expected UTF-8: `iconv -f UTF-16LE -t UTF-8 ",
        ),
        (
            lambda text: text.encode("utf-32"),
            "is UTF-32; expected UTF-8: `iconv -f UTF-32 -t UTF-8 ",
        ),
        (lambda text: bz2.compress(text.encode()), "is packed; unpack it by `bunzip2 "),
        (lambda text: lzma.compress(text.encode()), "is packed; unpack it by `unxz "),
    ],
)
def test_what_is_no_utf8_text_is_one_problem_that_says_what_it_is(
    tmp_path: Path, suffix: str, encode: Callable[[str], bytes], message: str
) -> None:
    problems = Problems()
    file = tmp_path / f"a.{suffix}"
    file.write_bytes(encode('{"text": "x"}\n{"text": "y"}\n'))
    assert not list(read_file(file, problems))
    (problem,) = problems.first
    assert problem.startswith(f"{file}:1: {message}")


def test_a_packed_file_in_a_folder_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "b.jsonl.zst").write_bytes(b"")
    with pytest.raises(DataError, match=r"b.jsonl.zst is packed; unpack it, or move it out of"):
        locate(SourceConfig(path=str(tmp_path)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt"])
def test_a_pointer_of_git_lfs_is_one_problem(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    problems = Problems()
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n")
    assert list(read_file(file, problems)) == []
    assert problems.first == [
        f"{file}:1: is a pointer of Git LFS in place of a file of 12,345 bytes; fetch that by `git lfs pull`."
    ]


def test_a_column_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    for suffix, sign in ((".csv", ","), (".tsv", "\t")):
        file = tmp_path / f"a{suffix}"
        file.write_text(f"prompt{sign}completion{sign}prompt\na{sign}b{sign}c\n")
        records, problems = read(file)
        assert records == []
        assert problems.first == [
            f"{file}:1: has the column `prompt` more than once; all but the last would be lost."
        ]


def test_what_is_no_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "MAX_RECORD_BYTES", 20)
    file = tmp_path / "a.txt"
    file.write_bytes(b"good\n\nbad \xff\n\nnul \0\n\n0123456789\n0123456789\n0123456789\n\nlast")
    records, problems = read(file)
    assert [record.value["text"] for record in records] == ["good", "last"]
    assert [problem.partition(";")[0] for problem in problems.first] == [
        f"{file}:3: is not UTF-8: byte 0xff at column 5",
        f"{file}:5: holds a NUL byte at column 5",
        f"{file}:7: is longer than 20 bytes up to the next blank line.",
    ]


CELLS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
).filter(str.strip)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(CELLS, CELLS), max_size=6), delimiter=st.sampled_from([",", "\t"]))
def test_tables_survive_quoting_and_keep_their_lines(
    rows: list[tuple[str, str]], delimiter: str, tmp_path: Path
) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(["prompt", "completion"])
    lines = []
    for row in rows:
        lines.append(buffer.getvalue().count("\n") + 1)
        writer.writerow(row)
    file = tmp_path / ("a.csv" if delimiter == "," else "a.tsv")
    file.write_bytes(b"\xef\xbb\xbf" + buffer.getvalue().encode())
    problems = Problems()
    records = list(reader_of(file).read(file, problems))
    assert problems.total == 0
    expected = [{"prompt": prompt, "completion": completion} for prompt, completion in rows]
    assert [record.value for record in records] == expected
    assert [record.line for record in records] == lines


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b"prompt,completion\na,b\nc\n", 3, "has 1 value; expected 2"),
        (b'prompt,completion\n"a\nb",c\nd\n', 4, "has 1 value"),
        (b'prompt,completion\n"a"b,c\n', 2, "cannot be read as a table"),
        (b"prompt,completion\na,\xff\n", 2, "is not UTF-8: byte 0xff"),
        (b"", 1, "is blank; expected a header"),
    ],
)
def test_a_broken_table_is_named(tmp_path: Path, content: bytes, line: int, message: str) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(content)
    problems = Problems()
    list(read_csv(file, problems))
    assert problems.total == 1
    assert problems.first[0].startswith(f"{file}:{line}: {message}")


@pytest.mark.parametrize(
    ("name", "content", "lines", "blank"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"}\n\n', [1, 2], 0),
        ("a.jsonl", b'{"text": "a"}\n  \r\n\n{"text": "b"}\n\n', [1, 4], 2),
        ("a.jsonl", b'\n{"text": "a"}', [2], 1),
        ("a.jsonl", b"\n\n", [], 0),
        ("a.csv", b"text,id\na,1\n\nb,2\n\n", [2, 4], 1),
        ("a.tsv", b'text\tid\n"a"\t1\n\n"b"\t2\n', [2, 4], 1),
    ],
)
def test_blank_lines_are_passed_over_and_counted_among_records(
    tmp_path: Path, name: str, content: bytes, lines: list[int], blank: int
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    problems = Problems()
    records = list(read_file(file, problems))
    assert (problems.total, problems.blank_lines) == (0, blank)
    assert [record.line for record in records] == lines
    if name == "a.jsonl":
        assert count_lines(file) == len(lines)
        loaded = datasets.Dataset.from_json(str(file), cache_dir=str(tmp_path)) if lines else []
        assert [row["text"] for row in loaded] == [record.value["text"] for record in records]


def test_quotes_in_a_tsv_are_text_where_it_makes_sense_only_so(tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    file.write_text(
        'prompt\tcompletion\tscore\n"Who\'s there?\tHe "said" so\t5.0\n"a"\t"b" and c\t3.2\n'
    )
    records, problems = read(file)
    assert problems.total == 0
    assert [list(record.value.values()) for record in records] == [
        ["\"Who's there?", 'He "said" so', "5.0"],
        ['"a"', '"b" and c', "3.2"],
    ]
    file.write_text('prompt\tcompletion\n"a\nb"\t"c ""d"" \te"\n')
    assert [list(record.value.values()) for record in read(file)[0]] == [["a\nb", 'c "d" \te']]
    file.write_text('sentence\tlabel\n"a film\t1\nb"\t0\n')
    message = "as 1 record if quotes enclose values, 2 if they are text; write it as JSON lines."
    assert read(file)[1].first == [f"{file}:1: can be read in two ways, {message}"]
    file.write_text('prompt\tcompletion\n"a\tb\nc\n')
    problems = read(file)[1]
    assert problems.first[0].startswith(f"{file}:2: cannot be read as a table")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    values = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(2500)]
    parquet.write_table(pyarrow.Table.from_pylist(values), file)
    records, problems = read(file)
    assert [record.value for record in records] == values
    assert [record.line for record in records] == list(range(1, 2501))
    assert parquet_rows(file) == 2500
    assert problems.total == 0


def test_parquet_gives_numbers_and_texts_for_decimals_and_dates(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    row = {
        "price": Decimal("2.50"),
        "stars": Decimal("4.00"),
        "prices": [Decimal("0.1")],
        "moment": datetime(2024, 1, 31, 9, 30),
        "day": {"date": date(2024, 1, 31), "hour": time(9, 30)},
        "pause": timedelta(seconds=90),
        "image": b"bytes",
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    [record] = read_parquet(file, Problems())
    assert record.value == {
        "price": 2.5,
        "stars": 4,
        "prices": [0.1],
        "moment": "2024-01-31T09:30:00",
        "day": {"date": "2024-01-31", "hour": "09:30:00"},
        "pause": 90.0,
        "image": b"bytes",
    }


def _write_numbers(file: Path) -> bytes:
    """Write a Parquet file of two groups of rows with checksums, and return its bytes."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [f"text {number}" for number in range(4000)]})
    parquet.write_table(table, file, row_group_size=2000, write_page_checksum=True)
    return file.read_bytes()


@pytest.mark.parametrize(
    ("damage", "place"),
    [
        pytest.param(lambda data: b"", "", id="empty"),
        pytest.param(lambda data: b'{"text": "a"}\n' * 9, "", id="JSON"),
        pytest.param(lambda data: data[: len(data) // 2], "", id="cut off"),
        pytest.param(lambda data: data[:-200] + b"\xff" * 150 + data[-50:], "", id="footer"),
        pytest.param(
            lambda data: data[:9000] + bytes(500) + data[9500:], " from row 1 on", id="page"
        ),
    ],
)
def test_a_damaged_parquet_file_is_refused_by_its_name(
    tmp_path: Path, damage: Callable[[bytes], bytes], place: str
) -> None:
    file = tmp_path / "a.parquet"
    file.write_bytes(damage(_write_numbers(file)))
    expected = f"{file} cannot be read as a Parquet file{place}: .+ Download or write it again"
    with pytest.raises(DataError, match=expected):
        read(file)


def test_an_error_of_the_disk_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.parquet"
    _write_numbers(file)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("pyarrow.parquet.ParquetFile", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read(file)


def test_parquet_gives_objects_no_keys_of_others_and_no_name_twice(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    calls: list[Any] = [[{"name": name, "arguments": {name: [1, None]}}] for name in "ab"]
    parquet.write_table(
        pyarrow.table({"text": ["a", None], "calls": calls}), tmp_path / "a.parquet"
    )
    records = list(read_parquet(tmp_path / "a.parquet", Problems()))
    assert [record.value for record in records] == [
        {"text": "a", "calls": calls[0]},
        {"text": None, "calls": calls[1]},
    ]
    pair = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"]
    )
    inner = pyarrow.ListArray.from_arrays([0, 1], pair)
    for name, table in (
        ("text", pyarrow.Table.from_arrays(pair.flatten(), names=["text", "text"])),
        ("parts.text", pyarrow.table({"parts": inner})),
    ):
        parquet.write_table(table, tmp_path / "b.parquet")
        records, problems = read(tmp_path / "b.parquet")
        assert not records
        assert problems.first == [
            f"{tmp_path}/b.parquet:1: has the column `{name}` more than once; all but one would be lost."
        ]
    (tmp_path / "b.parquet").rename(tmp_path / "b.jsonl")
    problems = Problems()
    assert not list(read_file(tmp_path / "b.jsonl", problems))
    assert problems.first == [f"{tmp_path}/b.jsonl:1: is a Parquet file; name it b.parquet."]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_beyond_those_that_can_be_read_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(
        '{"text": "a", "x": -1e400}\n' if name == "a.jsonl" else '[{"text": "a", "x": -1e400}]'
    )
    message = "holds -1e400, which is beyond the numbers that can be read."
    assert read(file)[1].first == [f"{file}:1: {message}"]


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None], ids=["folder", "absent"])
def test_a_file_that_cannot_be_read_is_explained(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    file = tmp_path / "a.jsonl"
    make(file)
    with pytest.raises(DataError, match=f"{file} cannot be read"):
        read(file)


def test_the_problems_kept_are_those_of_the_lowest_lines() -> None:
    few = Problems()
    all_of_them = Problems(keep=None)
    for line in [*range(30, 60), *range(1, 30)]:
        for problems in (few, all_of_them):
            problems.add(f"a.jsonl:{line}", "is blank")
    assert few.first == [f"a.jsonl:{line}: is blank." for line in range(1, 21)]
    assert few.total == len(all_of_them.first) == 59
    # What all of them have is told once.
    message = "a.jsonl:1: is blank. The same in 58 more records: lines 2, 3, 4 …\n59 problems. Nothing was written."
    assert str(all_of_them.error()) == str(few.error()) == message


def test_each_problem_is_told_once_with_its_first_lines() -> None:
    problems = Problems()
    for line, what in (
        (4, "is blank"),
        (2, "is short"),
        (9, "is blank"),
        (3, "is odd"),
        (3, "is odd"),
    ):
        problems.add(f"a.jsonl:{line}", what)
    assert problems.sentences() == [
        "a.jsonl:2: is short.",
        "a.jsonl:3: is odd. The same in 1 more record.",
        "a.jsonl:4: is blank. The same in 1 more record: line 9.",
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (json.dumps([{"text": "a"}] * 50, indent=2), "a JSON list"),
        (json.dumps([{"text": "a"}] * 50), "a JSON list"),
        (
            "\n".join(json.dumps({"text": "a", "n": n}, indent=1) for n in range(9)),
            "a JSON object over several lines",
        ),
    ],
    ids=["list over lines", "list on a line", "objects over lines"],
)
def test_json_in_a_file_of_lines_is_one_problem_that_names_the_remedy(
    text: str, what: str, tmp_path: Path
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(text)
    records, problems = read(file)
    message = f"{file}:1: begins {what}; expected one JSON object per line. Name the file train.json to have it read so."
    assert (records, problems.total, problems.first) == ([], 1, [message])
    records, problems = read(file.rename(tmp_path / "train.json"))
    assert (problems.total, len(records)) == (0, 50 if "list" in what else 9), "the remedy works"


def test_a_list_on_each_line_is_the_mistake_of_each_line(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('[{"role": "user", "content": "a"}]\n' * 3)
    assert [line.partition(": ")[2] for line in read(file)[1].first] == [
        "is a list; expected a JSON object."
    ] * 3
