"""`task: grpo`: answers drawn by the model, the same at any time and on any ranks; learnt from; resumed bit for bit."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kubetune import cli, errors
from kubetune.batching.batch import collate
from kubetune.batching.shared_beginnings import collate_shared
from kubetune.config.schema import Config, GrpoConfig, ModelConfig, RewardConfig
from kubetune.models.model_spec import ModelSpec
from kubetune.models.padding_free import own_attention
from kubetune.models.prefix_sharing import why_not
from kubetune.rundir import checkpoints, metrics
from kubetune.scoring.counted_draws import choose, uniforms
from kubetune.tasks import causal_lm
from kubetune.tasks.grpo import objective
from kubetune.tasks.grpo import task as grpo
from kubetune.training import worker
from kubetune.training.rollouts import answer_rows, rollout_records
from kubetune.training.rollouts.rollout_records import RewardedAnswer
from kubetune.training.rollouts.sampler import draw, restricted
from kubetune.training.rollouts.self_check import require_sampling
from tests import toy
from tests.architectures import save_model
from tests.hybrids import HYBRIDS
from tests.ranks import started, wait_all, wait_until
from tests.tiny import train_tokenizer

KILLED = -signal.SIGKILL

slow = pytest.mark.slow

CODE = """
def low(prompts, completions, completion_ids, **columns):
    assert len(prompts) == len(completions) == len(columns["note"])
    columns["log_metric"]("answers", len(completions))
    return [sum(token < 128 for token in ids) / len(ids) for ids in completion_ids]
"""


def config_of(inputs: Path, training: dict[str, Any] | None = None, **settings: Any) -> Config:
    """Learn to write tokens below 128: 4 prompts with 4 answers of at most 8 tokens, 6 steps.

    Each evaluation asks 2 prompts, so that the 2 rewards judge 4 times before the first answer of the training.
    """
    code = inputs / "rewards.py"
    code.write_text(CODE)
    # The function reads a column of the records, also of those that are held out.
    data = {}
    for split in ("train", "eval"):
        records_of_split = (inputs / f"{split}.jsonl").read_text().splitlines()
        lines = [json.dumps({**json.loads(record), "note": "x"}) for record in records_of_split]
        file = inputs / f"noted-{split}.jsonl"
        file.write_text("\n".join(lines) + "\n")
        data[split] = str(file)
    return toy.make_config(
        inputs,
        {
            "global_batch_size": 4, "num_train_epochs": 1, "max_steps": 6, "eval_steps": 3, "save_steps": 2,
            "lr_scheduler_type": "constant", **(training or {}),
        },
        task="grpo",
        data=data,
        grpo={"num_generations": 4, "max_completion_length": 8, "generation_batch_size": 8, **settings},
        evaluation={"generate": {"rows": 2}},
        rewards=[{"file": str(code), "function": "low"}, {"name": "length", "settings": {"target": 8}, "weight": 0.1}],
    )  # fmt: skip


# The sampler.


def loaded(inputs: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(inputs / "model", attn_implementation="sdpa").eval()


MORE = (
    "mistral",
    "gpt2",
    "olmo2",
    "cohere",
    "smollm3",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "bloom",
    "mpt",
    "gpt_neox",
)
PROMPTS = [[5, 9, 12, 40, 41, 42], [7, 8], [100, 101, 102]]


def drawn(model: Any, prompts: list[list[int]], settings: GrpoConfig) -> list[Any]:
    numbers = np.stack(
        [
            uniforms(settings.max_completion_length, 1, prompt[0], answer)
            for prompt in prompts
            for answer in range(settings.num_generations)
        ]
    )
    return draw(model, prompts, numbers, settings, (2, 3), 0)


def test_the_sampler_says_of_its_tokens_what_a_plain_forward_says(inputs: Path) -> None:
    settings = GrpoConfig(num_generations=5, max_completion_length=20, temperature=0.7)
    model = loaded(inputs)
    answers = drawn(model, PROMPTS, settings)
    ended = 0
    for number, answer in enumerate(answers):
        prompt = PROMPTS[number // 5]
        ids = torch.tensor([[*prompt, *answer.ids]])
        with torch.no_grad():
            logits = model(ids).logits[0].float() / 0.7
        logps = logits.log_softmax(1)
        places = range(len(prompt) - 1, len(prompt) - 1 + len(answer.ids))
        expected = [float(logps[place, ids[0, place + 1]]) for place in places]
        assert answer.logps == pytest.approx(expected, abs=2e-6)
        entropies = [float(-(logps[place].exp() * logps[place]).sum()) for place in places]
        assert answer.entropies == pytest.approx(entropies, abs=1e-5)
        assert answer.is_cut == (answer.ids[-1] not in (2, 3))
        ended += not answer.is_cut
    assert all(not {2, 3} & set(answer.ids[:-1]) for answer in answers)
    assert len({tuple(answer.ids) for answer in answers}) == len(answers)


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen3", "gemma2", "phi3", "granite", *(pytest.param(n, marks=slow) for n in MORE)],
)
def test_sampling_and_training_say_the_same_of_every_token(tmp_path: Path, name: str) -> None:
    folder = save_model(tmp_path / name, name)
    settings = GrpoConfig(num_generations=3, max_completion_length=16, temperature=0.9)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    learner = causal_lm.TASK.learner_of(model, ModelSpec(ModelConfig(path=str(folder))))
    learner = replace(learner, grpo=settings)
    # A model that takes one sequence at a time may have a state that would run over padding.
    prompts = PROMPTS if learner.route.padding_free else [PROMPTS[2]]
    learner.model.eval()
    with own_attention(learner.lm):
        answers = drawn(learner.lm, prompts, settings)
    for number, answer in enumerate(answers):
        prompt = prompts[number // 3]
        ids = np.array([*prompt, *answer.ids], np.uint32)
        batch = collate([(ids, np.arange(len(ids)) >= len(prompt))], [0])
        of_training = grpo.log_probabilities(learner, batch)
        assert float((of_training - torch.tensor(answer.logps)).abs().max()) <= 1e-6
    if not why_not(learner):
        # As training has them: in one batch, with the prompt of three answers computed once.
        longer = [*range(5, 42), *PROMPTS[0]]
        with own_attention(learner.lm):
            answers = drawn(learner.lm, [longer], settings)
        sequences = []
        logps: list[float] = []
        for answer in answers:
            ids = np.array([*longer, *answer.ids], np.uint32)
            sequences.append((ids, np.arange(len(ids)) >= len(longer)))
            logps += answer.logps
        batch = collate_shared(sequences, [0, 1, 2])
        assert batch.tree is not None
        of_training = grpo.log_probabilities(learner, batch)
        assert float((of_training - torch.tensor(logps)).abs().max()) <= 1e-6


def test_answers_do_not_depend_on_the_prompts_beside_them(inputs: Path) -> None:
    settings = GrpoConfig(num_generations=3, max_completion_length=12)
    model = loaded(inputs)
    together = [answer.ids for answer in drawn(model, PROMPTS, settings)]
    alone = []
    for prompt in PROMPTS:
        alone += [answer.ids for answer in drawn(model, [prompt], settings)]
    assert together == alone


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    probabilities = torch.tensor([[0.5, 0.0, 0.2, 0.3]])
    numbers = torch.from_numpy(uniforms(20_000, 3))
    tokens = choose(probabilities.expand(len(numbers), 4), numbers)
    shares = torch.bincount(tokens, minlength=4) / len(numbers)
    assert shares.tolist() == pytest.approx([0.5, 0.0, 0.2, 0.3], abs=0.02)
    assert shares[1] == 0.0
    edges = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert choose(probabilities.expand(2, 4), edges).tolist() == [0, 3]


def test_only_likely_tokens_are_drawn_where_the_settings_say_so() -> None:
    logps = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()

    def kept(**settings: Any) -> list[bool]:
        return (restricted(logps, GrpoConfig(**settings)) > 0)[0].tolist()

    assert kept() == [True] * 4
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_p=0.45) == [True, False, False, False]
    assert kept(top_p=0.6) == [True, True, False, False]
    assert kept(top_p=1e-9) == [True, False, False, False]
    assert kept(min_p=0.25) == [True, True, True, False]


# The gradient.


def learner_of(inputs: Path, settings: GrpoConfig) -> Any:
    spec = ModelSpec(ModelConfig(path=str(inputs / "model")))
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", attn_implementation="eager")
    learner = causal_lm.TASK.learner_of(model.train(), spec)
    assert learner.route.padding_free
    return replace(learner, grpo=settings)


def rows_of(settings: GrpoConfig, seed: int = 0) -> list[answer_rows.AnswerRow]:
    """Draw prompts of 20 tokens with 3 answers each, and what is known of them."""
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(3):
        prompt = generator.integers(5, 500, 20).tolist()
        for _ in range(3):
            length = int(generator.integers(1, 9))
            logps = (-6.2 + 0.3 * generator.standard_normal((3, length))).tolist()
            answer = RewardedAnswer(
                ids=generator.integers(5, 500, length).tolist(),
                text="",
                sampled=logps[0],
                entropy=0.0,
                is_cut=False,
                rewards={},
                old=logps[1] if settings.window > 1 else None,
                reference=logps[2] if settings.beta else None,
            )
            rows.append(
                answer_rows.AnswerRow(number, prompt, answer, float(generator.standard_normal()))
            )
    return rows


def plain_loss(model: Any, settings: GrpoConfig, rows: list[answer_rows.AnswerRow]) -> torch.Tensor:
    total = torch.zeros(())
    tokens = 0
    for row in rows:
        ids = torch.tensor([[*row.prompt, *row.answer.ids]])
        logps = (model(ids).logits[0].float() / settings.temperature).log_softmax(1)
        first = len(row.prompt)
        of_labels = logps[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]
        answers = objective.Answers(
            of_labels,
            torch.tensor([len(row.answer.ids)]),
            torch.tensor([row.advantage]),
            None if row.answer.old is None else torch.tensor(row.answer.old),
            torch.tensor(row.answer.sampled),
            None if row.answer.reference is None else torch.tensor(row.answer.reference),
        )
        total = total + objective.losses(settings, answers).sum()
        tokens += len(row.answer.ids)
    return total / objective.divisor(settings, len(rows), tokens)


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "beta": 0.1, "temperature": 0.8},
        {"loss_type": "gspo", "num_iterations": 2},
        {"loss_type": "dr_grpo", "importance_sampling_correction": "sequence_truncate"},
        {"loss_type": "cispo", "num_iterations": 2},
        {"loss_type": "sapo", "num_iterations": 2},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_gradient_is_that_of_plain_torch_under_any_split_and_with_shared_prompts(
    inputs: Path, settings: dict[str, Any]
) -> None:
    of_run = GrpoConfig.model_validate(settings)
    rows = rows_of(of_run)
    model = AutoModelForCausalLM.from_pretrained(
        inputs / "model", attn_implementation="eager"
    ).train()
    expected = plain_loss(model, of_run, rows)
    expected.backward()
    gradient = gradient_of(model)
    labels = sum(len(row.answer.ids) for row in rows)
    number = objective.divisor(of_run, len(rows), labels)
    for size, shares in ((9, False), (9, True), (4, False), (4, True), (1, False)):
        learner = learner_of(inputs, of_run)
        values = []
        for first in range(0, len(rows), size):
            batch = answer_rows.batch_of(
                rows[first : first + size], labels, number, share_prefixes=shares
            )
            assert (batch.tree is not None) == (shares and size > 1 and first < 8)
            values.append(grpo.TASK.backward(learner, batch, 1 / number))
        loss, kl, _, _, difference = torch.stack(values).sum(0).tolist()
        assert loss == pytest.approx(expected.item(), abs=1e-6)
        assert math.isnan(kl) == (of_run.beta == 0)
        assert difference > 0
        actual = gradient_of(learner.model)
        assert float((actual - gradient).norm()) <= 2e-6 * float(gradient.norm())


# Whole runs.


def rewards_of(run_dir: Path) -> list[float]:
    return [line["reward"] for line in metrics.read_metrics(run_dir) if "reward" in line]


def test_a_run_learns_what_is_rewarded(
    inputs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training = {"max_steps": 25, "eval_steps": 25, "save_steps": 25}
    config = config_of(inputs, training, num_generations=8).model_copy(update={"lora": None})
    run_dir = toy.finished(tmp_path / "run", config)
    rewards = rewards_of(run_dir)
    assert sum(rewards[:3]) / 3 < 0.45
    assert sum(rewards[-3:]) / 3 > 0.75
    lines = [line for line in metrics.read_metrics(run_dir) if "reward" in line]
    for line in lines:
        assert line["sampling_difference"] < 1e-5
        assert line["clip_low"] == line["clip_high"] == 0.0
        assert line["completion_length"] <= 8
        assert line["samples"] in (2, 4)  # the last step of an epoch has fewer
        assert line["logged/answers"] == 8
        assert 0 < line["entropy"] < math.log(512)
        assert line["reward/low"] + 0.1 * line["reward/length"] == pytest.approx(
            line["reward"], abs=1e-5
        )
    timings = [json.loads(line) for line in (run_dir / "timings.jsonl").read_text().splitlines()]
    assert all(line["generate_seconds"] > 0 and line["reward_seconds"] > 0 for line in timings)
    assert rollout_records.steps_of(run_dir) == list(range(25))
    (first, *_) = rollout_records.read_groups(run_dir, 0)
    assert len(first.answers) == 8

    capfd.readouterr()
    assert cli.main(["rollouts", str(run_dir), "--step", "24", "--json"]) == errors.OK
    shown = json.loads(capfd.readouterr().out)
    last = rollout_records.read_groups(run_dir, 24)
    assert [group["row"] for group in shown] == [group.row for group in last]
    for group in shown:
        assert len(group["answers"]) == 8
        for answer in group["answers"]:
            assert set(answer["rewards"]) == {"low", "length"}
    assert cli.main(["rollouts", str(run_dir), "--step", "99"]) == errors.USER
    assert "holds no answers drawn after 99 steps" in capfd.readouterr().err


def test_a_first_step_that_teaches_nothing_is_named(inputs: Path, tmp_path: Path) -> None:
    config = config_of(inputs, {"max_steps": 1, "eval_steps": 1, "save_steps": 1})
    never = RewardConfig(name="contains")
    config = config.model_copy(update={"rewards": (never,)})
    run_dir = toy.finished(tmp_path / "run", config)
    log = toy.log_of(run_dir)
    assert (
        "the first 16 answers teach nothing: to each prompt, all got the same reward (0 on" in log
    )
    (line,) = [line for line in metrics.read_metrics(run_dir) if "reward" in line]
    assert line["zero_variance"] == 1.0


def test_a_first_step_that_no_reward_judges_is_named(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(
        "def silent(completions, **rest):\n    return [None] * len(completions)\n"
    )
    config = config_of(inputs, {"max_steps": 1, "eval_steps": 1, "save_steps": 1})
    silent = RewardConfig(file=str(tmp_path / "silent.py"), function="silent")
    config = config.model_copy(update={"rewards": (silent,)})
    log = toy.log_of(toy.finished(tmp_path / "run", config))
    assert (
        "the first 16 answers teach nothing: for each of them, all rewards returned None or NaN"
        in log
    )


@pytest.mark.parametrize("lora", [{"r": 4}, pytest.param(None, marks=slow)], ids=["lora", "full"])
def test_a_divergence_is_from_the_model_before_training(
    inputs: Path, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    config = config_of(inputs, beta=0.05)
    if lora is None:
        config = config.model_copy(update={"lora": None})
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 9:step:5"}) == [KILLED]
    assert toy.train(run_dir) == [0]
    divergences = [line["kl"] for line in metrics.read_metrics(run_dir) if "kl" in line]
    assert abs(divergences[0]) < 1e-6
    assert divergences[1] > 1e-6
    assert divergences[-1] > divergences[1]


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what runs that nobody disturbs leave, by the name of their settings."""
    digests = {}
    for name, settings in WINDOWS.items():
        run_dir = tmp_path_factory.mktemp("whole") / "run"
        digests[name] = toy.digests(toy.finished(run_dir, config_of(inputs, **settings)))
    return digests


WINDOWS: dict[str, dict[str, Any]] = {
    "one": {},
    "several": {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.05},
}


@pytest.mark.parametrize(
    ("name", "point", "nth"),
    [
        pytest.param("one", "generation", 5, marks=slow),
        ("one", "reward", 3),  # while the model before training is measured
        pytest.param("one", "reward", 17, marks=slow),
        pytest.param("one", "micro-batch", 4, marks=slow),
        pytest.param("one", "commit.sealed", 2, marks=slow),
        pytest.param("one", "generation", 60, marks=slow),
        pytest.param("one", "reward", 30, marks=slow),
        pytest.param("several", "reward", 8, marks=slow),
        ("several", "micro-batch", 6),
    ],
)
def test_a_killed_run_ends_as_one_that_was_never_killed(
    inputs: Path, tmp_path: Path, whole: dict[str, Any], name: str, point: str, nth: int
) -> None:
    run_dir = toy.make_run(tmp_path / "run", config_of(inputs, **WINDOWS[name]))
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": f"signal 9:{point}:{nth}"}) == [KILLED]
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == whole[name]


def test_groups_that_are_whole_are_not_drawn_again(inputs: Path, tmp_path: Path) -> None:
    run_dir = toy.make_run(tmp_path / "run", config_of(inputs))
    # Two groups of two prompts go together; the process dies while the third of four is rewarded.
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 9:reward:9"}) == [KILLED]
    path = rollout_records.file_of(run_dir, 0)
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    marked = [line.replace('[{"text": "', '[{"text": "kept ', 1) for line in lines]
    path.write_text("\n".join(marked) + "\n" + '{"made_by": "torn')
    assert toy.train(run_dir) == [0]
    groups = rollout_records.read_groups(run_dir, 0)
    assert [group.slot for group in groups] == [0, 1, 2, 3]
    assert sum(group.answers[0].text.startswith("kept ") for group in groups) == 2


# Three ranks share the prompts unevenly.
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=slow)])
def test_any_number_of_ranks_draws_the_same_answers(
    inputs: Path, tmp_path: Path, ranks: int
) -> None:
    config = config_of(inputs, {"max_steps": 2, "eval_steps": 2})
    of_one = toy.finished(tmp_path / "1", config, 1)
    others = toy.finished(tmp_path / "others", config, ranks)
    assert rollout_records.read_groups(of_one, 0) == rollout_records.read_groups(others, 0)
    toy.require_like(of_one, others)


def test_a_stop_while_answers_are_drawn_loses_and_repeats_nothing(
    inputs: Path, tmp_path: Path, whole: dict[str, Any]
) -> None:
    run_dir = toy.make_run(tmp_path / "run", config_of(inputs))
    with started(worker.main, 1, [str(run_dir)]) as [process]:
        wait_until(lambda: rollout_records.file_of(run_dir, 2).exists())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        assert wait_all([process]) == [errors.PREEMPTED]
    newest = checkpoints.newest_step(run_dir)
    assert newest >= 2
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == whole["one"]


def test_answers_of_gone_weights_must_be_in_the_file(inputs: Path, tmp_path: Path) -> None:
    config = config_of(inputs, **WINDOWS["several"])
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir, 1, {"KUBETUNE_FAULT": "signal 9:step:4"}) == [KILLED]
    assert checkpoints.newest_step(run_dir) == 3  # of the window of steps 0 to 3
    rollout_records.file_of(run_dir, 0).unlink()
    assert toy.train(run_dir) == [errors.ENVIRONMENT]
    assert "the weights that drew them are gone" in toy.log_of(run_dir)


def test_a_function_that_always_fails_ends_the_run_and_is_asked_again(
    inputs: Path, tmp_path: Path
) -> None:
    code = tmp_path / "rewards.py"
    (tmp_path / "beside.py").write_text("VALUE = 1 / 0\n")
    code.write_text(
        "def f(completions, **rest):\n    from beside import VALUE\n    return [VALUE] * len(completions)\n"
    )
    config = config_of(inputs, {"max_steps": 1})
    reward = RewardConfig(file=str(code), function="f")
    run_dir = toy.make_run(tmp_path / "run", config.model_copy(update={"rewards": (reward,)}))
    assert toy.train(run_dir) == [errors.USER]
    # The first answers are those to the held-out prompts, before training.
    assert "reward f could judge no answer to the held-out prompts" in toy.log_of(run_dir)
    assert "ZeroDivisionError" in toy.log_of(run_dir)
    (tmp_path / "beside.py").write_text("VALUE = 1\n")
    assert toy.train(run_dir) == [0]


def test_an_error_of_one_rank_ends_all_ranks_with_its_reason(inputs: Path, tmp_path: Path) -> None:
    code = tmp_path / "rewards.py"
    code.write_text(
        "def f(completions, prompts, **rest):\n"
        "    if rest['solution'][0] == 'bad':\n"
        "        raise ValueError('no such answer')\n"
        "    return [1.0] * len(completions)\n"
    )
    config = config_of(inputs, {"max_steps": 1, "eval_steps": 1}, on_reward_error="stop")
    data = tmp_path / "train.jsonl"
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "say 5", "solution": "good"}\n')
    lines = []
    for number in range(4):
        solution = "bad" if number == 2 else "good"
        lines.append(json.dumps({"prompt": f"say {number}", "solution": solution}) + "\n")
    data.write_text("".join(lines))
    of_files = {"train": str(data), "eval": str(held_out)}
    sources = Config.model_validate({"model": "x", "data": of_files}).data
    reward = RewardConfig(file=str(code), function="f")
    changed = {"train": sources.train, "eval": sources.eval}
    config = config.model_copy(
        update={
            "rewards": (reward,),
            "data": config.data.model_copy(update=changed),
        }
    )
    run_dir = toy.make_run(tmp_path / "run", config, 2)
    assert toy.train(run_dir, 2) == [errors.USER, errors.USER]
    for rank in range(2):
        assert "ValueError: no such answer" in toy.log_of(run_dir, rank)
    # What the other rank drew meanwhile is kept.
    assert rollout_records.read_groups(run_dir, 0)


def test_answers_that_teach_nothing_still_balance_the_experts(inputs: Path, tmp_path: Path) -> None:
    code = tmp_path / "rewards.py"
    code.write_text("def f(completions, **rest):\n    return [1.0] * len(completions)\n")
    config = config_of(inputs, {"max_steps": 2, "eval_steps": 2})
    config = config.model_copy(
        update={
            "lora": None,
            "model": ModelConfig(path=str(save_model(tmp_path / "mixture", "qwen3_moe"))),
            "rewards": (RewardConfig(file=str(code), function="f"),),
        }
    )
    runs = [toy.finished(tmp_path / f"run-{ranks}", config, ranks) for ranks in (1, 2)]
    toy.require_like(*runs)
    for line in metrics.read_metrics(runs[0])[:2]:
        assert line["zero_variance"] == 1.0
        assert line["loss"] == 0.0
        # At least the number of experts that a token goes to, which only equal shares reach.
        assert line["router_aux_loss"] >= 1.0
        assert line["sampling_difference"] < 1e-5


def test_a_model_that_cannot_draw_with_a_cache_is_refused_by_name(tmp_path: Path) -> None:
    train_tokenizer(tmp_path / "rwkv")
    config = AutoConfig.for_model("rwkv", **HYBRIDS["rwkv"])
    model = AutoModelForCausalLM.from_config(config)
    learner = causal_lm.TASK.learner_of(model, ModelSpec(ModelConfig(path=str(tmp_path / "rwkv"))))
    with pytest.raises(
        errors.ModelError, match="RwkvForCausalLM cannot draw answers with the cache"
    ):
        require_sampling(replace(learner, grpo=GrpoConfig()), PROMPTS[:1], 0)


def test_own_attention_is_given_back(inputs: Path) -> None:
    learner = learner_of(inputs, GrpoConfig())
    before = learner.lm.config._attn_implementation
    with own_attention(learner.lm):
        assert learner.lm.config._attn_implementation != before
    assert learner.lm.config._attn_implementation == before
