"""`kubetune data convert fire|volcano`: all that was asked for, or nothing at all."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kubetune.base.locks import lock
from kubetune.cli import main
from kubetune.cli.prepare import data_convert
from kubetune.config.schema import SourceConfig
from kubetune.data.inspect.shapes import check_shapes

Image = pytest.importorskip("PIL.Image")

RECORDS = 2500


def trajectory(number: int, words: str = "a bear in the snow") -> dict[str, Any]:
    turns = []
    for i in range(number % 4 + 1):
        turns.append(
            {
                "role": "student",
                "type": "response",
                "value": f"Thought: é\nAnswer: {words} {number}.{i}",
            }
        )
        turns.append(
            {
                "role": "teacher",
                "type": "feedback",
                "value": f"Score: {i + 3}.\nFeedback: no, {words}",
            }
        )
    record = {
        "id": f"r{number}",
        "image": f"coco/train2017/{number % 3:012d}.jpg",
        "question": {"value": "What?"},
    }
    if number % 50 == 7:
        return {**record, "image": None, "conversations": turns}
    return {**record, "conversations": [] if number % 50 == 9 else turns}


def write_list(file: Path, records: Iterator[dict[str, Any]]) -> Path:
    with open(file, "w") as stream:
        for i, record in enumerate(records):
            stream.write(
                ("[" if i == 0 else ",\n") + json.dumps(record, ensure_ascii=False, indent=1)
            )
        stream.write("]\n")
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fire")
    write_list(folder / "FIRE-train.json", map(trajectory, range(RECORDS)))
    write_list(folder / "FIRE-test.json", map(trajectory, range(700)))
    for number in range(3):
        file = folder / "images" / "coco" / "train2017" / f"{number:012d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48), (80 * number, 0, 0)).save(file)
    return folder


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run(recipe: str, *words: Any, **environ: str) -> Done:
    """Run the command in a process of its own where it is to be killed, else in this one, which is quicker."""
    arguments = ["data", "convert", recipe, *map(str, words)]
    if "KUBETUNE_FAULT" in environ:
        command = [sys.executable, "-m", "kubetune", *arguments]
        done = subprocess.run(
            command, env={**os.environ, **environ}, capture_output=True, text=True, check=False
        )
        return Done(done.returncode, done.stdout, done.stderr)
    out = io.StringIO()
    err = io.StringIO()
    with patch.dict(os.environ, environ), redirect_stdout(out), redirect_stderr(err):
        return Done(main(arguments), out.getvalue(), err.getvalue())


def convert(recipe: str, *words: Any, **environ: str) -> dict[str, Any]:
    done = run(recipe, *words, "--json", **environ)
    assert done.returncode == 0, done.stderr
    stats: dict[str, Any] = json.loads(done.stdout)
    return stats


def test_every_record_becomes_rows_or_is_counted(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    convert("fire", "--source", source, "--skip-images", "--output", output)
    rows = (output / "fire_bc_train.jsonl").read_text().splitlines()
    stats = json.loads((output / "stats.json").read_text())
    assert len(rows) == stats["train"]["examples_generated"] == stats["train"]["total_rounds"]
    assert stats["train"]["samples_processed"] == RECORDS
    assert stats["train"]["skipped_by_reason"] == {
        "no_conversations": RECORDS // 50,
        "no_image": RECORDS // 50,
    }
    assert len(stats["train"]["errors"]) == 100
    assert stats["train"]["errors"][0].startswith("FIRE-train.json:")
    assert ": no_image: names no image" in stats["train"]["errors"][0]
    assert stats["test"]["samples_processed"] == 700
    order = [(int(row["id"][1:]), row["round"]) for row in map(json.loads, rows)]
    assert order == sorted(order)


@pytest.mark.parametrize(
    ("number", "point"),
    [
        (signal.SIGKILL, "convert:2600"),
        pytest.param(signal.SIGKILL, "convert.sealed:1", marks=pytest.mark.slow),
        (signal.SIGINT, "convert:20"),
    ],
)
def test_a_conversion_that_was_stopped_is_begun_anew(
    source: Path, tmp_path: Path, number: int, point: str
) -> None:
    words = ("--source", source, "--skip-images", "--output", tmp_path / "out")
    stopped = run("fire", *words, KUBETUNE_FAULT=f"signal {number:d}:{point}")
    assert stopped.returncode == (130 if number == signal.SIGINT else -number)
    assert not (tmp_path / "out").exists()
    if number == signal.SIGINT:
        assert not any(tmp_path.iterdir())
    stats = convert("fire", *words)
    assert (stats["train"]["samples_processed"], stats["test"]["samples_processed"]) == (2500, 700)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "fire_bc_train.jsonl",
        "fire_bc_test.jsonl",
        "stats.json",
        "conversion.json",
    }


def test_two_conversions_of_one_output_do_not_meet(source: Path, tmp_path: Path) -> None:
    words = ("--source", source, "--skip-images", "--output", tmp_path / "out")
    with lock(tmp_path / ".out.lock", wait=False):
        refused = run("fire", *words)
    assert refused.returncode == 3
    assert "is locked by process" in refused.stderr


def test_what_was_done_is_not_done_again_and_never_overwritten(
    source: Path, tmp_path: Path
) -> None:
    words = ("--source", source, "--skip-images", "--output", tmp_path / "out")
    limits = ("--max-samples", 10, "--max-history-rounds", 1)
    stats = convert("fire", *words, *limits)
    assert stats["train"]["samples_processed"] == stats["test"]["samples_processed"] == 10
    again = run("fire", *words, *limits)
    assert "nothing to do: these settings were converted already" in again.stdout
    other = run("fire", *words)
    assert other.returncode == 2
    assert (
        "does not hold the conversion of these data with these settings; remove it, or give another folder"
        in other.stderr
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert run("fire", *words[:3], "--output", tmp_path / "mine").returncode == 2
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_images_are_named_or_the_record_is_skipped(tmp_path: Path) -> None:
    paths = ["coco/a.jpg", "gqa/1.jpg", None, " ", {"bytes": "x"}]
    records = [{**trajectory(number), "image": path} for number, path in enumerate(paths)]
    file = write_list(tmp_path / "FIRE-train.json", iter(records))
    stats = convert("fire", "--source", file, "--skip-images", "--output", tmp_path / "all")
    assert stats["train"]["skipped_by_reason"] == {"bad_image": 2, "no_image": 1}


def test_a_long_conversion_says_how_far_it_is(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_convert, "LINE_SECONDS", 0.0)
    words = ("--source", source, "--split", "test", "--skip-images", "--output", tmp_path / "out")
    shown = run("fire", *words).stderr
    assert shown.splitlines()[-1] == "test: 700 so far"


def test_variables_of_containers(source: Path, tmp_path: Path) -> None:
    file = source / "FIRE-train.json"
    words = ("--source", file, "--skip-images", "--output", tmp_path / "out")
    stats = convert("fire", *words, MAX_SAMPLES="8", MAX_HISTORY_ROUNDS="1")["train"]
    assert stats["samples_processed"] == 8
    rows = (tmp_path / "out" / "fire_bc_train.jsonl").read_text().splitlines()
    assert max(len(json.loads(row)["prompt"]) for row in rows) == 3  # question, attempt, feedback
    refused = run("fire", *words, MAX_HISTORY_ROUNDS="many")
    assert refused.returncode == 2
    assert (
        "environment variable MAX_HISTORY_ROUNDS: found 'many'; expected a whole number"
        in refused.stderr
    )


def test_images_of_a_folder_stay_where_they_are(source: Path, tmp_path: Path) -> None:
    images = tmp_path / "images" / "coco"
    (images / "train2017").mkdir(parents=True)
    for file in (source / "images" / "coco" / "train2017").iterdir():
        (images / "train2017" / file.name).write_bytes(file.read_bytes())
    (images / "train2017" / f"{2:012d}.jpg").unlink()
    words = ("--source", source / "FIRE-train.json", "--max-samples", 900)
    stats = convert("fire", *words, "--images", images, "--output", tmp_path / "out")["train"]
    assert stats["skipped_by_reason"] == {
        "image_missing": 288, "no_conversations": 18, "no_image": 18
    }  # fmt: skip
    rows = tmp_path / "out" / "fire_bc_train.jsonl"
    assert {json.loads(row)["images"][0] for row in rows.read_text().splitlines()} == {
        f"{images}/train2017/{0:012d}.jpg",
        f"{images}/train2017/{1:012d}.jpg",
    }
    shapes = check_shapes(SourceConfig(path=str(rows)))
    problems = shapes.problems
    kinds = shapes.kinds
    assert (problems.total, kinds) == (0, {"Chat with images": stats["examples_generated"]})


LIMITS = [
    (["--skip-images"], "is one file, so give one split"),
    ([], "expected --images with a folder or hub, or else --skip-images"),
    (["--skip-images", "--images", "hub"], "expected --images with a folder or hub, or else"),
    (["--images", "/no/such"], "there is no folder /no/such; expected one, or `hub`"),
    (["--skip-images", "--style", "gpt"], "--style gpt: expected bc or sharegpt"),
    (["--skip-images", "--max-samples", "-1"], "--max-samples -1: expected at least 0"),
    (
        ["--skip-images", "--to", "text"],
        "--to: option of any data, not of a recipe; leave it out with fire",
    ),
]


@pytest.mark.parametrize(("words", "message"), LIMITS)
def test_what_cannot_be_asked_for(
    source: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    split = ("--split", "train,test") if "one split" in message else ()
    done = run(
        "fire", "--source", source / "FIRE-train.json", *words, *split, "--output", tmp_path / "out"
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Nothing was written." in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_download_that_ended_early_is_refused(source: Path, tmp_path: Path) -> None:
    content = (source / "FIRE-test.json").read_bytes()
    (tmp_path / "FIRE-test.json").write_bytes(content[: len(content) // 2])
    words = ("--source", tmp_path / "FIRE-test.json", "--skip-images", "--output", tmp_path / "out")
    done = run("fire", *words)
    assert done.returncode == 2
    assert "FIRE-test.json:" in done.stderr
    assert "Nothing was written." in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["FIRE-test.json"]
    assert convert("fire", *words, "--max-samples", 50)["test"]["samples_processed"] == 50


def test_lines_that_are_no_json_are_refused(tmp_path: Path) -> None:
    lines = [json.dumps(trajectory(number)) for number in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join([lines[0], "{", lines[1], "7", lines[2]]))
    words = ("--source", tmp_path, "--split", "train", "--skip-images", "-o", tmp_path / "o")
    done = run("fire", *words)
    assert done.returncode == 2
    assert "train.jsonl:2: " in done.stderr
    assert "train.jsonl:4: is a number; expected a JSON object." in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["train.jsonl"]


def test_records_that_no_file_can_hold_are_told_of(tmp_path: Path) -> None:
    half = {**trajectory(1), "id": "half \ud800"}
    records = [half, {**half, "image": "coco/\ud800.jpg"}, {**half, "question": "\ud800"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    stats = convert(
        "fire", "--source", tmp_path, "--split", "train", "--skip-images", "-o", tmp_path / "o"
    )["train"]
    assert stats["skipped_by_reason"] == {"bad_image": 1, "bad_text": 1}
    first = json.loads((tmp_path / "o" / "fire_bc_train.jsonl").read_text().splitlines()[0])
    assert first["id"] == "half ?"


def test_volcano_mixes_rows_with_and_without_images(source: Path, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A pot."}]
    records = [
        {"id": str(n), "conversations": turns} | ({"image": "coco/a.jpg"} if n % 2 else {})
        for n in range(9)
    ]
    file = write_list(tmp_path / "volcano-train.json", iter(records))
    stats = convert(
        "volcano",
        "--source",
        file,
        "--skip-images",
        "--output",
        tmp_path / "out",
        MAX_HISTORY_ROUNDS="x",
    )
    assert stats["train"]["examples_generated"] == 9
    kinds = check_shapes(SourceConfig(path=str(tmp_path / "out" / "volcano_train.jsonl"))).kinds
    assert kinds == {"Chat": 5, "Chat with images that are not there": 4}


def test_files_that_lead_out_of_the_folder_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "FIRE-train.json").symlink_to(source / "FIRE-test.json")
    words = ("--source", tmp_path / "in", "--split", "train", "--skip-images")
    refused = run("fire", *words, "--output", tmp_path / "out")
    assert refused.returncode == 2
    assert "FIRE-train.json" in refused.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """400 MB in, twice as much out; no process of the conversion may hold more than a few batches."""
    words = "a bear in the snow " * 250
    file = write_list(
        tmp_path / "train.json", (trajectory(number, words) for number in range(17_000))
    )
    assert file.stat().st_size > 400e6
    command = [
        sys.executable,
        "-m",
        "kubetune",
        "data",
        "convert",
        "fire",
        "--source",
        str(file),
        "--skip-images",
    ]
    process = subprocess.run(
        [sys.executable, "-c", WATCHED, *command, "--output", str(tmp_path / "out")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (tmp_path / "out" / "fire_bc_train.jsonl").stat().st_size > 400e6
    assert int(process.stdout.split()[-1]) < 150 * 1024


# Small itself: what a process holds when it starts another counts for that one too.
WATCHED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
