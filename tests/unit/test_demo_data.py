"""What the package embeds for the demo: it is what its script makes, it is small, and it holds the demo's claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kubetune.cli.local.demo import EMBEDDED

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import demo_world

    return demo_world


def chats(name: str) -> list[tuple[str, str]]:
    rows = [
        json.loads(line)["messages"] for line in (EMBEDDED / "data" / name).read_text().splitlines()
    ]
    return [(request["content"], command["content"]) for request, command in rows]


def test_the_data_are_what_the_script_makes(world, tmp_path: Path) -> None:
    import make_demo_model

    make_demo_model.write_data(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl", "pairs.jsonl"):
        assert (tmp_path / name).read_bytes() == (EMBEDDED / "data" / name).read_bytes()


def test_no_held_out_request_is_about_a_service_where_the_training_data_have_it(world) -> None:
    trained, held_out = (pairs(world, name) for name in ("train.jsonl", "heldout.jsonl"))
    assert {len(pair) for pair in trained | held_out} == {2}
    assert len(held_out) > 50
    assert not trained & held_out


def pairs(world, name: str) -> set[tuple[str, str]]:
    """Return (service, namespace) of every chat."""
    words = [
        set("".join(c if c.isalpha() else " " for c in request).split())
        for request, _ in chats(name)
    ]
    return {(*known & set(world.SERVICES), *known & set(world.NAMESPACES)) for known in words}


def test_the_base_model_was_never_shown_a_command_of_the_task(world) -> None:
    commands = {command for name in ("train.jsonl", "heldout.jsonl") for _, command in chats(name)}
    shown = [text for piece in world.pretraining_pieces(7, 100, 5_000) for text in piece]
    assert not [text for text in shown if text in commands]
    assert not any(
        "kubectl" in answer
        for question, answer in world.pretraining_pieces(7, 0, 5_000)
        if question
    )


def test_the_embedded_model_is_small() -> None:
    assert sum(path.stat().st_size for path in EMBEDDED.rglob("*") if path.is_file()) < 4_000_000
