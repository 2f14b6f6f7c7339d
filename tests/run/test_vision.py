"""Models that see: what they learn, that ranks and restarts change nothing, and that others can use the result."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen3VLProcessor,
)

from kubetune import errors
from kubetune.batching import image_batches
from kubetune.batching.image_batches import PictureReader, collate_pictured, grid_positions
from kubetune.cli import main
from kubetune.config.schema import Config, LoraConfig, VisionConfig
from kubetune.data.prepared.prepare import prepare
from kubetune.data.reading.formats import convert
from kubetune.data.spec import DataSpec
from kubetune.data.text.encode import Encoded, Encoder
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.data.vision.encode_images import VisionEncoder
from kubetune.data.vision.image_processor import ImageProcessor, processor_of
from kubetune.data.vision.whole_processor import load_seeing
from kubetune.distributed.process_group import World
from kubetune.models import padding_free
from kubetune.models.adapters.lora import add_lora
from kubetune.models.attention_hooks import CannotRunPaddingFree
from kubetune.models.learner import Learner
from kubetune.models.model_spec import ModelSpec
from kubetune.result.forms.wanted import WantedExport
from kubetune.result.inference.answering import LoadedModel, Sampling, answer, load_run
from kubetune.result.publishing.exporting import export_run
from kubetune.rundir import checkpoints, metrics
from kubetune.scoring.asking import answer as ask
from kubetune.scoring.judge import judge_of
from kubetune.tasks import vision_check, vision_language
from tests import toy
from tests.architectures import randomize_lora, relative_error, take_gradients
from tests.pictures import ARCHITECTURES, QUESTION, paint, save_seeing_model, write_questions

LLAMA_FACTORY_DATA = Path(
    os.environ.get(
        "LLAMA_FACTORY_DATA", Path(__file__).parents[3] / "shared" / "data" / "llamafactory"
    )
)
TRAINING = {
    "global_batch_size": 16,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 1,
    "eval_steps": 7,
    "save_steps": 7,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that sees, and questions with and without images."""
    folder = tmp_path_factory.mktemp("vision")
    save_seeing_model(folder / "model")
    write_questions(folder, "train", 208, 1, text_rows=16)
    write_questions(folder, "eval", 32, 2)
    return folder


def make_config(inputs: Path, training: dict[str, Any] | None = None, **sections: Any) -> Config:
    settings = {"data": {"max_length": 128}, "lora": {"r": 16}, **sections}
    return toy.make_config(
        inputs, {**TRAINING, **(training or {})}, task="vision_language", **settings
    )


@pytest.fixture(scope="module")
def trained(inputs: Path) -> Path:
    """Return a run that was trained on the colours, and was asked for them."""
    asked = {"generate": {"metric": "exact_match", "max_new_tokens": 6, "batch_size": 5}}
    return toy.finished(inputs / "run", make_config(inputs, evaluation=asked))


def share_of_right_answers(loaded: LoadedModel, inputs: Path) -> float:
    rows = [json.loads(line) for line in (inputs / "eval.jsonl").read_text().splitlines()]
    images = [[str(inputs / path) for path in row["images"]] for row in rows]
    answers = answer(
        loaded, [f"<image>{QUESTION}"] * len(rows), Sampling(max_new_tokens=6), images=images
    )
    wanted: list[str] = [row["messages"][1]["content"] for row in rows]
    return sum(ours == theirs for ours, theirs in zip(answers, wanted, strict=True)) / len(rows)


def test_learns_to_tell_the_colour_of_images_it_has_not_seen(trained: Path, inputs: Path) -> None:
    loaded = load_run(trained)
    with loaded.as_base() as base:
        assert share_of_right_answers(base, inputs) == 0.0
    right = share_of_right_answers(loaded, inputs)
    assert right >= 0.9
    assert metrics.read_verdict(trained)["best"]["eval_exact_match"] == right, (
        "asked one by one or in batches"
    )
    assert "padding-free packed batches" in toy.log_of(trained)


def test_is_asked_about_a_file(
    trained: Path, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.loads((inputs / "eval.jsonl").read_text().splitlines()[0])
    image = str(inputs / row["images"][0])
    assert (
        main(["generate", str(trained), QUESTION, "--image", image, "--max-new-tokens", "6"]) == 0
    )
    assert capsys.readouterr().out.strip() == row["messages"][1]["content"]
    assert main(["generate", str(trained), "<image> <image>", "--image", image]) == errors.USER
    assert "has 2 <image> tags for 1 images" in capsys.readouterr().err
    assert (
        main(["generate", str(trained), QUESTION, "--image", str(inputs / "eval.jsonl")])
        == errors.USER
    )
    assert "is no image of JPEG, PNG" in capsys.readouterr().err


def test_is_shown_images_in_a_conversation(
    trained: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (inputs / "eval.jsonl").read_text().splitlines()]
    first = next(row for row in rows if row["messages"][1]["content"] == "red")
    image = inputs / first["images"][0]
    lines = [
        f"/image {inputs / 'eval.jsonl'}",
        QUESTION,
        f"/image {image}",
        QUESTION,
        "/history",
        "/reset",
    ]
    monkeypatch.setattr(
        "sys.stdin", StringIO("\n".join([*lines, f"/image {image}", f"<image>{QUESTION}"]) + "\n")
    )
    assert main(["chat", str(trained), "--max-new-tokens", "6"]) == 0
    stdout = capsys.readouterr().out
    assert "is no image of JPEG, PNG" in stdout
    assert stdout.count("goes with your next message") == 2
    assert f"user: <image>\n{QUESTION}" in stdout, "the tag is put before what was said"
    assert "> red\n" in stdout.split("forgotten")[1]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_answers_in_batches_are_those_of_transformers_one_by_one(name: str, tmp_path: Path) -> None:
    save_seeing_model(tmp_path / "model", name)
    write_questions(tmp_path, "train", 5, 2, text_rows=4)
    asked = {"generate": {"metric": "exact_match", "max_new_tokens": 8, "batch_size": 3}}
    data = {
        "train": str(tmp_path / "train.jsonl"),
        "eval": str(tmp_path / "train.jsonl"),
        "max_length": 128,
    }
    config = toy.make_config(tmp_path, task="vision_language", data=data, evaluation=asked)
    prepared = prepare(config)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    assert prepared.eval is not None
    judge = judge_of(
        config.evaluation, prepared.tokenizer, config.data.eval, prepared.eval, World()
    )
    assert judge is not None
    assert judge.reader is not None
    alone = {}
    for question in judge.asked:
        row = (np.asarray(question.ids, np.uint32), np.zeros(len(question.ids), bool))
        batch = collate_pictured(
            [row], [judge.reader.read(question.images)], judge.reader.processor
        )
        out = model.generate(
            input_ids=batch.input_ids[None], attention_mask=torch.ones_like(batch.input_ids[None]), max_new_tokens=8,
            do_sample=False, eos_token_id=list(judge.tokenizer.eos_ids), pad_token_id=judge.tokenizer.pad_id,
            **image_batches.image_inputs(batch),
        )  # fmt: skip
        alone[question.row] = judge.tokenizer.decode(out[0, len(question.ids) :].tolist()).strip()
    learner = vision_language.TASK.learner_of(model.train(), ModelSpec.of(config))
    assert learner.route.padding_free
    answers = ask(judge, learner, World(), lambda: False)
    assert answers is not None
    assert {row: reply.text.strip() for row, [reply] in answers.items()} == alone
    assert len(set(alone.values())) > 4, "a model that always says the same proves nothing"


SEES_ANEW = {"freeze_vision_tower": False, "freeze_projector": False}
SHORT = {"max_steps": 3, "eval_steps": 3, "save_steps": 3, "learning_rate": 1e-3}


@pytest.mark.slow
def test_two_ranks_of_which_one_may_have_no_image_train_as_one(
    inputs: Path, tmp_path: Path
) -> None:
    write_questions(tmp_path, "train", 3, 1, text_rows=21)
    data = {"train": str(tmp_path / "train.jsonl"), "max_length": 128}
    sections = {"vision": {"freeze_vision_tower": False, "freeze_projector": False}, "data": data}
    config = make_config(
        inputs, {**SHORT, "global_batch_size": 8, "per_device_train_batch_size": 1}, **sections
    )
    alone, two = (toy.finished(tmp_path / str(world), config, world) for world in (1, 2))
    assert toy.losses(two) == pytest.approx(toy.losses(alone), abs=1e-5)
    for ours, theirs in zip(metrics.read_metrics(two), metrics.read_metrics(alone), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"attention": "sdpa"}},
        {"training": {"compile": True}},
        {"training": {"gradient_checkpointing": True}},
    ],
    ids=["one sequence at a time", "compiled", "recomputed"],
)
def test_other_ways_through_the_model_train_the_same(
    sections: dict[str, dict[str, Any]], inputs: Path, tmp_path: Path
) -> None:
    model = {"path": str(inputs / "model"), **sections.get("model", {})}
    first = toy.finished(tmp_path / "one", make_config(inputs, SHORT))
    other = toy.finished(
        tmp_path / "other", make_config(inputs, SHORT | sections.get("training", {}), model=model)
    )
    for ours, theirs in zip(metrics.read_metrics(other), metrics.read_metrics(first), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-4)
    assert ("padding-free" in toy.log_of(other)) == ("model" not in sections)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_quantised_base_learns_and_is_merged(
    quantization: str, inputs: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    run_dir = toy.finished(
        tmp_path / "run", make_config(inputs, {"max_steps": 7}, quantization=quantization)
    )
    assert toy.losses(run_dir)[-1] < toy.losses(run_dir)[0] - 1
    messages: list[str] = []
    exported = export_run(
        run_dir, wanted=WantedExport(merged=True, out=tmp_path / "out"), tell=messages.append
    )
    assert any("dequantising" in line for line in messages)
    model = AutoModelForImageTextToText.from_pretrained(exported.path)
    assert not getattr(model, "is_quantized", False)


@pytest.mark.slow
def test_rows_of_another_tool_with_an_image_in_each_turn_are_trained_on(
    inputs: Path, tmp_path: Path
) -> None:
    file = LLAMA_FACTORY_DATA / "mllm_demo.json"
    if not file.is_file():
        pytest.skip(
            "needs LLaMA-Factory's mllm_demo.json and its images beside this repository, or in $LLAMA_FACTORY_DATA"
        )
    sections = {
        "data": {"train": str(file), "max_length": 1024},
        "vision": {"image_max_tokens": 64},
    }
    config = make_config(inputs, {"max_steps": 4, "eval_steps": 4, "save_steps": 4}, **sections)
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval": None})})
    run_dir = toy.finished(tmp_path / "run", config)
    assert "[DATA] 6 rows" in toy.log_of(run_dir)
    assert toy.losses(run_dir)[-1] < toy.losses(run_dir)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"vision": SEES_ANEW},
        {"model": {"attention": "sdpa"}},
        {"lora": None},
        {"lora": None, "vision": SEES_ANEW},
    ],
    ids=["frozen", "sees anew", "one sequence at a time", "all of the text", "all"],
)
def test_a_model_cut_over_ranks_trains_as_copies_do(
    sections: dict[str, Any], inputs: Path, tmp_path: Path
) -> None:
    write_questions(tmp_path, "train", 3, 1, text_rows=21)
    write_questions(tmp_path, "eval", 5, 2)
    sections = {
        **sections,
        "model": {"path": str(inputs / "model"), **sections.get("model", {})},
        "data": {
            "train": str(tmp_path / "train.jsonl"),
            "eval": str(tmp_path / "eval.jsonl"),
            "max_length": 128,
        },
    }
    small = {**SHORT, "global_batch_size": 8, "per_device_train_batch_size": 1}
    ours, theirs = (
        toy.finished(
            tmp_path / kind, make_config(inputs, {**small, "parallelism": kind}, **sections), 2
        )
        for kind in ("fsdp", "ddp")
    )
    toy.require_like(ours, theirs, load_weights if "lora" in sections else None)


@pytest.mark.slow
def test_stacked_experts_that_lie_either_way_in_files_are_cut_over_ranks(
    inputs: Path, tmp_path: Path
) -> None:
    save_seeing_model(tmp_path / "model", "qwen3_vl_moe")
    sections: dict[str, Any] = {"lora": None, "model": {"path": str(tmp_path / "model")}}
    small = {**SHORT, "global_batch_size": 8, "per_device_train_batch_size": 2}
    ours, theirs = (
        toy.finished(
            tmp_path / kind, make_config(inputs, {**small, "parallelism": kind}, **sections), 2
        )
        for kind in ("fsdp", "ddp")
    )
    toy.require_like(ours, theirs, load_weights)


def load_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return what plain transformers makes of the last checkpoint."""
    folder = run_dir / "checkpoints" / "last"
    model, loading_info = AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(loading_info.values()), loading_info
    return dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_model_trained_whole_goes_on_at_another_number_of_ranks(
    inputs: Path, tmp_path: Path, before: int, after: int
) -> None:
    write_questions(tmp_path, "train", 3, 1, text_rows=21)
    write_questions(tmp_path, "eval", 5, 2)
    data = {
        "train": str(tmp_path / "train.jsonl"),
        "eval": str(tmp_path / "eval.jsonl"),
        "max_length": 128,
    }
    small = {
        **SHORT,
        "max_steps": 4,
        "global_batch_size": 8,
        "per_device_train_batch_size": 1,
        "parallelism": "fsdp",
    }
    config = make_config(inputs, small, lora=None, vision=SEES_ANEW, data=data)
    run_dir = toy.make_run(tmp_path / "run", config, before)
    environ = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:2:{before - 1}"}
    assert toy.train(run_dir, before, environ) == [errors.PREEMPTED] * before
    toy.make_run(run_dir, config, after)
    assert toy.train(run_dir, after) == [0] * after
    assert toy.losses(run_dir) == pytest.approx(
        toy.losses(toy.finished(tmp_path / "whole", config)), abs=1e-5
    )
    exported = export_run(run_dir, wanted=WantedExport(out=tmp_path / "out"), tell=lambda _: None)
    assert (
        max(comparison["difference"] for comparison in exported.facts["proof"]["comparisons"])
        < 1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stopped_run_ends_bit_for_bit_as_one_that_was_not(
    inputs: Path, tmp_path: Path, world_size: int
) -> None:
    config = make_config(inputs, {"max_steps": 10, "eval_steps": 4}, lora={"r": 4, "dropout": 0.1})
    whole = toy.finished(tmp_path / "whole", config, world_size)
    cut = toy.make_run(tmp_path / "cut", config, world_size)
    environ = {"KUBETUNE_FAULT": f"signal {signal.SIGTERM}:step:6:{world_size - 1}"}
    assert toy.train(cut, world_size, environ) == [errors.PREEMPTED] * world_size
    assert checkpoints.steps(cut)[-1] == 6
    assert toy.train(cut, world_size) == [0] * world_size
    assert toy.digests(cut) == toy.digests(whole)


@pytest.mark.slow
def test_a_merged_model_is_one_that_transformers_loads_and_that_sees(
    trained: Path, inputs: Path, tmp_path: Path
) -> None:
    exported = export_run(
        trained, wanted=WantedExport(out=tmp_path / "out", merged=True), tell=lambda _: None
    )
    assert (
        max(comparison["difference"] for comparison in exported.facts["proof"]["comparisons"])
        < 1e-5
    )
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")
    rows = [json.loads(line) for line in (inputs / "eval.jsonl").read_text().splitlines()]
    right = 0
    for row in rows:
        seen = processor(images=[Image.open(inputs / row["images"][0])], return_tensors="pt")
        pads = "<|image_pad|>" * (int(seen["image_grid_thw"].prod()) // 4)
        text = f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(text, return_tensors="pt").input_ids
        kinds = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
        out = model.generate(
            input_ids=ids, mm_token_type_ids=kinds, max_new_tokens=6, do_sample=False, **seen
        )
        answer_text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        right += answer_text == row["messages"][1]["content"]
    assert right / len(rows) >= 0.9


NAMES = [
    pytest.param(n, marks=pytest.mark.slow if n == "qwen3_5_moe" else ()) for n in ARCHITECTURES
]


def build(
    folder: Path, name: str, vision: VisionConfig | None = None
) -> tuple[Learner, ImageProcessor]:
    """Return a model with random adapters everywhere that may learn, and its image processor."""
    save_seeing_model(folder, name, sharpen=3.0)
    settings = {"model": str(folder), "task": "vision_language", "data": {"train": "none"}}
    config = Config.model_validate(settings)
    processor = processor_of(DataSpec.of(config), load_tokenizer(config.model))
    assert processor is not None
    model = AutoModelForImageTextToText.from_pretrained(folder).train()
    frozen = vision_language.frozen_modules(model, vision or VisionConfig())
    model = add_lora(model, LoraConfig(r=4), task_type="CAUSAL_LM", seed=0, frozen=frozen)
    randomize_lora(model)
    route = padding_free.choose_attention(
        model, check=lambda m: vision_check.check_packed(m, processor)
    )
    assert bool(route.in_rows) == name.startswith("qwen3_5")
    return vision_language.with_images(model, route), processor


def some_rows(processor: ImageProcessor) -> tuple[list[Any], list[Any]]:
    """Return sequences with two images, none, and one, all but their beginnings trained."""
    draw = np.random.default_rng(3)
    rows = []
    seen = []
    token = processor.placeholder.token
    for sizes in ([(70, 60), (120, 80)], [], [(64, 130)]):
        pictures = []
        parts = [draw.integers(5, 300, 6)]
        for width, height in sizes:
            buffer = BytesIO()
            Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8)).save(buffer, "PNG")
            pictures.append(processor.process(buffer.getvalue()))
            features = len(pictures[-1].pixel_values) // processor.merge_size**2
            parts += [np.full(features, token), draw.integers(5, 300, 4)]
        ids = np.concatenate([*parts, draw.integers(5, 300, 9)]).astype(np.uint32)
        rows.append((ids, (ids != token) & (np.arange(len(ids)) > 5)))
        seen.append(pictures)
    return rows, seen


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_batch_has_the_gradient_of_plain_transformers(name: str, tmp_path: Path) -> None:
    vision = VisionConfig(freeze_vision_tower=False, freeze_projector=False)
    task, processor = build(tmp_path / "model", name, vision)
    rows, seen = some_rows(processor)
    lm = padding_free.unwrap(task.model)
    labels = sum(int(trained[1:].sum()) for _, trained in rows)
    padding_free.set_attention(lm, "eager")
    total = 0.0
    for row, pictures in zip(rows, seen, strict=True):
        batch = collate_pictured([row], [pictures], processor)
        logits = vision_language.TASK.plain_logits(task.model, batch)[batch.rows]
        loss = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum") / labels
        loss.backward()
        total += float(loss.detach())
    theirs = take_gradients(task.model)
    assert vision_check.check_packed(task.model, processor) < 1e-5
    padding_free.set_attention(lm, "padding_free")
    ours = vision_language.TASK.backward(task, collate_pictured(rows, seen, processor), 1 / labels)
    assert float(ours) == pytest.approx(total, abs=1e-5)
    mine = take_gradients(task.model)
    assert any("visual" in part for part in mine)
    together = torch.cat([mine[part].flatten() for part in theirs])
    apart = torch.cat([gradient.flatten() for gradient in theirs.values()])
    assert float((together - apart).norm() / apart.norm()) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_wrong_positions_are_noticed_before_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, processor = build(tmp_path / "model", name)
    monkeypatch.setattr(
        image_batches,
        "grid_positions",
        lambda is_image, _: np.tile(np.arange(len(is_image)), (3, 1)),
    )
    with pytest.raises(CannotRunPaddingFree, match="differs from one by one"):
        vision_check.check_packed(task.model, processor)


@pytest.mark.parametrize("name", NAMES)
def test_positions_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    task, processor = build(tmp_path / "model", name)
    rows, seen = some_rows(processor)
    for row, pictures in zip(rows, seen, strict=True):
        batch = collate_pictured([row], [pictures], processor)
        assert batch.pictures is not None
        theirs, _ = padding_free.backbone(padding_free.unwrap(task.model)).get_rope_index(  # type: ignore[operator]
            batch.input_ids[None],
            mm_token_type_ids=batch.pictures.is_image.int()[None],
            image_grid_thw=batch.pictures.grids,
        )
        assert torch.equal(theirs[:, 0], batch.pictures.positions)
    assert grid_positions(np.zeros(3, bool), []).tolist() == [[0, 1, 2]] * 3


HYBRID_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for item in message.content %}{% if item.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_packed_rows_of_a_hybrid_are_those_of_its_own_processor_one_by_one(
    name: str, tmp_path: Path
) -> None:
    task, processor = build(tmp_path, name, VisionConfig(**SEES_ANEW))
    facts = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {
        "chat_template": HYBRID_TEMPLATE
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    theirs = load_seeing(Qwen3VLProcessor, tmp_path, backend="pil")
    theirs.chat_template = HYBRID_TEMPLATE
    images = [
        paint(tmp_path / f"{n}.png", colour, n) for n, colour in enumerate(("red", "blue", "green"))
    ]
    records = [
        ("<image>\nand <image>?", images[:2]),
        ("no image at all", []),
        ("<image>what", images[2:]),
    ]
    config = Config.model_validate(
        {"model": str(tmp_path), "task": "vision_language", "data": {"train": "none"}}
    )
    encoder = VisionEncoder(Encoder(load_tokenizer(config.model)), processor)
    chats = [
        convert({"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "two three"}],
                 **({"images": list(map(str, pictures))} if pictures else {})})
        for text, pictures in records
    ]  # fmt: skip
    rows = [row for row in encoder.encode_batch(chats) if isinstance(row, Encoded)]
    labels = sum(row.labels for row in rows)
    total = 0.0
    padding_free.set_attention(task.lm, "eager")
    for (text, pictures), row in zip(records, rows, strict=True):
        pieces = [{"type": "text", "text": piece} for piece in text.split("<image>")]
        content = [
            part
            for n, piece in enumerate(pieces)
            for part in ([{"type": "image"}] if n else []) + [piece]
        ]
        turns = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "two three"},
        ]
        prompt = theirs.apply_chat_template(turns, tokenize=False)
        opened = [Image.open(image) for image in pictures] or None
        made = theirs(
            images=opened, text=[prompt], return_tensors="pt", return_mm_token_type_ids=True
        )
        assert made["input_ids"][0].tolist() == row.ids
        logits = task.lm(**made, use_cache=False).logits[0, :-1]
        wanted = torch.where(torch.tensor(row.trained), made["input_ids"][0], -100)[1:]
        loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") / labels
        loss.backward()
        total += float(loss.detach())
    alone = take_gradients(task.model)
    padding_free.set_attention(task.lm, "padding_free")
    reader = PictureReader(processor)
    seen = [reader.read(row.images) for row in rows]
    arrays = [(np.array(row.ids, np.uint32), np.array(row.trained)) for row in rows]
    batch = collate_pictured(arrays, seen, processor)
    assert float(vision_language.TASK.backward(task, batch, 1 / labels)) == pytest.approx(
        total, abs=1e-5
    )
    assert relative_error(take_gradients(task.model), alone) < 1e-5
    cuts = batch.cu_seqlens
    leaking = replace(batch, cu_seqlens=(0, *(cut + 1 for cut in cuts[1:-1]), cuts[-1]))
    with pytest.raises(CannotRunPaddingFree):  # one token that another row would see
        vision_language.TASK.backward(task, leaking, 1 / labels)


def learns(folder: Path, vision: dict[str, bool]) -> set[str]:
    """Return which parts have adapters: the `tower`, the `projector`, the `language` model."""
    task, _ = build(folder, "qwen3_vl", VisionConfig(**vision))
    names = [name for name, p in task.model.named_parameters() if p.requires_grad]
    kinds = {
        "projector": [name for name in names if "merger" in name],
        "tower": [name for name in names if "visual" in name and "merger" not in name],
        "language": [name for name in names if "language_model" in name],
    }
    assert sum(map(len, kinds.values())) == len(names)
    return {kind for kind, is_trained in kinds.items() if is_trained}


def test_what_sees_is_frozen_unless_a_switch_says_otherwise(tmp_path: Path) -> None:
    trained_kinds = {
        (tower, projector): learns(
            tmp_path / f"{tower}{projector}",
            {"freeze_vision_tower": tower, "freeze_projector": projector},
        )
        for tower in (True, False)
        for projector in (True, False)
    }
    assert trained_kinds == {
        (True, True): {"language"},
        (True, False): {"language", "projector"},
        (False, True): {"language", "tower"},
        (False, False): {"language", "projector", "tower"},
    }
