"""`kubetune data` as people run it: what it prints, how it ends, what it writes, and what it never imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune.cli import main
from kubetune.data.reading import record
from tests.tiny import pretend_weights, train_tokenizer
from tests.unit.test_data_readers import BAD_LINES, GOOD

CHAT = {"messages": [{"role": "user", "content": "Ping"}, {"role": "assistant", "content": "Pong"}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pretend_weights(train_tokenizer(tmp_path / "model"))
    (tmp_path / "train.jsonl").write_text(
        (json.dumps(CHAT) + "\n") * 3 + '{"prompt": "a", "completion": "b"}\n' * 7
    )
    data = f"{{train: train.jsonl, eval: 0.2, cache: {tmp_path / 'cache'}}}"
    (tmp_path / "run.yaml").write_text(f"model: model\ndata: {data}\n")
    return tmp_path


def test_check_shows_counts_samples_and_a_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "check", str(folder / "run.yaml")]) == 0
    stdout = capsys.readouterr().out
    assert "train: 8 rows of 8 records" in stdout
    assert "eval: 2 rows of 2 records" in stdout
    assert "6 of 8 rows of train repeat another" in stdout
    assert "2 of 2 rows of eval are in train too" in stdout
    assert "Pong<|im_end|>" in stdout
    assert "ready to train" in stdout
    assert sorted(path.name for path in folder.iterdir()) == ["model", "run.yaml", "train.jsonl"]


def test_check_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "data",
                "check",
                str(folder / "train.jsonl"),
                "--model",
                str(folder / "model"),
                "--json",
            ]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert (
        report["ok"],
        report["splits"]["train"]["rows"],
        report["splits"]["train"]["duplicates"],
    ) == (True, 10, 8)
    assert sum(report["splits"]["train"]["length_histogram"].values()) == 10
    trained = "".join(piece["text"] for piece in report["samples"][0] if piece["trained"])
    assert trained == "Pong<|im_end|>"


@pytest.mark.parametrize("model", [True, False])
def test_check_names_bad_records_and_writes_nothing(
    folder: Path, model: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = folder / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "bot", "content": "x"}]}\n\n')
    before = sorted(folder.rglob("*"))
    assert (
        main(["data", "check", str(bad), *(["--model", str(folder / "model")] if model else [])])
        == 2
    )
    assert capsys.readouterr().err == (
        f'kubetune: {bad}:1: messages[0].role is "bot"; expected system, user, assistant or tool. '
        "Nothing was written.\n"
    )
    assert sorted(folder.rglob("*")) == before


REVIEW = b'{"sentence": "fine", "label": "good"}'
REVIEWS = ("task=sequence_classification", "classification.labels=[bad, good]")

# The kinds of bad records: (a good one beside it, the bad one, how it is told, what the run file says for it).
KINDS = {
    **{kind: (GOOD, line, message, ()) for kind, (line, message) in BAD_LINES.items()},
    "label unknown": (REVIEW, b'{"sentence": "fine", "label": "dull"}', "label is 'dull'", REVIEWS),
    "too long": (
        GOOD,
        b'{"text": "' + b"one " * 99 + b'"}',
        "has ",
        ("data.max_length=32", "data.overlong=error"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_record_ends_with_2_wherever_it_stands(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "MAX_RECORD_BYTES", 5000)
    good, bad, message, settings = KINDS[kind]
    run = ["data", "prepare", str(folder / "run.yaml"), "data.num_proc=1", *settings]
    for number in (1, 3, 5):
        (folder / "train.jsonl").write_bytes(
            b"".join((bad if n == number else good) + b"\n" for n in range(1, 6))
        )
        before = snapshot(folder)
        assert main(run) == 2
        assert capsys.readouterr().err.startswith(
            f"kubetune: {folder / 'train.jsonl'}:{number}: {message}"
        )
        assert snapshot(folder) == before
    (folder / "train.jsonl").write_bytes((good + b"\n") * 5)
    assert main(run) == 0


def snapshot(folder: Path) -> dict[Path, bytes]:
    """Return every file but the locks of the cache, which stay because removing one could let two in."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize("name", ["d.json", "d.jsonl"])
def test_check_says_that_there_are_no_records(
    folder: Path, model: bool, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = folder / name
    empty.write_text("[]" if name == "d.json" else "")
    argv = ["data", "check", str(empty), *(["--model", str(folder / "model")] if model else [])]
    assert main(argv) == 2
    assert "no records" in capsys.readouterr().err
    assert main([*argv, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["ok"] is False
    assert "no records" in printed.err


def test_one_record_is_no_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    single = folder / "one.jsonl"
    single.write_text('{"prompt": "a", "completion": "b"}\n')
    assert main(["data", "check", str(single)]) == 0
    assert "1 record of kind Pair" in capsys.readouterr().out


def test_without_colour_what_is_trained_is_bracketed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "check", str(folder / "run.yaml")]) == 0
    stdout = capsys.readouterr().out
    assert "⟦Pong<|im_end|>⟧" in stdout
    assert "(what is trained stands between ⟦ and ⟧)" in stdout
    assert "green" not in stdout


def test_lengths_that_no_row_has_take_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": "one"}] * 3 + [{"text": "one two " * 1000}]
    (folder / "wide.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wide = [
        "data",
        "check",
        str(folder / "wide.jsonl"),
        "--model",
        str(folder / "model"),
        "--samples",
        "0",
    ]
    assert main(wide) == 0
    bars = [
        line.split()[0]
        for line in capsys.readouterr().out.splitlines()
        if "█" in line or "…" in line
    ]
    assert len(bars) == 3
    assert bars[:2] == ["1–32", "…"]


def test_check_stops_when_too_much_would_be_lost(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "check", str(folder / "run.yaml"), "data.max_length=8"]) == 2
    printed = capsys.readouterr()
    assert "not ready to train" in printed.out
    assert "data.max_lost_share allows 10%" in printed.err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_once_what_keeps_training_from_beginning(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    (folder / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    command = ["data", "check", str(folder / "run.yaml")]
    for more, reason in (
        (["data.max_length=8"], "data.max_lost_share allows 10%"),
        ([f"data.train={folder / 'bad.jsonl'}"], "bad.jsonl:2: has the keys"),
    ):
        assert main([*command, *more]) == 2
        printed = capsys.readouterr()
        assert printed.out.count(reason) == 1
        assert printed.err.count(reason) == (0 if is_terminal else 1)
        assert "not ready to train" in printed.out


def test_prepare_twice_gives_the_same_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [main(["data", "prepare", str(folder / "run.yaml"), "--json"]) for _ in range(2)] == [
        0,
        0,
    ]
    decoder = json.JSONDecoder()
    text = capsys.readouterr().out
    first, end = decoder.raw_decode(text)
    second, _ = decoder.raw_decode(text[end:].lstrip())
    assert first == second
    assert Path(first["path"]).is_dir()


def test_convert(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = folder / "a.csv"
    table.write_text("question,answer\nPing,Pong\n")
    columns = ["--columns", "prompt=question", "completion=answer"]
    assert main(["data", "convert", str(table), "-o", str(folder / "o.jsonl"), *columns]) == 0
    assert json.loads((folder / "o.jsonl").read_text()) == CHAT
    assert "1 of 1 records written" in capsys.readouterr().out
    assert (
        main(["data", "convert", str(table), "-o", str(folder / "p.jsonl"), "--columns", "prompt"])
        == 2
    )
    table.write_text("ask,reply\nPing,Pong\n")
    assert main(["data", "convert", str(table), "-o", str(folder / "p.jsonl")]) == 2
    assert not (folder / "p.jsonl").exists()


@pytest.mark.parametrize("with_model", [True, False])
def test_checking_a_small_file_imports_nothing_heavy(folder: Path, with_model: bool) -> None:
    rows = [
        {"prompt": f"{number} and one", "completion": f"is {number + 1}"} for number in range(10)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["data", "check", str(folder / "train.jsonl")]
    if with_model:
        arguments += ["--model", str(folder / "model")]
    script = f"""
import sys
from kubetune.cli import main
assert main({arguments!r}) == 0
heavy = {{"torch", "transformers", "datasets", "peft", "numpy", "pyarrow", "huggingface_hub"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
