"""`kubetune data convert fire|volcano`: the same bytes however often it is killed, or nothing at all."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kubetune.cli import main
from kubetune.config.schema import SourceConfig
from kubetune.data.inspect.check import check_shapes
from kubetune.plugins.recipes import origin

Image = pytest.importorskip("PIL.Image")

RECORDS = 8500
"""Two saves of the journal, and some more."""


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
    """The command as a process of its own, where it is to be killed; else in this one, which is quicker."""
    arguments = ["data", "convert", recipe, *map(str, words)]
    if "KUBETUNE_FAULT" in environ:
        command = [sys.executable, "-m", "kubetune", *arguments]
        done = subprocess.run(
            command, env={**os.environ, **environ}, capture_output=True, text=True, check=False
        )
        return Done(done.returncode, done.stdout, done.stderr)
    out, err = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, environ), redirect_stdout(out), redirect_stderr(err):
        return Done(main(arguments), out.getvalue(), err.getvalue())


def convert(recipe: str, *words: Any, **environ: str) -> dict[str, Any]:
    done = run(recipe, *words, "--json", **environ)
    assert done.returncode == 0, done.stderr
    stats: dict[str, Any] = json.loads(done.stdout)
    return stats


def digests(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


@cache
def uninterrupted(source: Path, workers: int) -> dict[str, str]:
    output = source / f"whole-{workers}"
    convert("fire", "--source", source, "--skip-images", "--workers", workers, "--output", output)
    return digests(output)


def test_any_number_of_workers_writes_the_same_bytes(source: Path) -> None:
    assert uninterrupted(source, 1) == uninterrupted(source, 2)
    rows = (source / "whole-1" / "fire_bc_train.jsonl").read_text().splitlines()
    stats = json.loads((source / "whole-1" / "stats.json").read_text())
    assert len(rows) == stats["train"]["examples_generated"] == stats["train"]["total_rounds"]
    assert stats["train"]["samples_processed"] == RECORDS
    assert stats["train"]["skipped_by_reason"] == {
        "no_conversations": RECORDS // 50,
        "no_image": RECORDS // 50,
    }
    assert len(stats["train"]["errors"]) == 100
    assert stats["train"]["errors"][0].startswith("FIRE-train.json:")
    assert ": r7: no_image: names no image" in stats["train"]["errors"][0]
    assert stats["test"]["samples_processed"] == 700
    order = [(int(row["id"][1:]), row["round"]) for row in map(json.loads, rows)]
    assert order == sorted(order)


slow = pytest.mark.slow
KILLS = [
    pytest.param("convert", 20, id="before the first save", marks=slow),
    pytest.param("convert.written", 2, id="rows on disk, journal not"),
    pytest.param("write train.json", 2, id="journal half written", marks=slow),
    pytest.param("convert.saved", 2, id="journal written", marks=slow),
    pytest.param("convert", 138, id="in the second split"),
    pytest.param("convert.whole", 1, id="all but the name", marks=slow),
]


@pytest.mark.parametrize(("point", "nth"), KILLS)
def test_a_killed_conversion_goes_on(source: Path, tmp_path: Path, point: str, nth: int) -> None:
    words = ("--source", source, "--skip-images", "--workers", 2, "--output", tmp_path / "out")
    killed = run("fire", *words, KUBETUNE_FAULT=f"signal 9:{point}:{nth}")
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    convert("fire", *words)
    assert digests(tmp_path / "out") == uninterrupted(source, 1)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_what_was_done_is_not_done_again(source: Path, tmp_path: Path) -> None:
    words = ("--source", source, "--skip-images", "--workers", 1, "--output", tmp_path / "out")
    run("fire", *words, KUBETUNE_FAULT="signal 9:convert.saved:2")
    rows = tmp_path / ".out.converting" / "fire_bc_train.jsonl"
    kept = rows.read_bytes()
    doctored = kept.replace(b'"id": "r0"', b'"id": "R0"', 1)
    rows.write_bytes(doctored)
    convert("fire", *words)
    assert (
        (tmp_path / "out" / "fire_bc_train.jsonl")
        .read_bytes()
        .startswith(doctored[: len(kept) // 2])
    )
    again = run("fire", *words)
    assert "nothing to do: these settings were converted already" in again.stdout


class Terminal(io.StringIO):
    """What a terminal would be sent."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_far_it_is_how_fast_and_how_long_it_will_take(
    source: Path, tmp_path: Path
) -> None:
    terminal = Terminal()
    words = [
        "--source",
        str(source),
        "--split",
        "train",
        "--skip-images",
        "--output",
        str(tmp_path / "out"),
    ]
    environ = {"TERM": "xterm-256color", "COLUMNS": "100"}
    with patch.dict(os.environ, environ), redirect_stderr(terminal), redirect_stdout(io.StringIO()):
        assert main(["data", "convert", "fire", *words]) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(rf"train .* {RECORDS}/{RECORDS} [0-9,]+/s 0:00:00", shown)


def test_ctrl_c_says_how_to_go_on(source: Path, tmp_path: Path) -> None:
    words = ("--source", source, "--skip-images", "--workers", 2, "--output", tmp_path / "out")
    stopped = run("fire", *words, KUBETUNE_FAULT=f"signal {signal.SIGINT:d}:convert:20")
    assert stopped.returncode == 130
    assert stopped.stderr == "kubetune: stopped; the same command continues from here\n"
    assert [file.name for file in tmp_path.iterdir()] == [".out.converting"]


def test_other_settings_begin_anew_and_never_overwrite(source: Path, tmp_path: Path) -> None:
    words = ("--source", source, "--skip-images", "--output", tmp_path / "out")
    run("fire", *words, KUBETUNE_FAULT="signal 9:convert.saved:2")
    stats = convert("fire", *words, "--max-samples", 10, "--max-history-rounds", 1)
    assert stats["train"]["samples_processed"] == stats["test"]["samples_processed"] == 10
    other = run("fire", *words)
    assert other.returncode == 2
    assert (
        "holds a conversion of other data or with other settings; remove it, or give another folder"
        in other.stderr
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert run("fire", *words[:3], "--output", tmp_path / "mine").returncode == 2
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_variables_of_containers(source: Path, tmp_path: Path) -> None:
    file = source / "FIRE-train.json"
    words = ("--source", file, "--skip-images", "--output", tmp_path / "out")
    stats = convert("fire", *words, MAX_SAMPLES="8", MAX_HISTORY_ROUNDS="1")["train"]
    assert stats["samples_processed"] == 8
    assert stats["notes"] == {"states_cut": 4}  # attempts 3 and 4 of r3, attempt 3 of r2 and r6
    refused = run("fire", *words, MAX_HISTORY_ROUNDS="many")
    assert refused.returncode == 2
    assert (
        "environment variable MAX_HISTORY_ROUNDS: found 'many'; expected a whole number"
        in refused.stderr
    )


def test_images_of_a_folder_are_looked_at_and_stay_where_they_are(
    source: Path, tmp_path: Path
) -> None:
    images = tmp_path / "images" / "coco"
    (images / "train2017").mkdir(parents=True)
    for file in (source / "images" / "coco" / "train2017").iterdir():
        (images / "train2017" / file.name).write_bytes(file.read_bytes())
    (images / "train2017" / f"{1:012d}.jpg").write_bytes(b"<html>not found</html>")
    (images / "train2017" / f"{2:012d}.jpg").unlink()
    words = ("--source", source / "FIRE-train.json", "--max-samples", 900, "--workers", 2)
    stats = convert("fire", *words, "--images", f"coco={images}", "--output", tmp_path / "out")[
        "train"
    ]
    assert stats["skipped_by_reason"] == {
        "image_missing": 288, "image_unknown": 288, "no_conversations": 18, "no_image": 18
    }  # fmt: skip
    assert stats["samples_used"] == stats["samples_used_by_source"]["coco"] == 288
    rows = tmp_path / "out" / "fire_bc_train.jsonl"
    assert {json.loads(row)["images"][0] for row in rows.read_text().splitlines()} == {
        f"{images}/train2017/{0:012d}.jpg"
    }
    shapes = check_shapes(SourceConfig(path=str(rows)))
    problems, kinds = shapes.problems, shapes.kinds
    assert (problems.total, kinds) == (0, {"Chat with images": stats["examples_generated"]})


LIMITS = [
    (["--skip-images"], "is one file, so give one split"),
    ([], "--images is missing; expected a folder, hub, or --skip-images"),
    (["--images", "/no/such"], "there is no folder /no/such"),
    (["--skip-images", "--style", "gpt"], "--style gpt: expected bc or sharegpt"),
    (["--skip-images", "--max-samples", "-1"], "--max-samples -1: expected at least 0"),
    (
        ["--skip-images", "--to", "text"],
        "--to: option of any data, not of a recipe; leave it out with fire",
    ),
    (
        ["--skip-images", "--keep-sources", "mars"],
        "train: none of 8,500 records can be used: 8,500 filtered_by_source",
    ),
]


@pytest.mark.parametrize(("words", "told"), LIMITS)
def test_what_cannot_be_asked_for(
    source: Path, tmp_path: Path, words: list[str], told: str
) -> None:
    split = ("--split", "train,test") if "one split" in told else ()
    done = run(
        "fire", "--source", source / "FIRE-train.json", *words, *split, "--output", tmp_path / "out"
    )
    assert done.returncode == 2
    assert told in done.stderr
    assert "Nothing was written." in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_download_that_ended_early_is_found_first(source: Path, tmp_path: Path) -> None:
    content = (source / "FIRE-test.json").read_bytes()
    (tmp_path / "FIRE-test.json").write_bytes(content[: len(content) // 2])
    words = ("--source", tmp_path / "FIRE-test.json", "--skip-images", "--output", tmp_path / "out")
    done = run("fire", *words)
    assert done.returncode == 2
    assert "The file is damaged, or its download incomplete. Nothing was written." in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["FIRE-test.json"]
    assert convert("fire", *words, "--max-samples", 50)["test"]["samples_processed"] == 50


def test_damage_within_a_list_is_found_and_nothing_is_kept(source: Path, tmp_path: Path) -> None:
    content = (source / "FIRE-test.json").read_bytes()
    half = len(content) // 2
    (tmp_path / "FIRE-test.json").write_bytes(content[:half] + b"\0" + content[half:])
    done = run(
        "fire",
        "--source",
        tmp_path / "FIRE-test.json",
        "--skip-images",
        "--output",
        tmp_path / "out",
    )
    assert done.returncode == 2
    assert "The file is damaged, or its download incomplete. Nothing was written." in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["FIRE-test.json"]


@pytest.mark.parametrize("block", [50, 2**20])
def test_records_are_estimated_without_parsing_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(origin, "_BLOCK", block)
    (tmp_path / "train.jsonl").write_text("{}\n{}\n{}")
    assert (
        origin.Origin("test", (source / "FIRE-test.json", tmp_path / "train.jsonl")).estimate()
        == 703
    )


def test_lines_that_are_no_json_are_counted(tmp_path: Path) -> None:
    lines = [json.dumps(trajectory(number)) for number in range(3)]
    (tmp_path / "train.jsonl").write_text("\n".join([lines[0], "{", lines[1], "7", lines[2]]))
    stats = convert(
        "fire", "--source", tmp_path, "--split", "train", "--skip-images", "-o", tmp_path / "o"
    )["train"]
    assert (stats["samples_processed"], stats["samples_used"]) == (5, 3)
    assert stats["skipped_by_reason"] == {"bad_json": 2}
    assert stats["errors"][1] == "train.jsonl:4: is a number; expected a JSON object."


def test_records_that_no_file_can_hold_are_told_of(tmp_path: Path) -> None:
    half = {**trajectory(1), "id": "half \ud800"}
    records = [half, {**half, "image": "coco/\ud800.jpg"}, {**half, "question": "\ud800"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    stats = convert(
        "fire", "--source", tmp_path, "--split", "train", "--skip-images", "-o", tmp_path / "o"
    )["train"]
    assert stats["skipped_by_reason"] == {"bad_text": 1, "image_outside": 1}
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
    assert stats["train"]["samples_used_by_source"] == {"coco": 4, "text": 5}
    kinds = check_shapes(SourceConfig(path=str(tmp_path / "out" / "volcano_train.jsonl"))).kinds
    assert kinds == {"Chat": 5, "Chat with images that are not there": 4}


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
    told = subprocess.run(
        [sys.executable, "-c", WATCHED, *command, "--workers", "2", "--output", str(tmp_path / "out")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (tmp_path / "out" / "fire_bc_train.jsonl").stat().st_size > 400e6
    assert int(told.stdout.split()[-1]) < 150 * 1024


WATCHED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""Small itself: what a process holds when it starts another counts for that one too."""
