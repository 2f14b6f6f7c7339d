"""`task: distill`: loss and gradient those of plain torch at any split, on any ranks; runs from plan to export."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from kubetune import cli
from kubetune.batching.batch import collate
from kubetune.batching.feed import empty_batch
from kubetune.batching.shared_beginnings import collate_shared
from kubetune.config.metric_names import DISTILL_MEASURES
from kubetune.config.schema import Config, DistillConfig
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.distributed.process_group import World, sum_numbers
from kubetune.models import fsdp
from kubetune.models.acceleration import Workload
from kubetune.models.model_spec import ModelSpec
from kubetune.result.inference.answering import load_run
from kubetune.rundir import metrics
from kubetune.tasks import causal_lm, distill
from kubetune.training import worker
from kubetune.training.reference import kept_teacher
from kubetune.training.rollouts import rollout_records
from tests import toy
from tests.architectures import save_model
from tests.ranks import run_ranks, started, wait_all

slow = pytest.mark.slow
Difference = tuple[str, float, float]
SETTINGS: tuple[dict[str, Any], ...] = (
    {"beta": 1.0},
    {"lmbda": 0, "beta": 0.5, "temperature": 0.7, "sft_weight": 0.3},
    {"beta": 0.0, "support": "teacher_k", "top_k": 20},
    {"beta": 1.0, "support": "student_k", "top_k": 20, "rest": "renormalise"},
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a toy model, its data, and a wider teacher."""
    folder = toy.make_inputs(tmp_path_factory.mktemp("toy"))
    save_model(folder / "teacher", hidden_size=96, intermediate_size=128)
    return folder


def config_of(inputs: Path, training: dict[str, Any] | None = None, **sections: Any) -> Config:
    settings = {"teacher": str(inputs / "teacher"), "lmbda": 0, **sections.pop("distill", {})}
    settings = {"task": "distill", "distill": settings, **sections}
    return toy.make_config(inputs, {"max_steps": 6, **(training or {})}, **settings)


def rows_of() -> list[tuple[Any, Any]]:
    """Return nine rows, of which three begin alike."""
    draw = np.random.default_rng(0)
    start = draw.integers(3, 300, 40)
    rows = []
    for number in range(9):
        ids = draw.integers(3, 300, 10 + 7 * number)
        if number % 3 == 0:
            ids = np.concatenate([start, ids])
        trained = np.arange(len(ids)) >= len(ids) // 2
        # What rows share is trained too, for each of them.
        trained[20:30] = True
        rows.append((ids.astype(np.uint32), trained))
    return rows


def plain_loss(model: Any, teacher: Any, settings: DistillConfig) -> torch.Tensor:
    """Return the mean over all labels of the divergence of the whole vocabulary, one row at a time."""
    total = torch.zeros(())
    labels = 0
    for ids, trained in rows_of():
        tokens = torch.from_numpy(ids.astype(np.int64))
        places = torch.from_numpy(np.flatnonzero(trained)) - 1
        places = places[places >= 0]
        labels += len(places)
        ours = model(tokens[None]).logits[0][places]
        with torch.no_grad():
            theirs = teacher(tokens[None]).logits[0][places]
        s = (ours.double() / settings.temperature).log_softmax(-1)
        t = (theirs.double() / settings.temperature).log_softmax(-1)
        if settings.support == "teacher_k":
            kept = t.topk(settings.top_k).indices
        else:
            kept = s.topk(settings.top_k).indices
        if settings.support != "all":
            s, t = s.gather(1, kept), t.gather(1, kept)
            if settings.rest == "renormalise":
                s, t = s.log_softmax(1), t.log_softmax(1)
            else:
                s = torch.cat([s, (1 - s.exp().sum(1, True)).log()], 1)
                t = torch.cat([t, (1 - t.exp().sum(1, True)).log()], 1)
        m = (settings.beta * t.exp() + (1 - settings.beta) * s.exp()).log()
        beta = settings.beta
        if beta in (0, 1):
            p, q = (t, s) if beta == 0 else (s, t)
            total = total + (p.exp() * (p - q)).sum()
        else:
            total = total + beta * (t.exp() * (t - m)).sum()
            total = total + (1 - beta) * (s.exp() * (s - m)).sum()
        cross = F.cross_entropy(ours, tokens[places + 1], reduction="sum")
        total = total + settings.sft_weight * cross
    return total / labels


def differences(world: World, config: Config) -> list[Difference]:
    """Return by how much loss and gradient differ from plain torch at most, for each setting and split."""
    spec = ModelSpec.of(config)
    learner = distill.TASK.build(spec, config.training, world, Workload(0))
    assert fsdp.is_sharded(learner.model) == (
        config.training.parallelism == "fsdp" and world.size > 1
    )
    teacher_path = config.distill.teacher
    teacher = AutoModelForCausalLM.from_pretrained(teacher_path, attn_implementation="eager").eval()
    of_teacher = AutoModelForCausalLM.from_pretrained(teacher_path).eval().requires_grad_(False)
    learner = replace(learner, teacher=causal_lm.TASK.learner_of(of_teacher, spec))
    model = AutoModelForCausalLM.from_pretrained(spec.model.path, attn_implementation="eager")
    rows = rows_of()
    labels = sum(int(trained[1:].sum()) for _, trained in rows)
    results = []
    for settings in SETTINGS:
        of_run = DistillConfig.model_validate(settings)
        model.train().zero_grad()
        expected = plain_loss(model, teacher, of_run)
        expected.backward()
        of_settings = replace(learner, distill=of_run)
        mine = rows[world.rank :: world.size]
        for size, shares in ((9, False), (9, True), (2, True), (1, False)):
            learner.model.zero_grad()
            number = -(-len(rows[:: world.size]) // size)
            loss = 0.0
            for place in range(number):
                part = mine[place * size : (place + 1) * size]
                batch = empty_batch(1, None)
                if part:
                    batch = collate_shared(part) if shares else collate(part)
                loss += float(distill.TASK.backward(of_settings, batch, 1 / labels)[0])
            (loss,) = sum_numbers([loss], world)
            of_gradient = _of_gradient(learner.lm, model, world)
            results.append(
                (f"{settings} {size} {shares}", abs(loss - expected.item()), of_gradient)
            )
    return results


def _of_gradient(ours: Any, model: Any, world: World) -> float:
    worst = 0.0
    parameters = dict(ours.named_parameters())
    for name, theirs in model.named_parameters():
        gradient = parameters[name].grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        elif world.size > 1:
            gradient = gradient.clone()
            torch.distributed.all_reduce(gradient)
        worst = max(worst, float((gradient - theirs.grad).abs().max() / theirs.grad.abs().max()))
    return worst


@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    [
        (1, "ddp"),
        (2, "fsdp"),
        pytest.param(3, "ddp", marks=slow),
        pytest.param(3, "fsdp", marks=slow),
    ],
)
def test_loss_and_gradient_are_those_of_plain_torch_at_any_split(
    inputs: Path, ranks: int, parallelism: str
) -> None:
    config = config_of(inputs, {"parallelism": parallelism}, lora=None)
    for results in run_ranks(differences, ranks, config):
        for name, of_loss, of_gradient in results:
            assert of_loss <= 2e-6, name
            assert of_gradient <= 2e-4, name


def test_ranks_train_as_one_and_the_result_is_exported(inputs: Path, tmp_path: Path) -> None:
    config = config_of(inputs, {"max_steps": 12})
    one = toy.finished(tmp_path / "one", config)
    two = toy.finished(tmp_path / "two", config, 2)
    toy.require_like(one, two)
    steps = [line for line in metrics.read_metrics(one) if "loss" in line]
    assert steps[-1]["divergence"] < 0.8 * steps[0]["divergence"]
    for name in DISTILL_MEASURES:
        is_measured = name not in ("teacher_mass", "student_mass", "overlap")
        assert (steps[0].get(name) is not None) == is_measured, name
    evaluations = [line for line in metrics.read_metrics(one) if "eval_loss" in line]
    assert evaluations[-1]["eval_divergence"] < steps[0]["divergence"]
    before = json.loads((one / metrics.BASE).read_text())["metrics"]["eval_divergence"]
    assert before > evaluations[-1]["eval_divergence"], "of the same rows, before the first step"
    for line in metrics.read_lines(one / metrics.TIMINGS):
        assert 0 < line["teacher_seconds"] < line["seconds"]
        assert line["train_seconds"] == line["seconds"] - line["teacher_seconds"]
    assert cli.main(["report", str(one)]) == 0
    assert cli.main(["export", str(one), "-o", str(tmp_path / "exported")]) == 0
    assert cli.main(["evaluate", str(one)]) == 0


def test_a_kill_changes_no_bit(inputs: Path, tmp_path: Path) -> None:
    config = config_of(inputs, distill={"support": "teacher_k", "top_k": 8})
    whole = toy.finished(tmp_path / "whole", config)
    run_dir = toy.make_run(tmp_path / "killed", config)
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": "signal 9:micro-batch:5"}) == [-9]
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == toy.digests(whole)


DRAWING: dict[str, Any] = {
    "lmbda": 0.5, "max_completion_length": 6, "num_generations": 2, "generation_batch_size": 4, "temperature": 0.9
}  # fmt: skip


def drawn_config(inputs: Path, **settings: Any) -> Config:
    return config_of(
        inputs, {"max_steps": 5, "save_steps": 2, "eval_steps": 5}, distill={**DRAWING, **settings}
    )


def ids_of(run_dir: Path, step: int) -> list[list[list[int]]]:
    groups = rollout_records.read_groups(run_dir, step)
    return [[answer.ids for answer in group.answers] for group in groups]


def test_drawn_answers_are_those_of_any_ranks_and_their_loss_is_plain(
    inputs: Path, tmp_path: Path
) -> None:
    one = toy.finished(tmp_path / "one", drawn_config(inputs, beta=0.5, sft_weight=0.3))
    two = toy.finished(tmp_path / "two", drawn_config(inputs, beta=0.5, sft_weight=0.3), 2)
    drawn_before = rollout_records.steps_of(one)
    assert 0 < len(drawn_before) < 5
    for step in drawn_before:
        # Weights differ in their last bits after a step, so log-probabilities may, but not what is drawn.
        assert ids_of(one, step) == ids_of(two, step)
    toy.require_like(one, two)

    # The first step's answers, where no step has changed the model, by plain torch.
    config = drawn_config(inputs, lmbda=1)
    run_dir = toy.finished(tmp_path / "drawn", config)
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        for path in (inputs / "model", inputs / "teacher")
    )
    total = 0.0
    tokens = 0
    for group in rollout_records.read_groups(run_dir, 0):
        for answer in group.answers:
            ids = torch.tensor([group.prompt + answer.ids])
            places = slice(len(group.prompt) - 1, -1)
            with torch.no_grad():
                s = (model(ids).logits[0, places].double() / 0.9).log_softmax(-1)
                t = (teacher(ids).logits[0, places].double() / 0.9).log_softmax(-1)
            total += float((s.exp() * (s - t)).sum())
            tokens += len(answer.ids)
    line = next(line for line in metrics.read_metrics(run_dir) if "loss" in line)
    assert line["loss"] == pytest.approx(total / tokens, rel=1e-4)
    assert line["completion_length"] == pytest.approx(tokens / 16)
    assert cli.main(["rollouts", str(run_dir)]) == 0
    assert cli.main(["report", str(run_dir)]) == 0


@pytest.mark.parametrize("fault", ["signal 9:generation:5", "signal 15:micro-batch:6"])
def test_a_kill_while_answers_are_drawn_changes_no_bit(
    inputs: Path, tmp_path: Path, fault: str
) -> None:
    whole = toy.finished(tmp_path / "whole", drawn_config(inputs))
    run_dir = toy.make_run(tmp_path / "killed", drawn_config(inputs))
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": fault}) != [0]
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == toy.digests(whole)


def test_given_answers_that_the_data_lack_are_named(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "one two"}) + "\n")
    data = {"train": str(tmp_path / "prompts.jsonl"), "eval": None}
    config = config_of(inputs, distill=DRAWING, data=data)
    run_dir = toy.make_run(tmp_path / "run", config)
    (code,) = toy.train(run_dir)
    assert code == 2
    assert "1 of 1 rows" in toy.log_of(run_dir)


def test_what_a_teacher_said_is_kept_and_the_same(inputs: Path, tmp_path: Path) -> None:
    data = {"cache": str(tmp_path / "cache")}
    settings: dict[str, Any] = {"support": "teacher_k", "top_k": 8, "beta": 0.5}
    config = config_of(inputs, distill=settings, data=data)
    run_dir = toy.make_run(tmp_path / "killed", config)
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": "signal 9:teacher:3"}) == [-9]
    assert len(list((tmp_path / "cache").rglob("*.parts/*.npz"))) == 2
    assert toy.train(run_dir, 2) == [0, 0]
    again = toy.finished(tmp_path / "again", config)
    log = toy.log_of(again)
    assert "loading the teacher" not in log
    assert f"under the teacher {inputs / 'teacher'}: found" in log
    toy.require_like(run_dir, again)
    evaluations = [line for line in metrics.read_metrics(again) if "eval_loss" in line]
    assert all("eval_divergence" in line for line in evaluations)
    # Too large to be kept: the teacher is asked at each step.
    other = {**settings, "lmbda": 0.0}
    asked = toy.make_run(tmp_path / "asked", config_of(inputs, distill=other, data=data))
    with started(trained_unkept, 1, [str(asked)]) as ranks:
        assert wait_all(ranks) == [0]
    assert "is asked at each step" in toy.log_of(asked)
    toy.require_like(asked, again)
    # Another temperature is another question.
    warmer = config_of(inputs, {"max_steps": 1}, distill={**settings, "temperature": 2}, data=data)
    assert "computed in" in toy.log_of(toy.finished(tmp_path / "warmer", warmer))


def test_more_tokens_than_there_are_can_be_kept(inputs: Path, tmp_path: Path) -> None:
    losses = []
    for name, settings in (("kept", {"support": "teacher_k", "top_k": 5000}), ("all", {})):
        config = config_of(inputs, {"max_steps": 1}, distill={**settings, "beta": 0.5})
        run_dir = toy.finished(tmp_path / name, config)
        losses += [line["loss"] for line in metrics.read_metrics(run_dir) if "loss" in line]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def trained_unkept(words: list[str]) -> int:
    kept_teacher.MOST_KEPT_BYTES = 1  # type: ignore[misc]
    return worker.main(words)


def test_a_run_does_not_go_on_with_another_teacher(inputs: Path, tmp_path: Path) -> None:
    teacher_folder = tmp_path / "teacher"
    shutil.copytree(inputs / "teacher", teacher_folder)
    config = config_of(inputs, distill={"teacher": str(teacher_folder)})
    run_dir = toy.make_run(tmp_path / "run", config)
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": "signal 9:micro-batch:5"}) == [-9]
    save_model(teacher_folder, hidden_size=128)
    assert toy.train(run_dir, 2) == [2, 2]
    assert "is not the teacher that this run began with" in toy.log_of(run_dir)
    shutil.copytree(inputs / "teacher", teacher_folder, dirs_exist_ok=True)
    assert toy.train(run_dir) == [0]


PRIVILEGED: dict[str, Any] = {
    **DRAWING, "lmbda": 1, "teacher": "self", "teacher_prompt": "{prompt} The answer is{answer}"
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora": None},
        {"ranks": 2},
        pytest.param({"ranks": 2, "lora": None, "parallelism": "fsdp"}, marks=slow),
    ],
)
def test_a_model_learns_from_itself_shown_the_answer(
    inputs: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    others = dict(changes)
    ranks = others.pop("ranks", 1)
    training = {
        "max_steps": 2, "save_steps": 1, "save_total_limit": 2, "parallelism": others.pop("parallelism", "ddp"),
    }  # fmt: skip
    config = config_of(inputs, training, distill=PRIVILEGED, **others)
    run_dir = toy.finished(tmp_path / "run", config, ranks)
    base = AutoModelForCausalLM.from_pretrained(inputs / "model", attn_implementation="eager")
    tokenizer = load_tokenizer(config.model)
    records = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    lines = [line for line in metrics.read_metrics(run_dir) if "loss" in line]
    # The student has changed when the second step begins, and the teacher is still the base.
    for step, student in ((0, base), (1, load_run(run_dir, "1").model)):
        total = 0.0
        tokens = 0
        for group in rollout_records.read_groups(run_dir, step):
            record = records[group.row]
            shown = tokenizer.encode_prompt(
                f"{record['prompt']} The answer is{record['completion']}"
            )
            for answer in group.answers:
                parts = []
                for model, prompt in ((student, group.prompt), (base, shown)):
                    ids = torch.tensor([prompt + answer.ids])
                    with torch.no_grad():
                        logits = model.eval()(ids).logits[0, len(prompt) - 1 : -1].double()
                    parts.append((logits / 0.9).log_softmax(-1))
                total += float((parts[0].exp() * (parts[0] - parts[1])).sum())
                tokens += len(answer.ids)
        assert lines[step]["loss"] > 0
        assert lines[step]["loss"] == pytest.approx(total / tokens, rel=1e-3)


def test_a_teacher_that_is_shown_nothing_more_is_refused(inputs: Path, tmp_path: Path) -> None:
    settings = {key: value for key, value in PRIVILEGED.items() if key != "teacher_prompt"}
    run_dir = toy.make_run(tmp_path / "run", config_of(inputs, distill=settings))
    assert toy.train(run_dir) == [2]
    assert "50 of 50 records" in toy.log_of(run_dir)
    lacking = {**PRIVILEGED, "teacher_prompt": "{prompt} {hint}"}
    run_dir = toy.make_run(tmp_path / "lacking", config_of(inputs, distill=lacking))
    assert toy.train(run_dir) == [2]
    assert "50 of 50 records of data.train lack 'hint'" in toy.log_of(run_dir)
    # By its name it is the same teacher, and where answers are given it could not be shown more.
    for lmbda in (0, 0.5):
        with pytest.raises(ValueError, match="is the model itself"):
            config_of(inputs, distill={"teacher": str(inputs / "model"), "lmbda": lmbda})


def test_a_run_is_a_teacher(inputs: Path, tmp_path: Path) -> None:
    teacher = toy.finished(tmp_path / "teacher", toy.make_config(inputs, {"max_steps": 3}))
    config = config_of(inputs, {"max_steps": 3}, distill={"teacher": str(teacher), "beta": 0.5})
    run_dir = toy.finished(tmp_path / "run", config)
    line = next(line for line in metrics.read_metrics(run_dir) if "loss" in line)
    assert 0 < line["divergence"] < 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"support": "teacher_k", "top_k": 8},
        {"support": "student_k", "top_k": 8, "temperature": 0.7},
    ],
)
def test_rows_that_only_pad_a_vocabulary_are_not_compared(
    inputs: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The same models without the rows that pad: same losses, same weights."""
    config = config_of(inputs, {"max_steps": 2}, distill=settings, lora=None)
    ids = load_tokenizer(config.model).vocab_size
    padded = AutoModelForCausalLM.from_pretrained(inputs / "teacher")
    padded.resize_token_embeddings(ids + 90, mean_resizing=False)
    shutil.copytree(inputs / "teacher", tmp_path / "padded")
    padded.save_pretrained(tmp_path / "padded")
    bare = AutoModelForCausalLM.from_pretrained(inputs / "teacher")
    bare.resize_token_embeddings(ids)
    shutil.copytree(inputs / "teacher", tmp_path / "bare")
    bare.save_pretrained(tmp_path / "bare")
    losses = []
    for name in ("padded", "bare"):
        of_run = {**settings, "teacher": str(tmp_path / name)}
        run_dir = toy.finished(
            tmp_path / f"with-{name}",
            config_of(inputs, {"max_steps": 3}, distill=of_run, lora=None),
        )
        assert f"compared over the {ids:,} ids of their tokenizer" in toy.log_of(run_dir)
        losses.append([line["loss"] for line in metrics.read_metrics(run_dir) if "loss" in line])
    assert losses[0] == losses[1]


def test_another_vocabulary_is_refused_with_both_names(inputs: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "narrow", vocab_size=200)
    config = config_of(inputs, distill={"teacher": str(tmp_path / "narrow")})
    run_dir = toy.make_run(tmp_path / "run", config)
    (code,) = toy.train(run_dir)
    status = json.loads((run_dir / "logs/rank-0.exit.json").read_text())
    assert code != 0
    assert f"the teacher {tmp_path / 'narrow'} gives 200" in status["reason"]
    assert str(inputs / "model") in status["reason"]
