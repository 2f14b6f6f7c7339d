"""Pairs of answers about images: each loss that of plain transformers, the reference kept, and runs that learn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from kubetune.batching.feed import Work, batch_of
from kubetune.batching.image_batches import picture_reader
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import prepare
from kubetune.data.prepared.rows import Rows
from kubetune.distributed.process_group import World
from kubetune.models.learner import Learner
from kubetune.models.model_spec import ModelSpec
from kubetune.result.forms.wanted import WantedExport
from kubetune.result.inference.answering import Sampling, answer, load_run
from kubetune.result.inference.evaluate_run import evaluate_run
from kubetune.result.publishing.exporting import export_run
from kubetune.rundir import metrics
from kubetune.tasks import task_of, vision_language
from tests import toy
from tests.pictures import FAMILIES, save_family_model, save_seeing_model, write_colour_pairs
from tests.preferences import LOSSES, Row, logp, plain_loss

# Two families whose images are grids, which are packed, and two that are run one sequence at a time.
NAMES = ("qwen2_5_vl", "qwen3_vl", "llava", "gemma3")
QUICK = {
    ("qwen2_5_vl", "dpo+sft"),
    ("qwen2_5_vl", "orpo"),
    ("qwen2_5_vl", "kto"),
    ("llava", "dpo"),
    ("llava", "kto"),
}


def slow_unless(is_quick: bool, *case: str) -> Any:
    return pytest.param(*case, marks=() if is_quick else pytest.mark.slow)


def save_model(folder: Path, name: str) -> Path:
    return (save_family_model if name in FAMILIES else save_seeing_model)(folder / "model", name)


def config_of(folder: Path, loss: str) -> Config:
    """Return a config of pairs about images that lie in the folder."""
    data = folder / ("judged.jsonl" if loss == "kto" else "train.jsonl")
    return Config.model_validate(
        {
            "model": str(folder / "model"),
            "task": "preference",
            "preference": {"loss": loss, **LOSSES[loss], "images": True},
            "data": {"train": str(data), "max_length": 256, "cache": str(folder / "cache")},
        }
    )


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return folders with a model of a family, six pairs of which five have an image, and one answer of each judged."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        save_model(folder, name)
        lines = []
        for number, line in enumerate(
            write_colour_pairs(folder, "train", 5, text_rows=1).read_text().splitlines()
        ):
            pair = json.loads(line)
            answers = pair.pop("chosen"), pair.pop("rejected")
            pair["messages"].append(answers[number % 2])
            lines.append(json.dumps(pair | {"label": not number % 2}) + "\n")
        (folder / "judged.jsonl").write_text("".join(lines))
        return folder

    return cache(make)


def plain_rows(rows: Rows) -> list[Row]:
    """Return prepared rows as the plain losses take them, with their references."""
    results = []
    for index in range(len(rows)):
        prompts, answers = zip(
            *(_parts(*sequence) for sequence in rows.sequences(index)), strict=True
        )
        assert prompts[0] == prompts[1]
        reference = (0.0, 0.0) if rows.reference is None else tuple(rows.reference[index].tolist())
        results.append(
            Row(
                prompts[0], answers, reference, rows.targets is None or bool(rows.targets[index, 0])
            )
        )
    return results


def _parts(ids: Any, trained: Any) -> tuple[list[int], list[int]]:
    """Return what is asked, and what is trained, without the line break behind it."""
    first = int(trained.argmax())
    last = int(trained.nonzero()[0][-1])
    assert trained[first : last + 1].all()
    return ids[:first].tolist(), ids[first : last + 1].tolist()


def plain_model(model: Path, name: str, rows: Rows, prompts: Sequence[Row]) -> tuple[Any, Any]:
    """Return transformers' model, and what calls it with the images of the prompt that ids begin with, which transformers'
    own processor has looked at."""
    lm = AutoModelForImageTextToText.from_pretrained(model, attn_implementation="eager").train()
    processor = (AutoProcessor if name in FAMILIES else AutoImageProcessor).from_pretrained(
        model, backend="pil"
    )
    inputs = {}
    for index, row in enumerate(prompts):
        images = [Image.open(image.path).convert("RGB") for image in rows.images(index)]
        text = {"text": [processor.image_token * len(images)]} if name in FAMILIES else {}
        made = processor(images=images, return_tensors="pt", **text) if images else {}
        inputs[tuple(row.prompt)] = {
            key: made[key] for key in ("pixel_values", "image_grid_thw") if key in made
        }
    kinds = {"llava": (), "gemma3": ("token_type_ids",)}.get(name, ("mm_token_type_ids",))

    def ask(input_ids: torch.Tensor) -> Any:
        (pictures,) = [
            pictures
            for prompt, pictures in inputs.items()
            if tuple(input_ids[0, : len(prompt)].tolist()) == prompt
        ]
        token_types = dict.fromkeys(kinds, (input_ids == lm.config.image_token_id).int())
        return lm(input_ids=input_ids, use_cache=False, **token_types, **pictures)

    return lm, ask


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def learner_of(config: Config) -> Learner:
    model = AutoModelForImageTextToText.from_pretrained(
        config.model.path, attn_implementation="eager"
    ).train()
    return replace(
        vision_language.TASK.learner_of(model, ModelSpec.of(config)), preference=config.preference
    )


@pytest.mark.parametrize(
    ("name", "loss"),
    [slow_unless((name, loss) in QUICK, name, loss) for name in NAMES for loss in LOSSES],
)
def test_loss_and_gradient_are_those_of_plain_transformers_however_the_batch_is_split(
    folder_of: Callable[[str], Path], name: str, loss: str
) -> None:
    config = config_of(folder_of(name), loss)
    rows = prepare(config).train
    task = task_of(config.task_name)
    if config.preference.needs_reference:
        rows.reference = -22 - 8 * np.random.default_rng(1).random((len(rows), 2))
    plain = plain_rows(rows)
    model, ask = plain_model(Path(config.model.path), name, rows, plain)
    expected = plain_loss(ask, plain, config.preference)
    expected.backward()
    gradient = gradient_of(model)
    assert gradient.norm() > 0.01
    learner = learner_of(config)
    reader = picture_reader(rows)
    assert learner.route.padding_free == (name not in FAMILIES)
    for size in (6, 2) if learner.route.padding_free else (1,):
        batches = [
            batch_of(rows, np.arange(at, at + size), reader) for at in range(0, len(rows), size)
        ]
        work = task.with_batch_totals(learner, Work(batches, 0, 0, 0, len(rows)), World())
        learner.model.zero_grad()
        actual = sum(
            float(task.backward(learner, batch, 1 / work.divisor)[0]) for batch in work.batches
        )
        assert actual == pytest.approx(expected.item(), rel=1e-6)
        assert float((gradient_of(learner.model) - gradient).norm()) <= 1e-6 * float(
            gradient.norm()
        )


# Whole runs.


def run_config(folder: Path, name: str, loss: str = "dpo", **sections: Any) -> Config:
    """Return a run on pairs about colours, of which some have no image, with 24 held out."""
    save_model(folder, name)
    files = {"train": write_colour_pairs(folder, "train", 200, 1, text_rows=8),
             "eval": write_colour_pairs(folder, "eval", 24, 2)}  # fmt: skip
    training = {"global_batch_size": 8, "num_train_epochs": 1, "eval_steps": 13, "save_steps": 13,
                **sections.pop("training", {})}  # fmt: skip
    data = {
        "max_length": 256,
        "cache": str(folder / "cache"),
        **{split: str(file) for split, file in files.items()},
    }
    preference = {"loss": loss, "images": True, "sft_weight": 1.0}
    lora = {"lora": {"r": 16}, **sections}
    return toy.make_config(
        folder, training, task="preference", preference=preference, data=data, **lora
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_keeps_what_the_base_says_and_learns(name: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, name)
    run_dir = toy.finished(tmp_path / "run", config)
    evaluated = [line for line in metrics.read_metrics(run_dir) if "eval_loss" in line]
    assert evaluated[-1]["eval_accuracy"] >= (
        0.9 if name == "qwen2_5_vl" else 0.75
    )  # some see a few squares alone

    rows = prepare(config).eval
    assert rows is not None
    plain = plain_rows(rows)
    _, ask = plain_model(tmp_path / "model", name, rows, plain)
    (kept,) = (tmp_path / "cache").rglob("*.reference-*.npz")
    with torch.no_grad(), np.load(kept) as tables:
        expected = [
            [float(logp(ask, row.prompt, answer_ids)) for answer_ids in row.answers]
            for row in plain
        ]
        np.testing.assert_allclose(tables["eval"], expected, rtol=1e-6)

    by_hand = evaluate_run(run_dir, "last").metrics
    noted = evaluated[-1]
    assert by_hand == pytest.approx(
        {key: value for key, value in noted.items() if key.startswith("eval_")}, rel=1e-5
    )
    questions = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    answers = answer(
        load_run(run_dir),
        [row["messages"] for row in questions],
        Sampling(max_new_tokens=6),
        images=[[str(tmp_path / image) for image in row["images"]] for row in questions],
    )
    right = sum(
        text.strip() == row["chosen"]["content"]
        for text, row in zip(answers, questions, strict=True)
    )
    assert right >= len(questions) // (2 if name == "qwen2_5_vl" else 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_two_ranks_train_as_one_and_the_result_is_exported(name: str, tmp_path: Path) -> None:
    training = {"max_steps": 3, "eval_steps": 3, "save_steps": 3, "learning_rate": 1e-3}
    config = run_config(tmp_path, name, training=training, lora=None)
    two = toy.finished(tmp_path / "two", config, 2)
    alone = toy.finished(tmp_path / "one", config)
    assert toy.losses(two) == pytest.approx(toy.losses(alone), abs=1e-5)
    reused = [
        event["reused"]
        for run in (two, alone)
        for event in metrics.read_events(run)
        if event["event"] == "reference"
    ]
    assert reused == [False, True]
    noted = [line for line in metrics.read_metrics(alone) if "eval_loss" in line][-1]
    assert evaluate_run(alone, "last").metrics["eval_loss"] == pytest.approx(
        noted["eval_loss"], rel=1e-5
    )
    exported = export_run(
        alone, wanted=WantedExport(out=tmp_path / "out", merged=False), tell=lambda _: None
    )
    assert (
        max(comparison["difference"] for comparison in exported.facts["proof"]["comparisons"])
        < 1e-5
    )
    assert "image-text-to-text" in (tmp_path / "out" / "README.md").read_text()
    AutoModelForImageTextToText.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_a_kill_in_the_reference_or_in_training_changes_no_bit(tmp_path: Path) -> None:
    training = {"max_steps": 4, "eval_steps": 2, "save_steps": 2}
    config = run_config(tmp_path, "qwen2_5_vl", training=training)
    apart = config.data.model_copy(update={"cache": str(tmp_path / "other-cache")})
    whole = toy.finished(tmp_path / "whole", config.model_copy(update={"data": apart}))
    run_dir = toy.make_run(tmp_path / "killed", config)
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": "signal 9:reference:4"}) == [-9]
    assert toy.train(run_dir, environ={"KUBETUNE_FAULT": "signal 9:micro-batch:3"}) == [-9]
    assert toy.train(run_dir) == [0]
    assert toy.digests(run_dir) == toy.digests(whole)


@pytest.mark.slow
def test_a_sharded_model_learns_as_copies_do(tmp_path: Path) -> None:
    training = {"max_steps": 3, "eval_steps": 3, "save_steps": 3, "learning_rate": 1e-3}
    runs = [
        toy.finished(
            tmp_path / kind,
            run_config(tmp_path, "qwen3_vl", training={**training, "parallelism": kind}),
            2,
        )
        for kind in ("ddp", "fsdp")
    ]
    assert toy.losses(runs[1]) == pytest.approx(toy.losses(runs[0]), abs=1e-5)
