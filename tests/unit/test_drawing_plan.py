"""What a plan says of a run by reward: answers, tokens, the key-value cache, hours by part; and what a run counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from kubetune import cli
from kubetune.config.schema import Config, RewardConfig
from kubetune.plan import drawing, earlier_runs
from kubetune.plan.costs import RunWeights
from kubetune.plan.fitting import remedies
from kubetune.plan.forecast import GIB, forecast
from kubetune.plan.memory import Shape
from kubetune.plan.plan import Plan, make_plan
from kubetune.plan.rank_work import RankWork
from kubetune.training.rollouts import sampler
from kubetune.training.rollouts.measures import measures_of
from kubetune.training.rollouts.rollout_records import Group, RewardedAnswer
from tests.unit.test_forecast import QWEN3_8B, WEIGHTS


def planned(rows: int = 8000, prompt_tokens: int = 100, **settings: Any) -> tuple[Config, Plan]:
    """Return 16 prompts a step, 8 answers of at most 256 tokens to each, 500 steps, on one GPU."""
    grpo = {"num_generations": 8, "max_completion_length": 256, **settings}
    config = Config.model_validate(
        {
            "model": "x",
            "data": {"train": "a.jsonl", "max_length": 100},
            "lora": {"r": 16},
            "task": "grpo",
            "rewards": ["numeric"],
            "grpo": grpo,
            "training": {"global_batch_size": 16, "num_train_epochs": 1},
            "compute": {"gpus_per_node": 1},
        }
    )
    return config, make_plan(config, rows, tokens=rows * prompt_tokens)


def drawing_of(**settings: Any) -> drawing.Drawing:
    config, plan = planned(**settings)
    result = drawing.drawing_of(config.grpo, plan)
    assert result is not None
    return result


def test_the_worked_example_is_what_is_computed() -> None:
    result = drawing_of()
    assert (result.sets, result.answers, result.rows) == (500, 128, 64)
    assert result.drawn_tokens == 500 * 32_768
    assert result.learnt_tokens == 500 * 128 * 356
    assert result.shared_share == pytest.approx(0.25, abs=0.005)
    shape = Shape.of(QWEN3_8B)
    assert shape is not None
    cache = drawing.cache_bytes(QWEN3_8B, shape, 64, 356, 2)
    assert cache / GIB == pytest.approx(3.21, abs=0.01)
    assert drawing.sampling_bytes(QWEN3_8B, 64, 2) / GIB == pytest.approx(0.24, abs=0.005)


def test_sets_serve_several_steps_and_answers_several_times() -> None:
    result = drawing_of(num_iterations=2, steps_per_generation=2)
    assert (result.sets, result.prompts, result.answers) == (250, 32, 256)
    assert result.learnt_tokens == 2 * 250 * 256 * 356
    config, plan = planned()
    assert drawing.drawing_of(config.grpo, plan.model_copy(update={"num_steps": 0})) is None
    unread = drawing.drawing_of(config.grpo, plan.model_copy(update={"tokens_per_epoch": None}))
    assert unread is not None
    assert (unread.learnt_tokens, unread.shared_share) == (None, None)
    # A whole group is drawn at a time, however small the batch; and no more than a set has.
    assert drawing_of(generation_batch_size=1).rows == 8
    assert drawing_of(generation_batch_size=4096).rows == 128


def test_layers_that_forget_keep_less() -> None:
    shape = Shape.of(QWEN3_8B)
    assert shape is not None
    all_tokens = drawing.cache_bytes(QWEN3_8B, shape, 1, 1000, 2)
    kinds = ["sliding_attention"] * 18 + ["full_attention"] * 9 + ["linear_attention"] * 9
    mixed = {**QWEN3_8B, "layer_types": kinds, "sliding_window": 100}
    some_tokens = drawing.cache_bytes(mixed, shape, 1, 1000, 2)
    assert some_tokens / all_tokens == pytest.approx((18 * 100 + 10 * 1000) / (37 * 1000))


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("hybrid", 1000),
        ("indexed_attention", 1000),
        ("attention", 1000),
        ("a kind of tomorrow", 1000),
        ("chunked_attention", 300),
        ("hybrid_sliding", 100),
        ("mamba", 0),
        ("conv", 0),
    ],
)
def test_a_layer_keeps_all_tokens_unless_it_is_known_to_keep_fewer(kind: str, kept: int) -> None:
    shape = Shape.of(QWEN3_8B)
    assert shape is not None
    windows = {"sliding_window": 100, "attention_chunk_size": 300}
    all_tokens = drawing.cache_bytes(QWEN3_8B, shape, 1, 1000, 2)
    model = {**QWEN3_8B, **windows, "layer_types": [kind] * 36}
    assert drawing.cache_bytes(model, shape, 1, 1000, 2) == all_tokens * kept / 1000


def test_the_cache_is_part_of_the_memory_where_a_step_needs_less() -> None:
    config, plan = planned(generation_batch_size=2048)
    few = planned(generation_batch_size=8)[0]
    work = RankWork.of(config, plan)
    large = forecast(work, WEIGHTS, 80 * GIB)
    small = forecast(RankWork.of(few, plan), WEIGHTS, 80 * GIB)
    assert large is not None
    assert small is not None
    name = "drawing answers, beyond what a step takes"
    assert name in large.parts
    assert large.parts[name] > small.parts.get(name, 0)
    # With `beta` and all parameters, the model before training is a second one.
    full = planned(beta=0.1)[0].model_copy(update={"lora": None})
    second = forecast(RankWork.of(full, plan), WEIGHTS, 80 * GIB)
    assert second is not None
    assert second.parts["model before training"] == 2 * WEIGHTS.parameters


def test_fewer_answers_at_a_time_are_named_where_the_cache_does_not_fit() -> None:
    config, plan = planned(generation_batch_size=1024, max_completion_length=4096)
    room = 24 * GIB
    whole = forecast(RankWork.of(config, plan), WEIGHTS, room)
    assert whole is not None
    assert not whole.fits
    fitting = dict(remedies(config, plan, RunWeights(WEIGHTS), room))
    # 16 prompts have 128 answers, so that 1024 and 128 at a time are the same.
    assert "grpo.generation_batch_size: 128" not in fitting
    assert "grpo.generation_batch_size: 8" in fitting


def test_the_cache_of_drawn_answers_is_as_large_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 12, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
    lm = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    config = planned(max_completion_length=40)[0]
    measured = []
    append = sampler.Decoder.append

    def measuring(self: Any, tokens: Any) -> None:
        append(self, tokens)
        held = 0
        for layer in self._cache.layers:
            held += layer.keys.nbytes + layer.values.nbytes
        measured.append(held)

    monkeypatch.setattr(sampler.Decoder, "append", measuring)
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]]
    numbers = np.random.default_rng(0).random((24, 40))
    sampler.draw(lm, prompts, numbers, config.grpo, eos_ids=(), pad_id=0)
    shape = Shape.of(sizes)
    assert shape is not None
    cache = drawing.cache_bytes(sizes, shape, rows=24, tokens=46, element=4)
    assert max(measured) == pytest.approx(cache, rel=0.25)


def test_hours_by_part_follow_from_a_run_of_the_same_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kind = earlier_runs.RunShape(1, 1, 1, "lora", None, "cpu", 1, 1, 10.0, 10.0, 1e6)
    for waiting in (0.5, 0.75, 0.6):
        earlier_runs.keep(earlier_runs.Speed(kind, 10.0, 60.0, "2026-01-01T00:00:00Z", waiting))
    earlier_runs.keep(earlier_runs.Speed(kind, 10.0, 60.0, "2026-01-01T00:00:00Z"))
    share = earlier_runs.waiting_share(kind, earlier_runs.read())
    assert share == 0.6
    hours = drawing.hours_by_part(10.0, share)
    assert hours is not None
    assert (hours.generate, hours.train) == (pytest.approx(6.0), pytest.approx(4.0))
    assert drawing.hours_by_part(10.0, None) is None
    assert drawing.hours_by_part(None, 0.5) is None


def test_plan_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    data = tmp_path / "x.jsonl"
    data.write_text('{"prompt": "2 + 2 = ", "solution": "4"}\n' * 160)
    words = ["plan", f"model={tmp_path}", f"data.train={data}", "task=grpo", "rewards=[numeric]", "lora.r=8",
             "compute.gpus_per_node=1", "model.tokenizer=org/none", "training.global_batch_size=16",
             "training.max_steps=10", "grpo.max_completion_length=256",
             "kubernetes.image=registry.example/image:1"]  # fmt: skip
    # The folder is not in the pods, which is a problem at the end of the plan.
    assert cli.main(words) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert "answers 1,280, at most 5.31 MiB in rollouts/, if each is as long as it may be" in text
    assert "128 each time, to 16 prompts, at most 32,768 tokens; 327,680 in all" in text
    assert "drawn by each process, 64 answers at a time, with a key-value cache of at most" in text
    assert "hours by part unknown" in text
    servers = "grpo.servers={urls: ['http://a:1', 'http://b:1'], lag: 1}"
    assert cli.main([*words, servers]) == 2
    text = " ".join(capsys.readouterr().out.split())
    assert "2 vLLM servers, which load 10 adapters of rank 8, one every step, lag 1" in text
    assert "drawing answers" not in text
    assert cli.main([*words, servers, "--json"]) == 2
    facts = json.loads(capsys.readouterr().out)["drawing"]
    assert (facts["drawn_tokens"], facts["cache_bytes"], facts["hours"]) == (327_680, None, None)


def test_plan_counts_the_servers_of_a_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "x.jsonl"
    data.write_text('{"prompt": "2 + 2 = ", "completion": "4"}\n' * 16)
    words = ["plan", "model=org/none", f"data.train={data}", "task=distill"]
    servers = "distill={teacher: ['http://a:1', 'http://b:1'], support: teacher_k, lmbda: 0}"
    cli.main([*words, servers])
    text = " ".join(capsys.readouterr().out.split())
    expected = (
        "teacher 2 vLLM servers, asked for 64 of its own likeliest tokens once, before the first"
    )
    assert expected in text
    pods = "distill={teacher: org/large, support: student_k, top_k: 9}"
    samplers = "kubernetes={image: registry.example/image:1, kind: jobset, samplers: {replicas: 3}}"
    cli.main([*words, pods, samplers])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "teacher 3 vLLM servers, asked for 9 of the model's likeliest tokens at each step" in text
    )


def test_a_prompt_is_solved_by_one_answer_that_the_first_reward_calls_right() -> None:
    rewards = (RewardConfig(name="numeric"), RewardConfig(name="json_valid", weight=0.5))

    def group(*marks: float | None) -> Group:
        answers = []
        for mark in marks:
            judged = {"numeric": mark, "json_valid": 1.0}
            answers.append(RewardedAnswer([1], "4", [0.0], 0.0, is_cut=False, rewards=judged))
        return Group(0, 0, [1], "2 + 2", answers, errors={}, logged={})

    groups = [group(0.0, 1.0), group(0.5, 0.0), group(None, None), group(None, 1.0)]
    assert measures_of(groups, rewards)["solved"] == 0.5
