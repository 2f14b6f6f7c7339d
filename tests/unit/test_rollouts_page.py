"""What a page shows of the answers of a run by reward: as much as fits, of the prompts answered most often, as text."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from kubetune.config.schema.rewards import RewardConfig
from kubetune.reporting import answers_over_time as of_page
from kubetune.reporting import write_report
from kubetune.reporting.answers_over_time import SECTION, WHOLE_PROMPT, shown_rollouts
from kubetune.reporting.rendering import turns
from kubetune.rundir import rollout_files
from kubetune.ui.server import application
from kubetune.ui.site import Site

HOSTILE = '</pre><script>alert(1)</script>\x1b[2J\u202e"'
REWARDS = (RewardConfig(name="exact_match"), RewardConfig(name="format", weight=0.5, settings={"pattern": "x"}))  # fmt: skip


def group(row: int, marks: list[float | None], text: str = "answer") -> dict[str, Any]:
    """Return a prompt whose answers got these marks of exact_match, and 1 of format."""
    answers = []
    for number, mark in enumerate(marks):
        rewards = {"exact_match": mark, "format": None if mark is None else 1.0}
        answers.append(
            {"text": f"{text} {number}", "rewards": rewards, "is_cut": number == 0, "ids": [1]}
        )
    return {"made_by": "9f" * 32, "slot": 0, "row": row, "text": f"prompt {row}", "prompt": [1],
            "answers": answers, "errors": {}}  # fmt: skip


def write_step(run_dir: Path, step: int, *lines: dict[str, Any]) -> Path:
    path = rollout_files.file_of(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run of ten steps that answered row 3 at each, rows 10 to 19 at one each, with hostile answers."""
    run = tmp_path / "runs" / "poet"
    run.mkdir(parents=True)
    config = {
        "name": "poet",
        "task": "grpo",
        "model": {"path": "org/model"},
        "data": {"train": [{"path": "train.jsonl"}]},
        "rewards": [{"name": "exact_match"}],
    }
    (run / "resolved.json").write_text(json.dumps(config))
    numbers = []
    timings = []
    for step in range(10):
        write_step(run, step, group(10 + step, [0.0]), group(3, [0.0, 1.0, None, 1.0], HOSTILE))
        numbers.append({"step": step + 1, "epoch": 1.0, "loss": 0.1, "learning_rate": 1e-4, "grad_norm": 1.0,
                        "samples": 2, "tokens": 20, "trained_tokens": 10, "reward": 0.5, "solved": 0.5,
                        "reward/exact_match": 0.25 + step / 100})  # fmt: skip
        timings.append({"step": step + 1, "seconds": 2.0, "tokens_per_second": 10.0, "trained_tokens_per_second": 5.0,
                        "peak_memory_bytes": 1, "rank_seconds": [1.0], "generate_seconds": 1.0,
                        "train_seconds": 0.5})  # fmt: skip
    for name, lines in (("metrics", numbers), ("timings", timings)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / f"{name}.jsonl").write_text(text)
    return run


def test_the_prompt_answered_most_often_comes_first_with_its_best_and_worst_answers(
    run_dir: Path,
) -> None:
    shown = shown_rollouts(run_dir, REWARDS, SECTION)
    assert (shown.files, shown.files_read, shown.damaged) == (10, 10, 0)
    assert [prompt.row for prompt in shown.prompts] == [3, 10, 11]
    first = shown.prompts[0]
    assert (first.text, first.drawings) == ("prompt 3", 10)
    assert [step.step for step in first.steps] == [0, 2, 4, 5, 7, 9]
    step = first.steps[0]
    # Rewards are weighted: 1 + 0.5 × 1. An answer that nobody could judge comes last, and is in no mean.
    assert [answer.reward for answer in step.answers] == [1.5, None]
    assert (step.count, step.mean) == (4, pytest.approx((0.5 + 1.5 + 1.5) / 3))
    whole = shown_rollouts(run_dir, REWARDS, WHOLE_PROMPT, 3).prompts[0]
    assert [answer.reward for answer in whole.steps[9].answers] == [1.5, 1.5, 0.5, None]
    assert [answer.is_cut for answer in whole.steps[9].answers] == [False, False, True, False]
    assert shown_rollouts(run_dir, REWARDS, WHOLE_PROMPT, 99).prompts == []


def test_equal_answers_are_one_line_with_their_number(run_dir: Path) -> None:
    drawn = group(3, [1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    for answer in drawn["answers"]:
        answer["is_cut"] = False
        answer["text"] = "right" if answer["rewards"]["exact_match"] else "wrong"
    # The same text that a function could not judge is another answer.
    drawn["answers"][5]["rewards"] = {"exact_match": None, "format": None}
    write_step(run_dir, 9, drawn)
    step = shown_rollouts(run_dir, REWARDS, WHOLE_PROMPT, 3).prompts[0].steps[-1]
    assert [(answer.text, answer.times) for answer in step.answers] == [
        ("right", 3),
        ("wrong", 2),
        ("wrong", 1),
    ]
    assert step.count == 6
    assert step.mean == pytest.approx((3 * 1.5 + 2 * 0.5) / 5)


def test_what_is_damaged_or_too_much_is_counted(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout_files.file_of(run_dir, 0).write_text(
        '{"row": 3, "text": "half\n{"row": 3, "answers": 1}\n'
    )
    rollout_files.file_of(run_dir, 1).unlink()
    rollout_files.file_of(run_dir, 1).symlink_to("/etc/passwd")
    shown = shown_rollouts(run_dir, REWARDS, WHOLE_PROMPT, 3)
    assert (shown.damaged, [step.step for step in shown.prompts[0].steps]) == (
        2,
        list(range(2, 10)),
    )
    long = write_step(run_dir, 9, group(3, [1.0], "long " * 1000))
    assert shown_rollouts(run_dir, REWARDS, SECTION).prompts[0].steps[-1].answers[0].is_shortened
    monkeypatch.setattr(of_page, "MOST_BYTES", long.stat().st_size + 100)
    few = shown_rollouts(run_dir, REWARDS, SECTION)
    assert (few.files, few.files_read) == (10, 2)


def test_the_report_shows_them_as_text_and_the_curves_of_each_function(
    run_dir: Path, tmp_path: Path
) -> None:
    page = write_report([run_dir], tmp_path / "report.html").read_text()
    section = page.partition('<section id="rollouts"')[2].partition("</section>")[0]
    assert "Answers over time" in section
    assert "<script" not in section
    assert "&lt;script&gt;" in section
    for char in "\x1b\u202e":
        assert char not in section
    for title in ("Reward by function", "Seconds of a step", "Shares of prompts and answers"):
        assert f"<h3>{title}</h3>" in page
    assert '"exact_match"' in page, "a line of a chart"


def test_a_page_shows_all_answers_to_a_prompt(run_dir: Path) -> None:
    site = application(Site.of(run_dir.parent), "token")
    with TestClient(site, base_url="http://localhost") as client:
        client.get("/", params={"token": "token"})
        run = client.get("/run?dir=poet").text
        assert 'href="/rollouts?dir=poet&amp;row=3"' in run
        page = client.get("/rollouts?dir=poet&row=3").text
        assert page.count("could not judge") == 0
        assert page.count("mean reward 0.6667 of 4 answers") == 10
        assert "<script>alert" not in page
        assert "kubetune rollouts" in page
        assert "--row</span> 3" in page
        assert '<a href="/" aria-current="page">Runs</a>' in page
        assert 'aria-label="Row before" role="link" aria-disabled="true"' in page
        assert 'title="Row 10" href="/rollouts?dir=poet&amp;row=10"' in page
        assert "was not answered" in client.get("/rollouts?dir=poet&row=99").text
        wrong = client.get("/rollouts?dir=poet&row=x")
        assert wrong.status_code == 400
        assert "expected the number of a row" in html.unescape(wrong.text)
        (run_dir / rollout_files.FOLDER).rename(run_dir / "away")
        assert "drew no answers yet" in client.get("/rollouts?dir=poet").text


@pytest.mark.parametrize(
    ("prompt", "spoken"),
    [
        ("user\nsay\na word\nassistant\n", [("user", "say\na word")]),
        (
            "system\n\nBe brief.\nuser\nhi\nmodel\nyes\nuser\nwhy?\nmodel",
            [("system", "Be brief."), ("user", "hi"), ("model", "yes"), ("user", "why?")],
        ),
        ("user\nsay", []),
        ("Is the user\nassistant\n", []),
        ("assistant", []),
        ("", []),
    ],
)
def test_names_of_roles_that_decoding_leaves_over_are_shown_as_turns(
    prompt: str, spoken: list[tuple[str, str]]
) -> None:
    assert [(turn["role"], turn["content"]) for turn in turns(prompt)] == spoken
