"""What the package embeds for the demo: it is what its script makes, it is small, and it holds the demo's claim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune.cli.demo import EMBEDDED, NEXT_PROMPT

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import demo_world

    return demo_world


def chats(name: str) -> list[tuple[str, str]]:
    rows = [json.loads(line)["messages"] for line in (EMBEDDED / "data" / name).read_text().splitlines()]
    return [(request["content"], command["content"]) for request, command in rows]


def test_the_data_are_what_the_script_makes(tmp_path: Path) -> None:
    made = "import sys, make_demo_model, pathlib; make_demo_model.write_data(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", made, str(tmp_path)], cwd=SCRIPTS, check=True)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (EMBEDDED / "data" / name).read_bytes()


def test_no_held_out_request_is_about_a_service_of_the_training_data(world) -> None:
    trained = {word for chat in chats("train.jsonl") for text in chat for word in words(text)}
    held_out = {word for chat in chats("heldout.jsonl") for text in chat for word in words(text)}
    assert not trained & set(world.HELD_OUT_SERVICES)
    assert len(held_out & set(world.HELD_OUT_SERVICES)) == len(world.HELD_OUT_SERVICES)
    assert set(words(NEXT_PROMPT)) & set(world.HELD_OUT_SERVICES)


def words(text: str) -> list[str]:
    """The runs of letters in a text."""
    return "".join(c if c.isalpha() else " " for c in text).split()


def test_the_base_model_was_never_shown_a_command_of_the_task(world) -> None:
    commands = {command for name in ("train.jsonl", "heldout.jsonl") for _, command in chats(name)}
    shown = [text for piece in world.pretraining_pieces(7, 100, 5_000) for text in piece]
    assert not [text for text in shown if text in commands]
    assert not any("kubectl" in answer for question, answer in world.pretraining_pieces(7, 0, 5_000) if question)


def test_the_embedded_model_is_small() -> None:
    assert sum(path.stat().st_size for path in EMBEDDED.rglob("*") if path.is_file()) < 4_000_000
