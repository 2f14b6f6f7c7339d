"""Rewards of mathematics: TRL's numbers, in a process that an endless expression does not hold up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kubetune.config.schema import GrpoConfig, RewardConfig
from kubetune.scoring.rewards.mathematics import COMPARE_SECONDS
from kubetune.scoring.rewards.pool import RewardPool
from kubetune.scoring.rewards.request import Request

pytest.importorskip("math_verify", reason="comes with kubetune[math]")

RECORDED = json.loads((Path(__file__).parents[1] / "peers" / "trl_rewards.json").read_text())


def rewards_of_peers() -> list[dict[str, Any]]:
    """Return our rewards, in the order in which `rewards_of_group` has what TRL's say."""
    rewards: list[dict[str, Any]] = [{"name": "accuracy_reward"}]
    for delimiters in RECORDED["delimiters"]:
        settings = {} if delimiters is None else {"reasoning_delimiters": delimiters}
        rewards.append({"name": "reasoning_accuracy_reward", "settings": settings})
    for settings in RECORDED["cosines"]:
        rewards.append({"name": "get_cosine_scaled_reward", "settings": settings})
    return rewards


def rewards_of_group(group: dict[str, Any]) -> list[list[float | None]]:
    return [group["accuracy"], *group["reasoning"], *group["cosine"]]


def request_of(texts: list[str], lengths: list[int], solutions: list[str | None]) -> Request:
    ids = [[1] * length for length in lengths]
    return Request("2 + 2 = ", {}, solutions, texts, ids)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    rewards = [RewardConfig.model_validate(reward) for reward in rewards_of_peers()]
    pool = RewardPool(rewards, GrpoConfig())
    yield pool
    pool.close()


def test_rewards_are_those_of_trl(pool: RewardPool) -> None:
    number = len(rewards_of_peers())
    for group in RECORDED["groups"]:
        request = request_of(group["texts"], group["lengths"], [group["solution"]] * number)
        judgements = pool.judge(request)
        assert not [judgement.error for judgement in judgements if judgement.error]
        rewards = [judgement.rewards for judgement in judgements]
        assert rewards == rewards_of_group(group), group["solution"]


def test_answers_without_a_solution_are_not_judged(pool: RewardPool) -> None:
    number = len(rewards_of_peers())
    judgements = pool.judge(request_of([r"\boxed{4}", "4"], [3, 1], [None] * number))
    assert [judgement.rewards for judgement in judgements] == [[None, None]] * number


@pytest.mark.slow
def test_an_endless_expression_costs_only_its_own_answer() -> None:
    pool = RewardPool([RewardConfig(name="accuracy_reward")], GrpoConfig())
    texts = [r"\boxed{4}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2+2}"]
    begin = time.monotonic()
    (judgement,) = pool.judge(request_of(texts, [3, 9, 5], ["4"]))
    seconds = time.monotonic() - begin
    pool.close()
    assert not judgement.error
    assert judgement.rewards == [1.0, 0.0, 1.0]
    # Nothing but the alarm ended it: the time of the whole group is 60 s.
    assert COMPARE_SECONDS - 1 < seconds < GrpoConfig().reward_timeout_seconds / 2
