"""`--json`: facts alone on standard output, the same for every verb."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune import cli
from kubetune.cli import json_answers
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.errors import DataError

FOLDER = Path(cli.__file__).parent
HOSTILE = {"key\x9b": ["\u202e", "\ud800", "\x1b[31m", "plain ü\n"]}


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_json(parser, "it as JSON")
    return parser.parse_args(words)


def show() -> None:
    print("for people")


def test_facts_are_printed_for_programs_and_the_rest_for_people(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @prints_json
    def run(args: argparse.Namespace) -> Answer:
        print("progress")
        subprocess.run([sys.executable, "-c", "print('of a child')"], check=True)
        return Answer(HOSTILE, show, exit_code=3)

    assert run(arguments("--json")) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out) == HOSTILE
    assert printed.out.isascii()
    assert not any(ord(char) < 32 and char != "\n" for char in printed.out)
    assert printed.err == "progress\n"
    assert run(arguments()) == 3
    assert capsys.readouterr().out == "progress\nfor people\n"


def test_an_error_comes_after_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    @prints_json
    def run(args: argparse.Namespace) -> Answer:
        return Answer({"ok": False}, show, error=DataError("2 records are bad"), indent=None)

    with pytest.raises(DataError, match="2 records are bad"):
        run(arguments("--json"))
    assert capsys.readouterr().out == '{"ok": false}\n'


def test_a_secret_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    json_answers.print_json({"address": "https://hf_abcdefghijklmnop@host"})
    assert "hf_abcdefghijklmnop" not in capsys.readouterr().out


def test_no_verb_adds_the_option_by_itself() -> None:
    for path in FOLDER.rglob("*.py"):
        if path.name not in ("json_answers.py", "mcp.py"):
            assert '"--json"' not in path.read_text("utf-8"), path
