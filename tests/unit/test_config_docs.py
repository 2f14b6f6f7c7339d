"""The published reference and schema are those of the code, and the examples and the starter file hold to both."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from kubetune.cli.prepare.starter import TASKS, starter
from kubetune.config import json_schema
from kubetune.config.load import load_config
from kubetune.plan.plan import make_plan

ROOT = Path(__file__).parents[2]
WRITER = ROOT / "scripts" / "reference_docs.py"
GENERATED = ("config.md", "commands.md", "examples.md", "run.schema.json", "events.schema.json")
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_generated_pages_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, WRITER, tmp_path], check=True)
    pages = {path.name: path for path in tmp_path.iterdir()}
    assert set(pages) == {*GENERATED}
    for name, made in pages.items():
        committed = (ROOT / "docs" / name).read_text("utf-8")
        assert committed == made.read_text("utf-8"), "run: python scripts/reference_docs.py"


def test_asking_for_help_writes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, WRITER, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "where to write" in done.stdout
    assert not list(tmp_path.iterdir())


def test_every_key_has_a_meaning() -> None:
    assert not [path for path, node in json_schema.leaves() if not node.get("description")]


@cache
def validator() -> Any:
    schema = json_schema.editor_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def plain(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load_and_editors_accept_them(path: Path) -> None:
    config = load_config(path)
    assert make_plan(config, 10, 1).num_steps > 0
    # The others are data sets of the hub, or made by a run's own pod.
    files = [
        source
        for source in config.data.train
        if source.subset is None and not source.path.startswith("/outputs")
    ]
    assert all(Path(source.path.split("#")[0]).is_file() for source in files)
    validator().validate(plain(path.read_text("utf-8")))


def test_the_starter_file_loads_and_is_short(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    text = starter("causal_lm")
    path.write_text(text, "utf-8")
    assert load_config(path).training.global_batch_size == 32
    validator().validate(plain(text))
    assert len(text.splitlines()) <= 60


@pytest.mark.parametrize(
    "text",
    [
        "model: 1",
        "trainin: {}",
        "training: {learning_rate: fast}",
        "data: {train: x, packing: 2}",
        "lora: 8",
    ],
)
def test_editors_refuse_what_the_loader_refuses(text: str) -> None:
    assert list(validator().iter_errors(plain(text)))


@pytest.mark.parametrize(
    "text",
    ["lora: true", "data: {train: x, eval: [y, {path: z}]}", "lora_rank: 8", "model: {path: x}"],
)
def test_editors_accept_short_forms_and_other_spellings(text: str) -> None:
    assert not list(validator().iter_errors(plain(text)))


@pytest.mark.parametrize("task", TASKS)
def test_there_is_a_starter_for_each_kind_of_learning(task: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(starter(task), "utf-8")
    assert load_config(tmp_path / "run.yaml").task == task
