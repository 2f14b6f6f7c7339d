"""Files that are named by split: `init` evaluates on those that are held out, and nothing trains on them in silence."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from kubetune import cli
from kubetune.base.humanize import place
from kubetune.cli.local.demo import EMBEDDED
from kubetune.config.load import load_config
from kubetune.config.schema import SourceConfig
from kubetune.data.findings.other_splits import other_splits
from kubetune.data.findings.split_files import located_sources, missing_parts, named_files, split_of
from kubetune.data.inspect import known_findings
from kubetune.data.reading.sources import locate
from kubetune.supervisor.newer_data import written_since

MODEL = str(EMBEDDED / "model")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def folder(*names: str, rows: int = 24) -> str:
    """Write a file of questions for each name below `data`, and return that folder."""
    for number, name in enumerate(names):
        path = Path("data", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        values = [(f"What is {number} and {n}?", f"It is {number + n}.") for n in range(rows)]
        with path.open("w", newline="") as file:
            if name.endswith(".csv"):
                csv.writer(file).writerows([("request", "reply"), *values])
            else:
                for request, reply in values:
                    file.write(json.dumps({"request": request, "reply": reply}) + "\n")
    return "data"


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("train.jsonl", "train"),
        ("my_training-set.csv", "train"),
        ("train-00000-of-00002.parquet", "train"),
        ("valid.jsonl", "validation"),
        ("val.jsonl", "validation"),
        ("squad.dev.json", "validation"),
        ("validation1.jsonl.gz", "validation"),
        ("test_data.csv", "test"),
        ("Eval.jsonl", "test"),
        ("test/part-0.jsonl", "test"),
        ("dev 2/a/part.jsonl", "validation"),
        ("test/train.jsonl", "train"),
        # Other words, and names of which two splits say that they are theirs.
        ("contest.jsonl", ""),
        ("trained.jsonl", ""),
        ("devices.jsonl", ""),
        ("train_test.jsonl", ""),
        ("a.jsonl", ""),
    ],
)
def test_names_say_of_which_split_a_file_is(file: str, split: str) -> None:
    assert split_of(file) == split


LAYOUTS = [
    (
        ("train.jsonl", "test.jsonl", "validation.jsonl"),
        "data/train.jsonl",
        "data/validation.jsonl",
    ),
    (("train.csv", "test.csv"), "data/train.csv", "data/test.csv"),
    (("training.jsonl", "eval.jsonl", "more.jsonl"), "data/training.jsonl", "data/eval.jsonl"),
    (
        ("train-0.jsonl", "train-1.jsonl", "dev-0.jsonl", "dev-1.jsonl"),
        "data/train*.jsonl",
        "data/dev*.jsonl",
    ),
    (("train/a.jsonl", "train/b.jsonl", "test/a.jsonl"), "data/train", "data/test/a.jsonl"),
]


@pytest.mark.parametrize(("names", "train", "held_out"), LAYOUTS)
def test_init_evaluates_on_the_files_that_are_named_so(
    names: tuple[str, ...], train: str, held_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", folder(*names), "--model", MODEL, "-o", "run.yaml"]) == 0
    output = capsys.readouterr().out
    assert f"data has files by split: {train} is trained on, {held_out} is evaluated on" in output
    config = load_config(Path("run.yaml"))
    [source] = config.data.train
    assert isinstance(config.data.eval, tuple)
    [evaluated] = config.data.eval
    paths = [place(source.path), place(evaluated.path)]
    assert (config.name, *paths) == ("data", train, held_out)
    # Both are read alike.
    assert source.columns == evaluated.columns == {"prompt": "request", "completion": "reply"}
    assert source.format == evaluated.format == "question_answer"
    if len(names) == 3 and names[0] != "train/a.jsonl":
        assert f"not used: {(set(names) - {Path(train).name, Path(held_out).name}).pop()}" in output
    assert cli.main(["data", "check", "run.yaml"]) == 0
    output = capsys.readouterr().out
    assert "named as data to evaluate on" not in output
    assert "ready to train" in output


@pytest.mark.parametrize("source", ["data", "data/*.jsonl", "data/**/*.jsonl"])
def test_a_run_that_trains_on_other_splits_is_warned_of_everywhere(
    source: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder("train.jsonl", "test.jsonl", "validation.jsonl")
    sentence = f"{source} is trained on whole, and validation.jsonl, test.jsonl in it are named as data to evaluate on"
    run = f"""
model: {MODEL}
data: {{train: {{path: "{source}", columns: {{prompt: request, completion: reply}}}}, max_length: 128}}
lora: true
output: out
"""
    Path("run.yaml").write_text(run)
    for verb in (
        ["data", "check", "run.yaml"],
        ["plan", "run.yaml"],
        ["data", "prepare", "run.yaml"],
    ):
        assert cli.main(verb) == 0
        output = capsys.readouterr()
        words = " ".join((output.out + output.err).split())
        assert f"train: {sentence}" in words, verb
        assert "`data.train: data/train.jsonl` with `data.eval: data/validation.jsonl`" in words
    # Of data that are too many to look at, the names are known too.
    monkeypatch.setattr(known_findings, "MOST_RECORDS", 3)
    config = ["plan", "run.yaml", "data.cache=elsewhere"]
    assert cli.main(config) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "not all looked at" in words
    assert f"train: {sentence}" in words


@pytest.mark.parametrize(
    ("names", "source"),
    [
        (("a.jsonl", "b.jsonl"), "data"),
        (("train-0.jsonl", "train-1.jsonl"), "data"),
        (("test-0.jsonl", "test-1.jsonl"), "data"),
        (("train.jsonl", "test.jsonl"), "data/test.jsonl"),
        (("train.jsonl", "test.jsonl"), "data/tr*.jsonl"),
        (("train.jsonl", "test.jsonl"), "data/missing/test.jsonl"),
    ],
)
def test_whoever_names_files_means_them(names: tuple[str, ...], source: str) -> None:
    folder(*names)
    given = SourceConfig(path=source)
    assert list(other_splits(located_sources([given]))) == []
    if "missing" not in source:
        assert named_files(locate(given)) is None


def test_files_that_were_written_after_a_run_are_known() -> None:
    folder("train.jsonl", "test.jsonl")
    ending = Path("exit.json")
    ending.write_text("{}")
    given = (
        "data",
        "data/*.jsonl",
        "data/train.jsonl#3",
        "data/train.jsonl",
        "missing",
        "org/hub-data",
    )
    for path in given:
        assert written_since([SourceConfig(path=path)], ending) == ""
    after = ending.stat().st_mtime + 5
    os.utime("data/train.jsonl", (after, after))
    newer = [written_since([SourceConfig(path=path)], ending) for path in given]
    assert newer == [*["data/train.jsonl"] * 4, "", ""]
    assert written_since([SourceConfig(path="data/test.jsonl")], ending) == ""


def test_an_evaluation_that_is_read_in_another_way_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("a", "b"):
        rows = [{"prompt": f"What is {n}{name}?", "completion": f"It is {n}."} for n in range(9)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = "format: question_answer, columns: {instruction: prompt, output: completion}"
    for of_eval, is_named in (
        ("b.jsonl", True),
        (f"{{path: b.jsonl, {said}}}", False),
        ("0.3", False),
    ):
        data = f"{{train: {{path: a.jsonl, {said}}}, eval: {of_eval}, max_length: 128}}"
        run = f"model: {MODEL}\ndata: {data}\nlora: true\noutput: out\n"
        Path("run.yaml").write_text(run)
        assert cli.main(["data", "check", "run.yaml"]) == 0
        output = capsys.readouterr().out
        sentence = f"eval: b.jsonl is read by the names of its keys, and data.train with `{said}`"
        assert (sentence in output) == is_named
        assert (f"Give `data.eval: {{path: b.jsonl, {said}}}`" in output) == is_named


def test_files_that_no_path_means_alone_are_left_to_the_user() -> None:
    folder("train-a.jsonl", "x/train-b.jsonl", "test.jsonl")
    [finding] = other_splits(located_sources([SourceConfig(path="data")]))
    assert finding.advice == "Move them out of it, or name the files to train on"


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"], ["train-00001-of-00003.jsonl"]),
        (["p_01_of_03.csv", "p_03_of_03.csv"], ["p_02_of_03.csv"]),
        (["a-00000-of-00002.jsonl", "b-00001-of-00002.jsonl"], ["a-00001-of-00002.jsonl", "b-00000-of-00002.jsonl"]),
        (["x/t-00000-of-00002.jsonl", "y/t-00001-of-00002.jsonl"], ["t-00001-of-00002.jsonl", "t-00000-of-00002.jsonl"]),
        (["t-000-of-004.jsonl.gz", "t-003-of-004.jsonl.gz"], ["t-001-of-004.jsonl.gz", "t-002-of-004.jsonl.gz"]),
        (["t-00000-of-00002.jsonl", "t-00001-of-00002.jsonl"], []),
        (["t-01-of-02.jsonl", "t-02-of-02.jsonl"], []),
        (["page-3-of-9.jsonl", "page-4-of-9.jsonl"], []),
        (["best-10-of-2024.jsonl", "worst-10-of-2024.jsonl"], []),
        (["t-00000-of-00003.jsonl"], []),
    ],
)  # fmt: skip
def test_parts_that_are_missing_are_known_by_the_names_of_the_others(
    names: list[str], missing: list[str]
) -> None:
    folder(*names)
    assert missing_parts(locate(SourceConfig(path="data")).files) == missing


@pytest.mark.parametrize("most", [1_000, 3])
def test_missing_parts_are_warned_of_whether_rows_are_looked_at_or_not(
    most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(known_findings, "MOST_RECORDS", most)
    folder("train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl")
    warned = "train: data lacks 1 file by the names of the others: train-00001-of-00003.jsonl"
    assert cli.main(["init", "data", "--model", MODEL, "-o", "run.yaml"]) == 0
    capsys.readouterr()
    for verb in (["plan", "run.yaml"], ["data", "check", "run.yaml"]):
        assert cli.main(verb) == 0
        assert " ".join(capsys.readouterr().out.split()).count(warned) == 1, verb


@pytest.mark.parametrize("name", ["dataset_infos.json", "dataset_info.json"])
def test_what_the_hub_writes_about_data_is_no_data(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder("train.jsonl")
    Path("data", name).write_text(json.dumps({"default": {"features": {"text": "string"}}}))
    assert cli.main(["init", "data", "--model", MODEL, "-o", "run.yaml"]) == 0
    capsys.readouterr()
    assert cli.main(["data", "check", "run.yaml"]) == 0
    assert "files not read: .json × 1" in capsys.readouterr().out
