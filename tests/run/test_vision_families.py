"""Models whose images are no grids: their processors are used whole, and their own code runs one sequence at a time."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from dataclasses import replace
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Idefics3Processor,
    InternVLProcessor,
    LlavaOnevisionProcessor,
)
from transformers.utils import is_torchvision_available

from kubetune import errors
from kubetune.batching.image_batches import PictureReader, collate_pictured
from kubetune.config.schema import Config, LoraConfig, VisionConfig
from kubetune.data.reading.examples import Chat
from kubetune.data.reading.formats import convert
from kubetune.data.reading.messages import IMAGE_TAG
from kubetune.data.spec import DataSpec
from kubetune.data.text.encode import Encoded, Encoder
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.data.vision import whole_processor
from kubetune.data.vision.encode_images import VisionEncoder
from kubetune.data.vision.image_processor import ImageProcessor, Placeholder, processor_of
from kubetune.data.vision.whole_processor import WholeProcessor
from kubetune.distributed.process_group import World
from kubetune.models.acceleration import Workload, tune
from kubetune.models.adapters.lora import add_lora
from kubetune.models.model_spec import ModelSpec
from kubetune.plan.activations import goes_alone
from kubetune.plan.linears import Trainable, part_of, trained_by_part
from kubetune.plan.model_shapes import TOWERS, read_weights
from kubetune.plan.plan import make_plan
from kubetune.plan.rank_work import RankWork
from kubetune.result.forms.wanted import WantedExport
from kubetune.result.inference.answering import Sampling, answer, load_run
from kubetune.result.publishing.exporting import export_run
from kubetune.tasks import vision_language
from tests import toy
from tests.architectures import randomize_lora, relative_error, take_gradients
from tests.pictures import (
    ARCHITECTURES,
    FAMILIES,
    QUESTION,
    paint,
    save_family_model,
    save_seeing_model,
    write_questions,
)

CUT_VIDEOS_TOO: dict[str, Any] = {
    "internvl": InternVLProcessor,
    "llava_onevision": LlavaOnevisionProcessor,
}
# Models whose own processor loads only with torchvision or what hears, and is transformers' all the same.
WANT_LIBRARIES = ("pixtral", "mistral3", "gemma4")
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
    processor = processor_of(DataSpec.of(config), tokenizer)
    assert processor is not None
    return VisionEncoder(Encoder(tokenizer), processor)


def their_processor(model: Path, name: str) -> Any:
    """Return transformers' processor of a model. Some load only with libraries that are absent, which images do not need."""
    if name == "smolvlm":  # writes what Idefics3's does
        pictures = AutoImageProcessor.from_pretrained(model, backend="pil")
        return Idefics3Processor(pictures, AutoTokenizer.from_pretrained(model), image_seq_len=4)
    if kind := CUT_VIDEOS_TOO.get(name):
        still = type(
            kind.__name__,
            (kind,),
            {"get_attributes": classmethod(lambda _: ["image_processor", "tokenizer"])},
        )
        return still.from_pretrained(model, backend="pil")
    if name in WANT_LIBRARIES:
        return WholeProcessor(name, model, FAMILIES[name].image_token).theirs
    return AutoProcessor.from_pretrained(model, backend="pil")


def their_inputs(
    processor: Any, conversation: list[dict[str, str]], images: list[Path], **settings: Any
) -> Any:
    """Return what transformers makes of a conversation by a model's processor and template."""
    opened = [Image.open(image).convert("RGB") for image in images]
    if "suffix" in signature(type(processor).__call__).parameters:
        question, answer = (
            turn["content"].replace(f"{IMAGE_TAG}\n", IMAGE_TAG) for turn in conversation
        )
        return processor(images=opened, text=[question], suffix=[answer], **settings)
    turns = []
    for turn in conversation:
        pieces = [
            {"type": "text", "text": text}
            for text in turn["content"].replace(f"{IMAGE_TAG}\n", IMAGE_TAG).split(IMAGE_TAG)
        ]
        parts = [pieces[0], *(part for piece in pieces[1:] for part in ({"type": "image"}, piece))]
        turns.append(
            {"role": turn["role"], "content": [part for part in parts if part.get("text") != ""]}
        )
    asks = conversation[-1]["role"] == "user"
    text = processor.tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=asks
    )
    return processor(images=opened or None, text=[text], add_special_tokens=False, **settings)


def their_prompt(model: Path, name: str, images: list[Path]) -> list[int]:
    """Return what transformers makes of the conversation before its last answer."""
    return list(
        map(
            int,
            their_inputs(their_processor(model, name), CONVERSATION[:3], images)["input_ids"][0],
        )
    )


@pytest.mark.skipif(is_torchvision_available(), reason="nothing has to stand in for torchvision")
def test_a_processor_says_what_it_needs_if_pillow_cannot_take_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_family_model(tmp_path / "model", "pixtral", weights=False)
    monkeypatch.setattr(whole_processor, "find_spec", lambda name: None)
    with pytest.raises(errors.ModelError, match="PixtralProcessor requires the Torchvision"):
        _ = WholeProcessor("pixtral", model, FAMILIES["pixtral"].image_token).theirs


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].template])
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
    text = tokenizer.decode(
        [id for id, trained in zip(row.ids, row.trained, strict=True) if trained]
    )
    assert text.replace(" ", "") == "alisttwothree"
    assert tokenizer.backend.token_to_id(FAMILIES[name].image_token) in row.ids
    assert (
        sum(row.ids[n] in tokenizer.eos_ids for n, trained in enumerate(row.trained) if trained)
        == 2
    )
    for limit in range(2, len(row.ids)):
        short = encoder.cut(chat, row, limit)
        features = sum(
            sum(image.runs) for image in encoder._see([image.path for image in short.images])
        )
        assert (
            short.ids.count(tokenizer.backend.token_to_id(FAMILIES[name].image_token)) == features
        )


OLD_ARRAYS = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # PaliGemma's processor
QUICK = ("paligemma",)
# Bound in float32 of a model that amplifies rounding; calculated in float64, its gradients are 1e-7 apart.
ROUNDED = {"gemma4": 1e-4}
SEE_BOTH_WAYS = ("gemma3", "gemma4", "paligemma")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAMILIES]
)
@OLD_ARRAYS
def test_gradients_are_those_of_plain_transformers(name: str, tmp_path: Path) -> None:
    folder = save_family_model(tmp_path / "model", name)
    two = paint(tmp_path / "0.png", "red", 0), paint(tmp_path / "1.png", "blue", 7)
    asked = {"role": "user", "content": f"{IMAGE_TAG}{IMAGE_TAG}\nwhich is a list"}
    records = [([asked, CONVERSATION[3]], list(two)), (CONVERSATION[:2], [two[1]])]
    if FAMILIES[name].template:
        records += [
            (CONVERSATION, list(two)),
            ([{"role": "user", "content": "what is it"}, CONVERSATION[1]], []),
        ]
    encoder = encoder_of(folder)
    plain = AutoModelForImageTextToText.from_pretrained(folder).train()
    everything = VisionConfig(freeze_vision_tower=False, freeze_projector=False)
    frozen = vision_language.frozen_modules(plain, everything)
    model = add_lora(plain, LoraConfig(r=4), task_type="CAUSAL_LM", seed=0, frozen=frozen)
    randomize_lora(model)
    config = config_of(folder)
    learner = tune(
        vision_language.TASK.learner_of(model, ModelSpec.of(config)),
        config.training,
        Workload(0),
        World(device=torch.device("cpu")),
    )
    swapped = [module for module in model.modules() if "forward" in vars(module)]
    assert len(swapped) >= sum(hasattr(module, "lora_A") for module in model.modules())
    chats = [
        convert({"messages": messages, "images": [str(image) for image in pictures]})
        for messages, pictures in records
    ]
    rows = [row for row in encoder.encode_batch(chats) if isinstance(row, Encoded)]
    labels = sum(row.labels for row in rows)
    ours = 0.0
    reader = PictureReader(encoder._processor)
    for row in rows:
        arrays = np.array(row.ids, np.uint32), np.array(row.trained)
        batch = collate_pictured([arrays], [reader.read(row.images)], reader.processor)
        ours += float(vision_language.TASK.backward(learner, batch, 1 / labels))
    mine = take_gradients(model)
    assert any(f".{tower}." in part for part in mine for tower in TOWERS)

    def theirs(without: tuple[str, ...] = ()) -> tuple[float, dict[str, Tensor]]:
        total = 0.0
        processor = their_processor(folder, name)
        for (messages, pictures), row in zip(records, rows, strict=True):
            made = their_inputs(processor, messages, pictures, return_tensors="pt")
            assert made["input_ids"][0].tolist() == row.ids
            logits = learner.lm(
                **{key: made[key] for key in made if key not in ("labels", *without)}
            ).logits[0, :-1]
            wanted = torch.where(torch.tensor(row.trained), made["input_ids"][0], -100)
            assert torch.equal(made.get("labels", wanted[None])[0], wanted)
            loss = torch.nn.functional.cross_entropy(logits, wanted[1:], reduction="sum") / labels
            loss.backward()
            total += float(loss.detach())
        return total, take_gradients(model)

    for module in swapped:
        del module.forward
    learner.lm.set_attn_implementation("eager")
    total, gradients = theirs()
    assert ours == pytest.approx(total, abs=1e-5)
    assert relative_error(mine, gradients) < ROUNDED.get(name, 1e-5)
    if name in SEE_BOTH_WAYS:
        _, blind = theirs(without=("token_type_ids", "mm_token_type_ids"))
        assert relative_error(mine, blind) > 1e-3, (
            "an image, or a question, read in one direction is another model"
        )


@pytest.mark.parametrize("name", ["gemma3", "pixtral", "mistral3", *ARCHITECTURES])
def test_a_plan_knows_which_models_take_one_sequence_at_a_time(name: str, tmp_path: Path) -> None:
    folder = (
        save_family_model(tmp_path, name) if name in FAMILIES else save_seeing_model(tmp_path, name)
    )
    config = config_of(folder)
    weights = read_weights(str(folder), {})
    processor = processor_of(DataSpec.of(config), load_tokenizer(config.model))
    assert weights is not None
    assert processor is not None
    seeing = RankWork.of(config, make_plan(config))
    assert goes_alone(seeing, weights) is not processor.is_grid
    assert not goes_alone(replace(seeing, sees=False), weights)


def test_the_file_of_the_weights_is_let_go_of_where_a_tower_does_not_learn(tmp_path: Path) -> None:
    config = config_of(save_seeing_model(tmp_path, "qwen2_5_vl"))
    model = vision_language.TASK.build(
        ModelSpec.of(config), config.training, World(), Workload(0)
    ).model
    assert not all(parameter.requires_grad for parameter in model.parameters())
    for parameter in model.parameters():
        if parameter.requires_grad:  # as the optimizer does, which keeps them in memory of its own
            parameter.data = parameter.data.clone()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@OLD_ARRAYS
def test_a_model_that_reads_questions_in_both_directions_learns_one_answer(tmp_path: Path) -> None:
    encoder = encoder_of(save_family_model(tmp_path / "model", "paligemma", weights=False))
    image = [str(paint(tmp_path / "0.png", "red", 0))]
    several = convert({"messages": CONVERSATION, "images": image * 2})
    alone = convert({"messages": CONVERSATION[:2], "images": image})
    blind = convert({"messages": [{"role": "user", "content": "what is it"}, CONVERSATION[1]]})
    answers, row, question = encoder.encode_batch([several, alone, blind])
    assert "make a record of each answer" in str(answers)
    assert "has no image" in str(question)
    assert isinstance(row, Encoded)
    everything = VisionEncoder(
        Encoder(encoder._encoder.tokenizer, train_on="all"), encoder._processor
    )
    assert "data.train_on" in str(everything.encode_batch([alone])[0])


ADAPTERS = [None, {"r": 4}, {"r": 4, "target_modules": r".*(k_proj|linear_(fc)?1)"}]


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        *product(["pixtral", "qwen3_vl"], ADAPTERS),
        pytest.param("gemma4", None, marks=pytest.mark.slow),
    ],
)
def test_a_plan_foresees_what_is_trained_of_what_sees(
    name: str, lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    folder = (
        save_family_model(tmp_path, name) if name in FAMILIES else save_seeing_model(tmp_path, name)
    )
    weights = read_weights(str(folder), {})
    assert weights is not None
    for tower, projector in product((True, False), repeat=2):
        config = config_of(
            folder, lora=lora, vision={"freeze_vision_tower": tower, "freeze_projector": projector}
        )
        model = AutoModelForImageTextToText.from_pretrained(folder)
        frozen = vision_language.frozen_modules(model, config.vision)
        if config.lora is not None:
            model = add_lora(model, config.lora, task_type="CAUSAL_LM", seed=0, frozen=frozen)
        trained = Counter[str]()
        for part, parameter in model.named_parameters():
            learns = (
                parameter.requires_grad
                if lora
                else frozen is None or re.fullmatch(frozen, part) is None
            )
            trained[part_of(part)] += parameter.numel() if learns else 0
        assert trained_by_part(Trainable(config.lora, config.sight), weights) == +trained
        if lora is None:
            assert (trained["vision tower"] == 0, trained["projector"] == 0) == (tower, projector)


def test_a_rule_of_logits_that_is_not_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_family_model(tmp_path / "model", "llava")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    vision_language.TASK.learner_of(model, ModelSpec.of(config_of(folder)))
    stock = type(model).forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock(self, *args, **kwargs)
        out.logits = out.logits / 2
        return out

    monkeypatch.setattr(type(model), "forward", scaled)
    with pytest.raises(errors.ModelError, match="rule that is not known"):
        vision_language.TASK.learner_of(model, ModelSpec.of(config_of(folder)))


def test_a_budget_that_such_a_processor_does_not_keep_is_refused(tmp_path: Path) -> None:
    model = save_family_model(tmp_path / "model", "llava", weights=False)
    chat = convert(
        {"messages": CONVERSATION[:2], "images": [str(paint(tmp_path / "0.png", "red", 0))]}
    )
    with pytest.raises(
        errors.ConfigError, match=r"images of .* have the size that its own processor"
    ):
        encoder_of(model, vision={"image_max_tokens": 64}).encode_batch([chat])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_learns_answers_and_is_exported(name: str, tmp_path: Path) -> None:
    save_family_model(tmp_path / "model", name)
    write_questions(tmp_path, "train", 96, 1, text_rows=8 if FAMILIES[name].template else 0)
    write_questions(tmp_path, "eval", 16, 2)
    epochs = 3 if name == "gemma4" else 2
    training = {"global_batch_size": 8, "per_device_train_batch_size": 8, "num_train_epochs": epochs, "eval_steps": 13,
                "save_steps": 13}  # fmt: skip
    data = {
        "max_length": 256,
        "train": str(tmp_path / "train.jsonl"),
        "eval": str(tmp_path / "eval.jsonl"),
    }
    config = toy.make_config(tmp_path, training, task="vision_language", data=data, lora={"r": 16})
    run_dir = toy.finished(tmp_path / "run", config)
    assert toy.losses(run_dir)[-1] < toy.losses(run_dir)[0] - 1
    log = toy.log_of(run_dir)
    assert "its images are no grids of patches" in log

    loaded = load_run(run_dir)
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    images = [[str(tmp_path / path) for path in row["images"]] for row in rows]
    answers = answer(loaded, [QUESTION] * len(rows), Sampling(max_new_tokens=6), images=images)
    right = sum(
        text.strip() == row["messages"][1]["content"]
        for text, row in zip(answers, rows, strict=True)
    )
    assert right >= len(rows) // 2
    if FAMILIES[name].template == "":
        with pytest.raises(errors.DataError, match="has no image"):
            answer(loaded, [QUESTION], Sampling(max_new_tokens=1))
    both = [
        f"{IMAGE_TAG}{IMAGE_TAG}{QUESTION}"
    ]  # as many features as tokens for two images too, or this raises
    assert (
        len(answer(loaded, both, Sampling(max_new_tokens=1), images=[images[0] + images[1]])) == 1
    )

    exported = export_run(
        run_dir, wanted=WantedExport(out=tmp_path / "out", merged=True), tell=lambda _: None
    )
    assert (
        max(comparison["difference"] for comparison in exported.facts["proof"]["comparisons"])
        < 1e-5
    )
    AutoModelForImageTextToText.from_pretrained(tmp_path / "out")


SEES = {"vision": {"freeze_vision_tower": False, "freeze_projector": False}}
ALL: dict[str, Any] = {"lora": None, **SEES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallelism", "sections"),
    [("idefics3", "ddp", {}), ("llava_next", "fsdp", ALL), ("gemma4", "fsdp", ALL)],
)
def test_two_ranks_train_as_one(
    name: str, parallelism: str, sections: dict[str, Any], tmp_path: Path
) -> None:
    save_family_model(tmp_path / "model", name)
    write_questions(tmp_path, "train", 8, 1, text_rows=8)
    training = {
        "global_batch_size": 8,
        "max_steps": 2,
        "eval_steps": 2,
        "save_steps": 2,
        "learning_rate": 1e-3,
    }
    data = {"max_length": 256, "train": str(tmp_path / "train.jsonl"), "eval": 0.2}
    training |= {"parallelism": parallelism}
    config = toy.make_config(tmp_path, training, task="vision_language", data=data, **sections)
    alone, two = (toy.finished(tmp_path / str(world), config, world) for world in (1, 2))
    assert toy.losses(two) == pytest.approx(toy.losses(alone), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4", "paligemma"])
def test_a_stopped_run_ends_bit_for_bit_as_one_that_was_not(name: str, tmp_path: Path) -> None:
    save_family_model(tmp_path / "model", name)
    write_questions(tmp_path, "train", 12, 1)
    training = {"global_batch_size": 4, "max_steps": 4, "eval_steps": 2, "save_steps": 2}
    data = {"max_length": 256, "train": str(tmp_path / "train.jsonl"), "eval": 0.2}
    lora = {"r": 4, "dropout": 0.1}
    config = toy.make_config(
        tmp_path, training, task="vision_language", data=data, lora=lora, **SEES
    )
    cut = toy.make_run(tmp_path / "cut", config)
    assert toy.train(cut, 1, {"KUBETUNE_FAULT": f"signal {signal.SIGTERM.value}:step:3"}) == [
        errors.PREEMPTED
    ]
    assert toy.train(cut) == [0]
    assert toy.digests(cut) == toy.digests(toy.finished(tmp_path / "whole", config))


def test_an_image_processor_that_counts_rows_is_left_to_its_own_code(tmp_path: Path) -> None:
    """HYV4-VL's cuts a grid too, and writes a token after each row of it."""
    if "hy_v4_vl" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no hy_v4_vl")
    for name in ("HYV4VLImageProcessor", "Qwen2VLImageProcessor"):
        folder = tmp_path / name
        folder.mkdir()
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps({"image_processor_type": name}))
        placeholder = Placeholder("<image>", 5, None)
        processor = ImageProcessor(name, {file.name: file}, VisionConfig(), placeholder)
        assert processor.is_grid is (name == "Qwen2VLImageProcessor")
