"""Answers before and after training: of rows held out, asked as the model was taught, by a process after the run."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from kubetune import errors
from kubetune.config.consent import STARTED
from kubetune.data.prepared.prepare import prepare
from kubetune.reporting import write_report
from kubetune.result.inference import before_after, teacher_answers
from kubetune.result.inference.answering import Sampling, answer, answers, load_run
from kubetune.rundir import metrics
from kubetune.scoring.questions import drawn
from tests import toy
from tests.architectures import save_model
from tests.vllm_server import running


@dataclass
class Drawn:
    """As much of prepared rows as questions are made of."""

    trained: list[list[int]]
    processor = targets = None

    def __len__(self) -> int:
        return len(self.trained)

    def sequences(self, index: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        trained = np.array(self.trained[index], bool)
        return ((np.arange(len(trained)), trained),)


def test_rows_are_cut_before_their_last_answer() -> None:
    rows: Any = Drawn([[0, 0, 0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0], [0] + [1] * 9, [0, 0]])
    questions = {question.row: (len(question.ids), question.is_whole) for question in drawn(rows)}
    assert questions == {0: (7, False), 1: (3, False), 2: (5, True)}, (
        "of a text that is trained whole, the second half"
    )


def test_a_pair_is_asked_for_its_chosen_answer(inputs: Path, tmp_path: Path) -> None:
    pair = {"prompt": "the fox", "chosen": " yes", "rejected": " no"}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 2)
    pairs = {"train": str(tmp_path / "pairs.jsonl"), "eval": None, "cache": str(tmp_path / "cache")}
    prepared = prepare(toy.make_config(inputs, task="preference", data=pairs))
    (question, _) = drawn(prepared.train)
    decode = prepared.tokenizer.decode
    assert [decode(question.ids).strip(), decode(question.answer).strip()] == ["the fox", "yes"]


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_the_model_answers_before_and_after(
    inputs: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(before_after, "MOST_TOKENS", 16)
    sections = {"lora": {"r": 4} if method == "lora" else None}
    run_dir = toy.finished(tmp_path / "run", toy.make_config(inputs, {"max_steps": 3}, **sections))
    digests = toy.digests(run_dir)
    lines = [json.loads(line) for line in before_after.record(run_dir, 3).read_text().splitlines()]
    held_out = [json.loads(line) for line in (inputs / "eval.jsonl").read_text().splitlines()]
    pairs = {(row["prompt"], row["completion"].strip()) for row in held_out}
    assert {(line["prompt"], line["expected"].strip()) for line in lines} <= pairs
    assert len(lines) == 3
    assert all(line["before"] != line["after"] for line in lines), (
        "three steps at this rate change what is said"
    )
    assert before_after.record(run_dir, 3).read_text() == "".join(
        f"{json.dumps(s, ensure_ascii=False)}\n" for s in lines
    )
    assert toy.digests(run_dir) == digests
    page = write_report([run_dir], tmp_path / "report.html").read_text()
    assert lines[0]["prompt"] in page


def test_a_teacher_answers_beside_the_model_that_learnt_from_it(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(before_after, "MOST_TOKENS", 8)
    teacher = tmp_path / "teacher"
    save_model(teacher, hidden_size=96, intermediate_size=128)
    settings = {"teacher": str(teacher), "lmbda": 0}
    config = toy.make_config(inputs, {"max_steps": 1}, task="distill", distill=settings)
    run_dir = toy.finished(tmp_path / "run", config)
    lines = [json.loads(line) for line in before_after.record(run_dir, 3).read_text().splitlines()]
    page = write_report([run_dir], tmp_path / "report.html").read_text()
    assert page.count("<dt>teacher</dt>") == 3

    loaded = load_run(run_dir)
    prompts = [loaded.encode(line["prompt"]) for line in lines]
    model: Any = AutoModelForCausalLM.from_pretrained(teacher)
    texts = list(answers(replace(loaded, model=model), prompts, Sampling(8)))
    assert [line["teacher"] for line in lines] == texts
    assert texts != [line["before"] for line in lines]

    # The same teacher on a server, which answers those who have allowed it.
    with running(teacher, tmp_path / "servers") as (server,):
        served = {**settings, "teacher": server.url, "support": "teacher_k", "timeout_seconds": 5}
        config = toy.make_config(inputs, task="distill", distill=served)
        asked = (config, run_dir, loaded, prompts, Sampling(8))
        assert teacher_answers.answers_of_teacher(*asked) is None
        assert not server.calls("/v1/completions")
        monkeypatch.setenv(STARTED, str(run_dir))
        assert teacher_answers.answers_of_teacher(*asked) == texts
        server.set_fault("500")
        assert teacher_answers.answers_of_teacher(*asked) is None


def test_what_has_no_answers_is_explained(inputs: Path, tmp_path: Path) -> None:
    config = toy.make_config(inputs, {"max_steps": 1}, data={"eval": None})
    run_dir = toy.finished(tmp_path / "run", config)
    with pytest.raises(
        errors.ConfigError, match=r"no evaluation data to ask it about; set data\.eval"
    ):
        before_after.record(run_dir, 3)
    assert before_after.main([str(run_dir), "3"]) == errors.USER


@pytest.mark.slow
def test_each_kept_checkpoint_answers_and_the_page_shows_them_by_step(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(before_after, "MOST_TOKENS", 8)
    run_dir = toy.finished(
        tmp_path / "run",
        toy.make_config(inputs, {"max_steps": 6, "save_steps": 2, "eval_steps": 2}),
    )
    (line,) = (
        json.loads(line) for line in before_after.record(run_dir, 1).read_text().splitlines()
    )
    assert [entry["step"] for entry in line["answers"]] == [2, 4, 6]
    by_step = {entry["step"]: entry["answer"] for entry in line["answers"]}
    assert by_step[line["step"]] == line["after"], "the best one is among them"
    for step, expected in by_step.items():
        prompts = [line["prompt"]]
        sampling = Sampling(8)
        assert answer(load_run(run_dir, str(step)), prompts, sampling) == [expected], (
            "what that checkpoint says when asked"
        )
    page = write_report([run_dir], tmp_path / "report.html").read_text()
    labels = re.findall("<dt>([^<]*)</dt>", page[page.index('class="answers"') :])
    assert labels[:6] == ["request", "expected", "before", "step 2", "step 4", "step 6"]
    assert (
        page.count(
            '<span class="tag">best</span>', page.index('class="answers"'), page.index("</article>")
        )
        == 1
    )


def test_a_conversation_is_shown_turn_by_turn(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(before_after, "MOST_TOKENS", 8)
    talk = [
        ("system", "be brief"),
        ("user", "what is the fox"),
        ("assistant", "quick"),
        ("user", "and the dog <b>"),
    ]
    messages = [{"role": role, "content": content} for role, content in talk]
    answered = [*messages, {"role": "assistant", "content": "lazy"}]
    talks = tmp_path / "talks.jsonl"
    talks.write_text(f"{json.dumps({'messages': answered})}\n" * 2)
    config = toy.make_config(
        inputs,
        {"max_steps": 1},
        data={"eval": str(talks), "max_length": 512},
        logging={"before_after": 1},
    )
    run_dir = toy.finished(tmp_path / "run", config)
    talks.unlink()  # what is asked lies in the run directory
    (line,) = (
        json.loads(line) for line in before_after.record(run_dir, 1).read_text().splitlines()
    )
    assert [(turn["role"], turn["content"]) for turn in line["messages"]] == talk
    assert line["expected"].strip() == "lazy"
    page = write_report([run_dir], tmp_path / "report.html").read_text()
    turns = re.findall('<span class="who">(.*?)</span><div><pre class="prompt">(.*?)</pre>', page)
    assert turns == [(role, html.escape(content)) for role, content in talk]


@pytest.mark.slow
def test_a_run_records_them_when_it_has_ended(inputs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [
        f"model={inputs / 'model'}",
        f"data.train={inputs / 'train.jsonl'}",
        "data.eval=0.2",
        "lora.r=4",
    ]
    words += [
        "training.max_steps=2",
        "logging.before_after=2",
        f"data.cache={inputs / 'cache'}",
        f"output={run_dir}",
    ]
    command = [sys.executable, "-m", "kubetune", "train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rows before and after training, at 1 checkpoint" in done.stdout
    assert len(metrics.read_lines(run_dir / metrics.BEFORE_AFTER)) == 2
