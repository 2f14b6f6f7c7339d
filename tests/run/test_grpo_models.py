"""Rewards by models: a reward model trained here or published, and a teacher, against plain transformers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import kubetune
from kubetune import errors
from kubetune.config.schema import Config, ModelConfig, RewardConfig
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.library.plan_forecast import forecast_run
from kubetune.plan.model_shapes import read_weights
from kubetune.scoring.rewards.models import load_judge
from kubetune.scoring.rewards.request import Request
from kubetune.training.rollouts import rollout_records
from tests import toy
from tests.architectures import save_model
from tests.preferences import write_pairs
from tests.tiny import train_tokenizer

CPU = torch.device("cpu")
TEXTS = [" the quick brown fox", " no", "", " a lazy dog yes yes"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def reward_run(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = toy.make_config(
        inputs, {"max_steps": 3}, task="reward_model", data=write_pairs(inputs)
    )
    return toy.finished(tmp_path_factory.mktemp("reward-model") / "run", config)


def judge_of(inputs: Path, longest: int = 64, **reward: Any) -> Any:
    tokenizer = load_tokenizer(ModelConfig(path=str(inputs / "model")))
    return load_judge(RewardConfig(**reward), tokenizer, CPU, longest, local_files_only=True)


def request_of(inputs: Path, prompt: str = "12 what is the capital") -> Request:
    tokenizer = load_tokenizer(ModelConfig(path=str(inputs / "model")))
    ids = [[*tokenizer.encode_text(text, special=False), tokenizer.eos_id] for text in TEXTS]
    return Request(prompt, {}, [None], TEXTS, ids, tokenizer.encode_text(prompt))


def test_a_reward_model_trained_here_scores_as_it_does_itself(
    inputs: Path, reward_run: Path
) -> None:
    request = request_of(inputs)
    judgement = judge_of(inputs, reward_model=str(reward_run)).judge(request)
    assert not judgement.error
    # Of an answer without a text nobody asks there.
    scores = [score for score, text in zip(judgement.rewards, TEXTS, strict=True) if text]
    pairs = [(request.prompt, text) for text in TEXTS if text]
    expected = [scored["reward"] for scored in kubetune.classify(reward_run, pairs)]
    assert scores == pytest.approx(expected, abs=1e-6)
    assert len(set(judgement.rewards)) == len(TEXTS)


def test_a_published_reward_model_scores_as_plain_transformers(
    inputs: Path, tmp_path: Path
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "model", num_labels=1)
    folder = tmp_path / "published"
    model.save_pretrained(folder)
    train_tokenizer(folder)
    request = request_of(inputs)
    judgement = judge_of(inputs, reward_model=str(folder)).judge(request)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected = []
    for ids in request.ids:
        with torch.no_grad():
            expected.append(float(plain(torch.tensor([[*request.prompt_ids, *ids]])).logits[0, 0]))
    assert judgement.rewards == pytest.approx(expected, abs=1e-6)


def test_a_teacher_gives_the_mean_log_probability_of_an_answer(
    inputs: Path, reward_run: Path
) -> None:
    request = request_of(inputs)
    judgement = judge_of(inputs, teacher=str(inputs / "model")).judge(request)
    plain: Any = AutoModelForCausalLM.from_pretrained(inputs / "model").eval()
    expected = []
    for ids in request.ids:
        whole = torch.tensor([[*request.prompt_ids, *ids]])
        with torch.no_grad():
            logps = plain(whole).logits[0, :-1].log_softmax(1)
        of_tokens = logps.gather(1, whole[0, 1:, None])[-len(ids) :, 0]
        expected.append(float(of_tokens.mean()))
    assert judgement.rewards == pytest.approx(expected, abs=1e-6)


def test_other_models_are_refused_by_name(inputs: Path, reward_run: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.ModelError, match=r"lacks weights .*so it is no reward model"):
        judge_of(inputs, reward_model=str(inputs / "model"))
    with pytest.raises(
        errors.ConfigError, match="is a run of `task: reward_model`; expected one of"
    ):
        judge_of(inputs, teacher=str(reward_run))
    two = AutoModelForSequenceClassification.from_pretrained(inputs / "model", num_labels=2)
    two.save_pretrained(tmp_path / "two")
    train_tokenizer(tmp_path / "two")
    with pytest.raises(errors.ModelError, match="has 2 outputs; expected a reward model"):
        judge_of(inputs, reward_model=str(tmp_path / "two"))
    with pytest.raises(errors.ModelError, match=r"no config\.json"):
        judge_of(inputs, teacher=str(tmp_path))
    short = save_model(tmp_path / "short", "gpt2")
    with pytest.raises(
        errors.ConfigError, match=r"the teacher .*short: the model has .* positions"
    ):
        judge_of(inputs, 10_000, teacher=str(short))
    other = save_model(tmp_path / "other")
    facts = json.loads((other / "tokenizer.json").read_text())
    vocabulary = facts["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(facts))
    with pytest.raises(errors.ModelError, match="has other tokens than the model that learns"):
        judge_of(inputs, teacher=str(other))


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"reward_model": "a", "teacher": "b"}, "reward_model: means nothing beside teacher"),
        ({"teacher": "b", "file": "a.py"}, "file: means nothing beside teacher"),
        ({"name": "exact_match", "revision": "main"}, "revision: belongs to reward_model"),
    ],
)
def test_settings_that_belong_to_no_model_are_refused(reward: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RewardConfig(**reward)


def config_of(inputs: Path, reward_run: Path, steps: int) -> Config:
    return toy.make_config(
        inputs,
        {"global_batch_size": 4, "max_steps": steps, "eval_steps": steps, "save_steps": 1},
        task="grpo",
        grpo={"num_generations": 4, "max_completion_length": 8, "generation_batch_size": 8},
        rewards=[
            {"reward_model": str(reward_run)},
            {"teacher": str(inputs / "model"), "weight": 0.1},
        ],
    )


def test_models_reward_alike_on_any_ranks(inputs: Path, reward_run: Path, tmp_path: Path) -> None:
    config = config_of(inputs, reward_run, 1)
    of_one_rank = toy.finished(tmp_path / "1", config)
    groups = rollout_records.read_groups(of_one_rank, 0)
    for answer in groups[0].answers:
        assert set(answer.rewards) == {"reward_model", "teacher"}
        assert None not in answer.rewards.values()
    two = toy.finished(tmp_path / "2", config, 2)
    assert groups == rollout_records.read_groups(two, 0)
    toy.require_like(of_one_rank, two)


def test_plans_count_the_models_that_judge(inputs: Path, reward_run: Path) -> None:
    costs = forecast_run(config_of(inputs, reward_run, 1), {}).costs
    assert costs.memory is not None
    weights = read_weights(str(inputs / "model"), {})
    assert weights is not None
    # Both are of the toy's shape, in fp32.
    assert costs.memory.parts["models that reward answers"] == 2 * 4 * weights.parameters


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_rewards(
    inputs: Path, reward_run: Path, tmp_path: Path
) -> None:
    config = config_of(inputs, reward_run, 3)
    whole = toy.finished(tmp_path / "whole", config)
    killed = toy.make_run(tmp_path / "killed", config)
    assert toy.train(killed, 1, {"KUBETUNE_FAULT": "signal 9:micro-batch:5"}) == [-signal.SIGKILL]
    assert toy.train(killed) == [0]
    assert toy.digests(killed) == toy.digests(whole)
