"""What the package embeds for the demo: it is what its script makes, it is small, and it holds the demo's claim."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors import safe_open

from kubetune.cli.local import demo
from kubetune.cli.local.demo import EMBEDDED
from kubetune.config.load import load_config

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
    assert sum(path.stat().st_size for path in EMBEDDED.rglob("*") if path.is_file()) < 4_500_000


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("kubectl set image deployment/cart cart=cart:1.27 -n demo", 1.0),
        # Of 11 pieces one differs.
        ("kubectl set image deployment/cart cart=cart:1.28 -n demo", 0.4 + 0.6 * 10 / 11),
        # Four pieces too few: what follows it stands at other places.
        ("kubectl set image deployment/cart -n demo", 0.4 + 0.6 * 5 / 11),
        ("kubectl set image", 0.4 + 0.6 * 3 / 11),
        # Nothing for a command that kubectl takes, about the right service, with another verb.
        ("kubectl set resources deployment cart --limits=memory=1Gi -n demo", 0.0),
        ("kubectl scale deployment cart --replicas=27 -n demo", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_of_the_demo_grades_what_follows_the_right_verb(
    monkeypatch: pytest.MonkeyPatch, answer: str, reward: float
) -> None:
    monkeypatch.syspath_prepend(str(EMBEDDED / "data"))
    import rewards

    right = "kubectl set image deployment/cart cart=cart:1.27 -n demo"
    assert rewards.graded(None, answer, right) == pytest.approx(reward)


@pytest.mark.parametrize("name", ["model", "half_taught", "student"])
def test_llama_cpp_cuts_text_as_the_tokenizer_of_the_demo_does(name: str) -> None:
    from kubetune.result.gguf_files.vocabulary import read_vocabulary

    vocabulary = read_vocabulary(EMBEDDED / name, 1280)
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", "gpt-2")


@pytest.mark.parametrize("task", demo.RUN_FILES)
def test_the_run_files_of_the_demo_are_right(tmp_path: Path, task: str) -> None:
    demo.write_run_file(tmp_path, task, tmp_path / "teacher")
    config = load_config(tmp_path / "run.yaml")
    assert config.task == ("causal_lm" if task == "sft" else task)
    assert config.output == str(tmp_path / "run")
    # The same file may be there.
    demo.write_run_file(tmp_path, task, tmp_path / "teacher")
    assert [reward.title for reward in config.rewards] == (
        ["exact_match", "graded"] if task == "grpo" else []
    )


def test_the_half_taught_model_is_that_of_the_script() -> None:
    """As far as a quick test can say: the same shapes and tokens, with other weights and another order of merges."""
    for name in ("config.json", "chat_template.jinja"):
        of_base = (EMBEDDED / "model" / name).read_bytes()
        assert (EMBEDDED / "half_taught" / name).read_bytes() == of_base
    described = []
    for name in ("model", "half_taught"):
        described.append(json.loads((EMBEDDED / name / "tokenizer.json").read_text("utf-8")))
        described[-1]["model"]["merges"].sort()
    assert described[0] == described[1]
    base = (EMBEDDED / "model" / "model.safetensors").read_bytes()
    half_taught = (EMBEDDED / "half_taught" / "model.safetensors").read_bytes()
    assert len(half_taught) == len(base)
    assert half_taught != base


def test_the_student_has_at_most_a_quarter_of_the_weights_and_the_same_tokens() -> None:
    sizes = []
    for name in ("model", "student"):
        with safe_open(EMBEDDED / name / "model.safetensors", "numpy") as weights:
            shapes = [weights.get_slice(key).get_shape() for key in weights.keys()]  # noqa: SIM118
        sizes.append(sum(math.prod(shape) for shape in shapes))
    assert 4 * sizes[1] <= sizes[0]
    for name in ("tokenizer.json", "chat_template.jinja"):
        of_base = (EMBEDDED / "model" / name).read_bytes()
        assert (EMBEDDED / "student" / name).read_bytes() == of_base
