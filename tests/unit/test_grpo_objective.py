"""The loss of `task: grpo`: against TRL's own numbers (peers/trl_grpo.json), against plain torch, under any split."""

from __future__ import annotations

import json
import math
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kubetune.config.load import load_config
from kubetune.config.schema.grpo import GrpoConfig
from kubetune.config.schema.rewards import RewardConfig
from kubetune.tasks.grpo import advantages, objective
from kubetune.tasks.grpo.objective import Answers
from tests.peers.trl_grpo import END, GENERATIONS, LONGEST, scene

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "peers" / "trl_grpo.json"
PEERS = ROOT / "benchmarks" / ".venv-peers" / "bin" / "python"
NOT_OURS = ("scene", "off_policy", "loss", "gradient", "advantages")


@cache
def recorded() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(RECORDED.read_text())
    return content


def settings_of(case: dict[str, Any]) -> GrpoConfig:
    keys = {key: value for key, value in case.items() if key not in NOT_OURS}
    return GrpoConfig(max_completion_length=LONGEST + 1, **keys)


def flat(rows: list[list[float]], kept: list[int]) -> Tensor:
    return torch.tensor([number for row in kept for number in rows[row]])


def advantages_of(settings: GrpoConfig, drawn: dict[str, Any]) -> Tensor:
    nan = math.nan
    rewards = [[nan if reward is None else reward for reward in row] for row in drawn["rewards"]]
    summed = advantages.summed_rewards(torch.tensor(rewards), torch.tensor([1.0, 0.5]))
    return advantages.advantages(settings, summed.view(-1, GENERATIONS)).flatten()


def loss_of(case: dict[str, Any], drawn: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the gradient of each token's log-probability, and the advantages."""
    settings = settings_of(case)
    per_row = advantages_of(settings, drawn)
    kept = [
        row
        for row, ids in enumerate(drawn["ids"])
        if ids[-1] == END or not settings.mask_truncated_completions
    ]
    everything = list(range(len(drawn["ids"])))
    logps = flat(drawn["logps"], everything).requires_grad_()
    lengths = [len(ids) for ids in drawn["ids"]]
    parts = logps.split(lengths)
    corrects = settings.importance_sampling_correction != "none"
    answers = Answers(
        logps=torch.cat([parts[row] for row in kept]),
        counts=torch.tensor([lengths[row] for row in kept]),
        advantages=per_row[kept],
        old=flat(drawn["old"], kept) if case.get("off_policy") or corrects else None,
        sampled=flat(drawn["sampled"], kept) if corrects else None,
        reference=flat(drawn["reference"], kept) if settings.beta else None,
    )
    number = objective.divisor(settings, len(lengths), int(answers.counts.sum()))
    loss = objective.losses(settings, answers).sum() / number
    loss.backward()
    assert logps.grad is not None
    return loss.detach(), logps.grad, per_row


def test_every_recorded_case_of_trl_is_the_same() -> None:
    content = recorded()
    assert content["trl"] == "1.16.0"
    assert len(content["cases"]) >= 150
    worst = 0.0
    for case in content["cases"]:
        loss, gradient, per_row = loss_of(case, content["scenes"][case["scene"]])
        differences = [
            abs(float(loss) - case["loss"]),
            float((gradient - torch.tensor(case["gradient"])).abs().max()),
        ]
        assert max(differences) <= 1e-6, case
        assert torch.allclose(per_row, torch.tensor(case["advantages"]), atol=1e-6), case
        worst = max(worst, *differences)
    assert worst <= 1e-6


def test_the_recorded_scenes_are_those_that_the_script_draws() -> None:
    assert recorded()["scenes"] == [scene(seed) for seed in range(3)]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "bnpo", "luspo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_loss_is_what_ten_lines_of_torch_make_of_it(kind: str, level: str) -> None:
    drawn = scene(7)
    case = {
        "loss_type": kind, "importance_sampling_level": level, "off_policy": True, "beta": 0.1,
        "use_bias_correction_kl": False,
    }  # fmt: skip
    loss, _, per_row = loss_of(case, drawn)

    total = 0.0
    tokens = sum(map(len, drawn["ids"]))
    for row, advantage in enumerate(per_row.tolist()):
        length = len(drawn["ids"][row])
        logs = [new - old for new, old in zip(drawn["logps"][row], drawn["old"][row], strict=True)]
        if level == "sequence":
            logs = [sum(logs) / length] * length
        of_row = 0.0
        for place, log in enumerate(logs):
            ratio = math.exp(log)
            clipped = min(max(ratio, 0.8), 1.2)
            gap = drawn["reference"][row][place] - drawn["logps"][row][place]
            of_row += -min(ratio * advantage, clipped * advantage) + 0.1 * (math.exp(gap) - gap - 1)
        total += of_row / length if kind == "grpo" else of_row
    rows = len(per_row)
    divisors = {"grpo": rows, "luspo": rows, "dr_grpo": rows * (LONGEST + 1)}
    assert float(loss) == pytest.approx(total / divisors.get(kind, tokens), abs=1e-6)


@pytest.mark.parametrize(
    "kind", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "gspo", "vespo"]
)
def test_no_loss_depends_on_how_a_step_is_split(kind: str) -> None:
    drawn = scene(11)
    settings = GrpoConfig(loss_type=kind, beta=0.1, max_completion_length=9)
    lengths = [len(ids) for ids in drawn["ids"]]
    everything = list(range(len(lengths)))
    per_row = advantages_of(settings, drawn)

    def summed(rows: list[int]) -> float:
        answers = Answers(
            flat(drawn["logps"], rows),
            torch.tensor([lengths[row] for row in rows]),
            per_row[rows],
            old=flat(drawn["old"], rows),
            reference=flat(drawn["reference"], rows),
        )
        return float(objective.losses(settings, answers).double().sum())

    whole = summed(everything)
    assert summed(everything[:2]) + summed(everything[2:]) == pytest.approx(whole, abs=1e-6)
    assert sum(summed([row]) for row in everything) == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_an_estimated_divergence_is_zero_of_equal_models_and_k3_never_below(estimator: str) -> None:
    settings = GrpoConfig(beta=0.1, kl_estimator=estimator)
    logps = torch.tensor([-1.0, -2.0, -0.5])
    counts = torch.tensor([3])
    same = Answers(logps, counts, torch.zeros(1), reference=logps)
    assert objective.divergences(settings, same).tolist() == [0.0, 0.0, 0.0]
    other = Answers(logps, counts, torch.zeros(1), reference=logps - torch.tensor([0.3, -0.2, 0.1]))
    values = objective.divergences(settings, other)
    expected = {
        "k1": [0.3, -0.2, 0.1],
        "abs": [0.3, 0.2, 0.1],
        "k2": [0.045, 0.02, 0.005],
        "k3": [math.exp(-d) + d - 1 for d in (0.3, -0.2, 0.1)],
    }
    assert values.tolist() == pytest.approx(expected[estimator], abs=1e-6)


def test_a_geometric_mean_drops_no_long_answer_for_its_length_alone() -> None:
    logps = torch.full((40,), -1.0)
    answers = Answers(logps, torch.tensor([40]), torch.ones(1), old=logps, sampled=logps - 0.05)
    of_product = GrpoConfig(importance_sampling_correction="sequence_mask")
    of_mean = GrpoConfig(importance_sampling_correction="geometric_mask")
    assert objective.corrections(of_product, answers).tolist() == [0.0] * 40
    assert objective.corrections(of_mean, answers).tolist() == pytest.approx([math.exp(0.05)] * 40)


def test_a_group_whose_rewards_are_alike_has_no_advantage() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, math.nan], [math.nan] * 3])
    for scale in ("group", "batch", "none"):
        values = advantages.advantages(GrpoConfig(scale_rewards=scale), rewards)
        assert values[0].tolist() == [0.0, 0.0, 0.0]
        assert values[1, 2] == 0.0
        assert values[2].tolist() == [0.0, 0.0, 0.0]
    assert advantages.has_no_variance(rewards).tolist() == [True, False, True]


def test_settings_that_mean_nothing_together_are_refused_together() -> None:
    with pytest.raises(ValueError, match="delta means nothing") as refusal:
        GrpoConfig(loss_type="sapo", delta=2.0, kl_estimator="k1")
    assert "kl_estimator means nothing without beta" in str(refusal.value)
    with pytest.raises(ValueError, match="takes whole answers by itself") as refusal:
        GrpoConfig(
            loss_type="vespo",
            importance_sampling_level="sequence",
            importance_sampling_correction="sequence_mask",
        )
    assert "expected token_truncate or token_mask" in str(refusal.value)
    assert GrpoConfig(loss_type="gspo").importance_sampling_level == "sequence"
    assert GrpoConfig(loss_type="cispo").high == 5.0
    assert GrpoConfig(scale_rewards=False).scale_rewards == "none"


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"name": "length"}, "rewards every answer alike"),
        (
            {"name": "length", "settings": {"target": 8, "max_tokens": 9}},
            "max_tokens: means nothing together with target",
        ),
        ({"name": "regex", "settings": {"pattern": "(a"}}, "which is no regular expression"),
        ({"name": "label", "settings": {"labels": []}}, "expected a list of words"),
        ({"name": "get_cosine_scaled_reward"}, "settings.max_len: missing"),
        (
            {"name": "get_cosine_scaled_reward", "settings": {"max_len": 0}},
            "settings.max_len: found 0; expected a number of tokens, more than 0",
        ),
        (
            {"name": "reasoning_accuracy_reward", "settings": {"reasoning_delimiters": "</think>"}},
            "settings.reasoning_delimiters: found '</think>'; expected a list of texts",
        ),
        (
            {"name": "reasoning_accuracy_reward", "settings": {"reasoning_delimiters": ["a", ""]}},
            "found an empty text",
        ),
        (
            {"name": "accuracy_reward", "settings": {"max_len": 9}},
            "settings.max_len: unknown key; `accuracy_reward` has none",
        ),
        ({"name": "json_schema"}, "expected one of"),
        ({"name": "json_schema", "settings": {"schema": "a.json"}}, "name a file of it by `file`"),
        (
            {"name": "json_schema", "file": "a.json", "settings": {"schema": {}}},
            "expected one of `settings",
        ),
        ({"name": "perplexity"}, "is a metric of a whole data set"),
        ({"name": "exact_match_pass_at_8"}, "is a metric of a whole data set"),
    ],
)
def test_settings_of_a_reward_that_cannot_be_meant_are_refused(
    reward: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        RewardConfig.model_validate(reward)


@pytest.mark.parametrize(
    "reward",
    [
        "{name: label, settings: {labels: [good, bad]}}",
        "{name: reasoning_accuracy_reward, settings: {reasoning_delimiters: [good, bad]}}",
    ],
)
def test_a_run_file_may_hold_a_list_of_a_reward(reward: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: m\ndata: {{train: rows.jsonl}}\ntask: grpo\nrewards: [{reward}]\n")
    (settings,) = load_config(path).rewards[0].settings.values()
    assert settings == ("good", "bad")


@pytest.mark.slow
@pytest.mark.skipif(
    not PEERS.exists(), reason="TRL has an environment of its own: benchmarks/peers/venv makes it"
)
def test_the_recorded_numbers_are_those_of_trl(tmp_path: Path) -> None:
    file = tmp_path / "trl_grpo.json"
    environ = {**os.environ, "PYTHONPATH": ""}
    command = [PEERS, "-m", "tests.peers.trl_grpo", file]
    subprocess.run(command, check=True, cwd=ROOT, env=environ)
    theirs = json.loads(file.read_text())
    assert theirs.keys() == recorded().keys()
    for new, old in zip(theirs["cases"], recorded()["cases"], strict=True):
        assert new.keys() == old.keys()
        assert new["loss"] == pytest.approx(old["loss"], abs=1e-9)
        for name in ("gradient", "advantages"):
            assert flat_numbers(new[name]) == pytest.approx(flat_numbers(old[name]), abs=1e-9)


def flat_numbers(values: Any) -> list[float]:
    """Return the numbers of nested lists, in their order; what is none of TRL's, `null`, as not a number."""
    if isinstance(values, list):
        return [number for value in values for number in flat_numbers(value)]
    return [math.nan if values is None else values]
