"""Evaluations of `task: grpo`: answers to held-out prompts, judged by the run's own rewards, choose the best checkpoint."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from kubetune import cli, errors
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config, RewardConfig
from kubetune.rundir import exit_status, metrics
from tests import toy
from tests.run.test_grpo import config_of

slow = pytest.mark.slow


def held_out(inputs: Path, training: dict[str, Any] | None = None, **settings: Any) -> Config:
    """Learn as `config_of` does, and evaluate on prompts of which none has a right answer."""
    config = config_of(inputs, training, **settings)
    asked = inputs / "asked.jsonl"
    lines = [json.loads(line) for line in (inputs / "eval.jsonl").read_text().splitlines()]
    prompts = [{"prompt": line["prompt"], "note": "x"} for line in lines]
    asked.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    values = config.model_dump(exclude_unset=True)
    values["data"]["eval"] = str(asked)
    del values["evaluation"]
    return Config.model_validate(values)


def evaluations_of(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in metrics.read_metrics(run_dir) if metrics.is_evaluation(line)]


def answers_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return metrics.read_lines(run_dir / metrics.ANSWERS / f"step-{step:06d}.jsonl")


@pytest.fixture(scope="module")
def run_dir(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = {"max_steps": 13, "eval_steps": 5, "save_steps": 13}
    return toy.finished(tmp_path_factory.mktemp("held-out") / "run", held_out(inputs, training))


def test_rewards_of_held_out_prompts_choose_the_best_checkpoint(run_dir: Path) -> None:
    assert read_config(run_dir).training.metric_for_best_model == "eval_reward"
    lines = evaluations_of(run_dir)
    assert [line["step"] for line in lines] == [5, 10, 13]
    assert not any("eval_loss" in line for line in lines), "no prompt has a right answer"
    best = max(lines, key=lambda line: line["eval_reward"])
    assert (run_dir / "checkpoints" / "best").resolve().name == f"step-{best['step']:06d}"

    # Each answer by itself: the functions of `config_of`, the second of weight 0.1.
    for line in lines:
        rewarded = answers_of(run_dir, line["step"])
        totals = [row["scores"]["reward"] for row in rewarded]
        for row, total in zip(rewarded, totals, strict=True):
            assert total == pytest.approx(row["rewards"]["low"] + 0.1 * row["rewards"]["length"])
        assert line["eval_reward"] == pytest.approx(sum(totals) / len(totals))
        assert line["eval_reward_std"] >= 0
        both = line["eval_reward/low"] + 0.1 * line["eval_reward/length"]
        assert both == pytest.approx(line["eval_reward"])


def test_the_log_says_the_reward_wherever_it_says_the_loss(run_dir: Path) -> None:
    log = toy.log_of(run_dir)
    of_steps = [line for line in log.splitlines() if "[TRAIN]" in line]
    assert of_steps
    assert all(" reward " in line and " reward_std " in line for line in of_steps)
    of_epochs = [line for line in log.splitlines() if "[EPOCH]" in line]
    assert of_epochs
    assert all(", reward 0." in line and ", reward_std 0." in line for line in of_epochs)
    of_evaluations = [line for line in log.splitlines() if "[EVAL] step" in line]
    assert "step 5 eval_reward 0." in of_evaluations[0]
    assert "eval_reward by name: low 0." in of_evaluations[1]
    assert "eval_loss" not in "".join(of_evaluations)
    results = "\n".join(line for line in log.splitlines() if "[RESULT]" in line)
    report = json.loads((run_dir / metrics.REPORT).read_text())
    first = report["measures"]["reward"]["first"]
    last = report["measures"]["reward"]["last"]
    assert f"reward {first:.3g} → {last:.3g}" in results
    assert "in training (means of the first and the last 3 steps)" in results
    # And the same prompts before and after.
    base = json.loads((run_dir / metrics.BASE).read_text())["metrics"]["eval_reward"]
    assert f"reward {base:.4g} → " in results


@slow
def test_any_number_of_ranks_rewards_the_same_answers(inputs: Path, tmp_path: Path) -> None:
    config = held_out(inputs, {"max_steps": 2, "eval_steps": 2, "save_steps": 2})
    one = toy.finished(tmp_path / "1", config, 1)
    two = toy.finished(tmp_path / "2", config, 2)
    assert answers_of(one, 0) == answers_of(two, 0)
    toy.require_like(one, two)


@slow
def test_three_ranks_reward_the_same_answers(inputs: Path, tmp_path: Path) -> None:
    config = held_out(inputs, {"max_steps": 2, "eval_steps": 2, "save_steps": 2})
    one = toy.finished(tmp_path / "1", config, 1)
    three = toy.finished(tmp_path / "3", config, 3)
    assert answers_of(one, 0) == answers_of(three, 0)
    toy.require_like(one, three)


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("0.0", "nothing was learned: all 32 answers got reward 0"),
        ("float('nan')", "nothing was learned: no reward judged any of 32 answers"),
    ],
    ids=["zero", "nan"],
)
def test_a_run_that_learns_nothing_ends_with_that(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], reward: str, sentence: str
) -> None:
    config = held_out(inputs, {"max_steps": 2, "eval_steps": 2, "save_steps": 2})
    (tmp_path / "never.py").write_text(
        f"def never(completions, **rest):\n    return [{reward}] * len(completions)\n"
    )
    values = config.model_dump(exclude_unset=True)
    never = {"file": str(tmp_path / "never.py"), "function": "never"}
    values |= {"rewards": [never], "output": str(tmp_path / "run"), "compute": {"processes": 1}}
    file = tmp_path / "run.yaml"
    file.write_text(Config.model_validate(values).model_dump_json(exclude_unset=True))
    assert cli.main(["train", str(file)]) == errors.OK
    shown = capfd.readouterr().out
    assert sentence in shown.splitlines()[-1], shown
    assert f"`kubetune rollouts {tmp_path / 'run'}`" in shown.splitlines()[-1]
    assert "Next:" not in shown
    status = exit_status.read_exit_status(tmp_path / "run")
    assert status is not None
    assert sentence in status.reason
    assert cli.main(["report", str(tmp_path / "run")]) == errors.OK
    (page,) = (tmp_path / "run").glob("*.html")
    assert "nothing was learned" in page.read_text()


def test_rewards_that_fail_on_all_held_out_prompts_end_the_run_before_it_learns(
    inputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "picky.py").write_text(
        "def picky(completions, note=None, **rest):\n"
        "    return [len(text) / len(note[0]) for text in completions]\n"
    )
    config = held_out(inputs, {"max_steps": 1})
    asked = tmp_path / "asked.jsonl"
    lines = (inputs / "asked.jsonl").read_text().splitlines()
    asked.write_text("".join(json.dumps({**json.loads(line), "note": ""}) + "\n" for line in lines))
    values = config.model_dump(exclude_unset=True)
    values["data"]["eval"] = str(asked)
    config = Config.model_validate(values)
    picky = RewardConfig(file=str(tmp_path / "picky.py"), function="picky")
    run_dir = toy.make_run(tmp_path / "run", config.model_copy(update={"rewards": (picky,)}))
    assert toy.train(run_dir) == [errors.USER]
    log = toy.log_of(run_dir)
    assert "reward picky could judge no answer to the held-out prompts: " in log
    assert "ZeroDivisionError" in log


def test_metrics_that_compare_need_right_answers(inputs: Path, tmp_path: Path) -> None:
    values = held_out(inputs).model_dump(exclude_unset=True)
    values["evaluation"] = {"generate": {"metric": ["exact_match"]}}
    run_dir = toy.make_run(tmp_path / "run", Config.model_validate(values))
    assert toy.train(run_dir) == [errors.USER]
    assert "rows have no right answer, and exact_match compares with it" in toy.log_of(run_dir)


def test_other_tasks_have_no_rewards(inputs: Path) -> None:
    with pytest.raises(ValueError, match="found reward with `task: causal_lm`"):
        toy.make_config(inputs, evaluation={"generate": {"metric": "reward"}})


def test_what_a_run_file_says_wins(inputs: Path) -> None:
    values = held_out(inputs).model_dump(exclude_unset=True)
    generate = {"metric": ["json_valid"], "rows": 7, "max_new_tokens": 3}
    values["evaluation"] = {"generate": generate}
    values["training"]["metric_for_best_model"] = "json_valid"
    config = Config.model_validate(values)
    assert config.training.metric_for_best_model == "eval_json_valid"
    wanted = config.evaluation.generate
    assert wanted is not None
    assert wanted.metric == ("reward", "json_valid")
    assert (wanted.rows, wanted.max_new_tokens, wanted.batch_size) == (7, 3, 8)
    # Without data to evaluate on there is nothing to ask.
    values["data"]["eval"] = None
    del values["evaluation"], values["training"]["metric_for_best_model"]
    assert Config.model_validate(values).evaluation.generate is None


@slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("nth", range(2, 50, 7))
def test_a_run_ended_within_an_evaluation_ends_as_if_it_were_not(
    inputs: Path, tmp_path: Path, number: signal.Signals, nth: int
) -> None:
    config = held_out(inputs, {"max_steps": 4, "eval_steps": 2, "save_steps": 4})
    whole = toy.finished(tmp_path / "whole", config)
    run_dir = toy.make_run(tmp_path / "run", config)
    fault = {"KUBETUNE_FAULT": f"signal {number.value}:evaluation:{nth}:0"}
    assert toy.train(run_dir, 1, fault) != [0], "each of these visits is within an evaluation"
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == toy.digests(whole)
    for step in (0, 2, 4):
        assert answers_of(run_dir, step) == answers_of(whole, step)
    assert (run_dir / metrics.BASE).read_text() == (whole / metrics.BASE).read_text()
