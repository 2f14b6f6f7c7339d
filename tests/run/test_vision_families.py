"""Models whose images are no grids: their processors are used whole, and their own code runs one sequence at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Idefics3Processor,
    InternVLProcessor,
    LlavaOnevisionProcessor,
)

from kubetune import errors
from kubetune.config.schema import Config
from kubetune.data.reading.formats import IMAGE_TAG, Chat, convert
from kubetune.data.text.encode import Encoded, Encoder
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.data.vision.encode import VisionEncoder
from kubetune.data.vision.image_processor import load_image_processor
from kubetune.inference.generate import Sampling, answer, load_run
from kubetune.publishing.export import export_run
from tests import toy
from tests.pictures import FAMILIES, QUESTION, paint, save_family_model, write_questions

CUT_VIDEOS_TOO: dict[str, Any] = {"internvl": InternVLProcessor, "llava_onevision": LlavaOnevisionProcessor}
CONVERSATION = [
    {"role": "user", "content": f"{IMAGE_TAG}\nwhat is it"},
    {"role": "assistant", "content": "a list"},
    {"role": "user", "content": f"and this one {IMAGE_TAG}"},
    {"role": "assistant", "content": "two three"},
]


def config_of(model: Path, **sections: Any) -> Config:
    return Config.model_validate(
        {"model": str(model), "task": "vision_language", "data": {"train": "none"}, **sections}
    )


def encoder_of(model: Path, **sections: Any) -> VisionEncoder:
    config = config_of(model, **sections)
    tokenizer = load_tokenizer(config.model)
    processor = load_image_processor(config, tokenizer)
    assert processor is not None
    return VisionEncoder(Encoder(tokenizer), processor)


def their_prompt(model: Path, name: str, images: list[Path]) -> list[int]:
    """What transformers makes of the conversation before its last answer, by the model's processor and template."""
    processor: Any
    if name == "smolvlm":  # loads only with torchvision, and writes what Idefics3's does
        pictures = AutoImageProcessor.from_pretrained(model, backend="pil")
        processor = Idefics3Processor(pictures, AutoTokenizer.from_pretrained(model), image_seq_len=4)
    elif kind := CUT_VIDEOS_TOO.get(name):  # loads only with torchvision, by which it cuts videos alone
        still = type(
            kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: ["image_processor", "tokenizer"])}
        )
        processor = still.from_pretrained(model, backend="pil")
    else:
        processor = AutoProcessor.from_pretrained(model, backend="pil")
    turns = []
    for turn in CONVERSATION[:3]:
        pieces = [
            {"type": "text", "text": text}
            for text in turn["content"].replace(f"{IMAGE_TAG}\n", IMAGE_TAG).split(IMAGE_TAG)
        ]
        parts = [pieces[0], *(part for piece in pieces[1:] for part in ({"type": "image"}, piece))]
        turns.append({"role": turn["role"], "content": [part for part in parts if part.get("text") != ""]})
    text = processor.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    opened = [Image.open(image).convert("RGB") for image in images]
    ids: list[int] = processor(images=opened, text=[text], add_special_tokens=False)["input_ids"][0]
    return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_are_those_of_the_model_s_own_processor(name: str, tmp_path: Path) -> None:
    model = save_family_model(tmp_path / "model", name, weights=False)
    images = [paint(tmp_path / "0.png", "red", 0), paint(tmp_path / "1.png", "blue", 7)]
    encoder = encoder_of(model)
    chat = convert({"messages": CONVERSATION, "images": [str(image) for image in images]})
    assert isinstance(chat, Chat)
    [row] = encoder.encode_batch([chat])
    assert isinstance(row, Encoded), row
    asked = convert({"messages": CONVERSATION[:3], "images": [str(image) for image in images]})
    assert isinstance(asked, Chat)
    assert encoder.encode_prompt(asked).ids == their_prompt(model, name, images)
    tokenizer = load_tokenizer(config_of(model).model)
    said = tokenizer.decode([id for id, trained in zip(row.ids, row.trained, strict=True) if trained])
    assert said.replace(" ", "") == "alisttwothree"
    assert tokenizer.backend.token_to_id(FAMILIES[name].image_token) in row.ids
    assert sum(row.ids[n] in tokenizer.eos_ids for n, trained in enumerate(row.trained) if trained) == 2
    for limit in range(2, len(row.ids)):
        short = encoder.cut(chat, row, limit)
        features = sum(sum(image.runs) for image in encoder._see([image.path for image in short.images]))
        assert short.ids.count(tokenizer.backend.token_to_id(FAMILIES[name].image_token)) == features


def test_a_budget_that_such_a_processor_does_not_keep_is_refused(tmp_path: Path) -> None:
    model = save_family_model(tmp_path / "model", "llava", weights=False)
    chat = convert({"messages": CONVERSATION[:2], "images": [str(paint(tmp_path / "0.png", "red", 0))]})
    with pytest.raises(errors.ConfigError, match=r"images of .* have the size that its own processor"):
        encoder_of(model, vision={"image_max_tokens": 64}).encode_batch([chat])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_learns_answers_and_is_exported(name: str, tmp_path: Path) -> None:
    save_family_model(tmp_path / "model", name)
    write_questions(tmp_path, "train", 96, 1, text_rows=8)
    write_questions(tmp_path, "eval", 16, 2)
    training = {"global_batch_size": 8, "per_device_train_batch_size": 8, "num_train_epochs": 2, "eval_steps": 13,
                "save_steps": 13}  # fmt: skip
    data = {"max_length": 256, "train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "eval.jsonl")}
    config = toy.make_config(tmp_path, training, task="vision_language", data=data, lora={"r": 16})
    run_dir = toy.finished(tmp_path / "run", config)
    assert toy.losses(run_dir)[-1] < toy.losses(run_dir)[0] - 1
    log = (run_dir / "logs" / "rank-0.log").read_text()
    assert "its images are no grids of patches" in log

    loaded = load_run(run_dir)
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    images = [[str(tmp_path / path) for path in row["images"]] for row in rows]
    said = answer(loaded, [QUESTION] * len(rows), Sampling(max_new_tokens=6), images=images)
    right = sum(text.strip() == row["messages"][1]["content"] for text, row in zip(said, rows, strict=True))
    assert right >= len(rows) // 2
    both = [f"{IMAGE_TAG}{IMAGE_TAG}{QUESTION}"]  # as many features as tokens for two images too, or this raises
    assert len(answer(loaded, both, Sampling(max_new_tokens=1), images=[images[0] + images[1]])) == 1

    found = export_run(run_dir, out=tmp_path / "out", tell=lambda _: None, merged=True)
    assert max(one["difference"] for one in found.facts["proof"]["comparisons"]) < 1e-5
    AutoModelForImageTextToText.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    save_family_model(tmp_path / "model", "idefics3")
    write_questions(tmp_path, "train", 8, 1, text_rows=8)
    training = {"global_batch_size": 8, "max_steps": 2, "eval_steps": 2, "save_steps": 2, "learning_rate": 1e-3}
    data = {"max_length": 256, "train": str(tmp_path / "train.jsonl"), "eval": 0.2}
    config = toy.make_config(tmp_path, training, task="vision_language", data=data)
    one, two = (toy.finished(tmp_path / str(world), config, world) for world in (1, 2))
    assert toy.losses(two) == pytest.approx(toy.losses(one), abs=1e-5)
