"""Pairs of answers about images: every tool's spelling of one, rows of both answers, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kubetune.cli import main
from kubetune.config.schema import Config
from kubetune.data.inspect.check import check
from kubetune.data.inspect.estimate import estimate_lengths
from kubetune.data.prepared.prepare import Prepared, prepare
from kubetune.data.reading.examples import Chat, Preference
from kubetune.data.reading.formats import convert
from kubetune.data.spec import DataSpec
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.errors import DataError
from tests.pictures import paint, save_family_model, save_seeing_model

TAGGED = {"role": "user", "content": "<image>why?"}
PARTS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "why?"}]}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("yes", "no"))
SPOKEN = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in (GOOD, BAD)]
HUMAN, GPT, BOT = (
    {"from": who, "value": text}
    for who, text in (("human", "<image>why?"), ("gpt", "yes"), ("gpt", "no"))
)
IMAGE = "images/a.png"

SPELLINGS: dict[str, dict[str, Any]] = {
    "trl": {"prompt": [PARTS], "chosen": [SPOKEN[0]], "rejected": [SPOKEN[1]], "images": [IMAGE]},
    "trl, one image": {"prompt": [TAGGED], "chosen": [GOOD], "rejected": [BAD], "image": IMAGE},
    "trl, implicit prompt": {"chosen": [PARTS, GOOD], "rejected": [PARTS, BAD], "images": [IMAGE]},
    "trl, in its messages": {
        "prompt": [{**PARTS, "content": [{"type": "image", "image": IMAGE}, PARTS["content"][1]]}],
        "chosen": [GOOD],
        "rejected": [BAD],
    },
    "llama_factory": {"conversations": [HUMAN], "chosen": GPT, "rejected": BOT, "images": [IMAGE]},
    "llama_factory, alpaca": {
        "instruction": "<image>why?", "input": "", "chosen": "yes", "rejected": "no", "images": [IMAGE],
    },
    "ms_swift": {"messages": [TAGGED, GOOD], "rejected_response": "no", "images": [IMAGE]},
    "ms_swift, the images twice": {
        "messages": [TAGGED, GOOD], "rejected_messages": [TAGGED, BAD], "images": [IMAGE], "rejected_images": [IMAGE],
    },
    "axolotl": {"messages": [PARTS], "chosen": GOOD, "rejected": BAD, "images": [IMAGE]},
    "rlaif-v": {"question": "<image>why?", "chosen": "yes", "rejected": "no", "image": {"path": IMAGE, "bytes": None}},
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_a_pair_about_an_image_is_one_pair(name: str) -> None:
    asked = {"role": "user", "content": "<image>why?"}
    answers = (Chat((asked, answer), context=1, images=(IMAGE,)) for answer in (GOOD, BAD))
    assert convert(SPELLINGS[name], kind="pair") == Preference(*answers)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("model"), "qwen3_vl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    paint(tmp_path / IMAGE, "red", 1)
    paint(tmp_path / "images/b.png", "blue", 2)
    return tmp_path


def config_of(
    model: Path, folder: Path, records: list[dict[str, Any]], loss: str = "dpo", **data: Any
) -> Config:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    section = {
        "train": str(folder / "pairs.jsonl"),
        "max_length": 256,
        "cache": str(folder / "cache"),
        "num_proc": 1,
    }
    preference = {"images": True, "loss": loss}
    return Config.model_validate(
        {
            "model": str(model),
            "task": "preference",
            "preference": preference,
            "data": {**section, **data},
        }
    )


def prepared(
    model: Path, folder: Path, records: list[dict[str, Any]], loss: str = "dpo", **data: Any
) -> Prepared:
    return prepare(config_of(model, folder, records, loss, **data))


TEXT = {"prompt": [{"role": "user", "content": "a b c"}], "chosen": [GOOD], "rejected": [BAD]}
TWO = {
    "prompt": [TAGGED, GOOD, TAGGED],
    "chosen": [{**GOOD, "content": "a b c"}],
    "rejected": [BAD],
}


@pytest.mark.parametrize("family", ["qwen3_vl", "llava"])
def test_both_answers_stand_behind_the_prompt_with_its_images(
    family: str, model: Path, folder: Path
) -> None:
    if family == "llava":
        model = save_family_model(folder / "model", family, weights=False)
    records = [SPELLINGS["trl"], TEXT, TWO | {"images": [IMAGE, "images/b.png"]}]
    rows = prepared(model, folder, records).train
    alone = [
        {**r, "messages": [*r["prompt"], *r["chosen"]], "chosen": None, "rejected": None}
        for r in records
    ]
    seeing = config_of(model, folder, alone).model_copy(update={"task": "vision_language"})
    expected = prepare(seeing).train
    assert rows.processor is not None
    token = rows.processor.placeholder.token
    for index in range(3):
        (ids, trained), (other, is_label) = rows.sequences(index)
        assert ids.tolist() == expected.row(index)[0].tolist()
        first = int(trained.argmax())
        assert ids[:first].tolist() == other[:first].tolist()
        assert not is_label[:first].any()
        assert (ids == token).sum() == (other == token).sum() == (ids[:first] == token).sum()
        assert (index != 1) == (token in ids)
        assert [Path(image.path).name for image in rows.images(index)] == [
            ["a.png"],
            [],
            ["a.png", "b.png"],
        ][index]


def test_answers_of_others_are_set_behind_the_images_of_a_question(
    model: Path, folder: Path
) -> None:
    judged = [
        {"prompt": [TAGGED], "completion": [answer], "label": answer is GOOD, "images": [image]}
        for answer, image in ((GOOD, IMAGE), (BAD, "images/b.png"))
    ]
    rows = prepared(model, folder, judged, "kto").train
    for index in range(2):
        (ids, trained), (other, _) = rows.sequences(index)
        first = int(trained.argmax())
        assert ids[:first].tolist() == other[:first].tolist()
        others, is_theirs = rows.row(1 - index)
        assert other[first:].tolist() == others[int(is_theirs.argmax()) :].tolist()
        assert len(rows.images(index)) == 1


def test_what_is_too_long_loses_its_answer_and_not_half_an_image(model: Path, folder: Path) -> None:
    whole = prepared(model, folder, [SPELLINGS["trl"]]).train
    length = len(whole.sequences(0)[0][0])
    wordy = {**SPELLINGS["trl"], "chosen": [{**GOOD, "content": "a b c d e f g h"}]}
    cut = prepared(model, folder, [wordy, TEXT], max_length=length, overlong="truncate")
    (ids, trained), (other, _) = cut.train.sequences(0)
    assert len(ids) == length
    assert trained.sum() > 1
    assert other.tolist() == whole.sequences(0)[1][0][:length].tolist()
    assert len(cut.train.images(0)) == 1
    with pytest.raises(DataError, match="1 with nothing to train on"):
        prepared(model, folder, [SPELLINGS["trl"]], max_length=12, overlong="truncate")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image in an answer": (
        {
            "chosen": [TAGGED, GOOD, TAGGED, GOOD],
            "rejected": [TAGGED, BAD, TAGGED, BAD],
            "images": [IMAGE] * 2,
        },
        "has an image in an answer; expected all images in the prompt",
    ),
    "other images for the rejected": (
        {**SPELLINGS["ms_swift"], "rejected_images": ["images/b.png"]},
        "has `rejected_images` other than `images`",
    ),
    "another image for the rejected": (
        {**SPELLINGS["rlaif-v"], "rejected_image": "images/b.png"},
        "has `rejected_image` other than `image`",
    ),
    "an image that is not there": (
        {**SPELLINGS["trl"], "images": ["images/none.png"]},
        "none.png cannot be read",
    ),
    "fewer images than tags": (
        {**SPELLINGS["ms_swift"], "images": []},
        "has 1 <image> tags for 0 images",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused_with_its_line(
    name: str, model: Path, folder: Path
) -> None:
    record, words = REFUSED[name]
    with pytest.raises(
        DataError, match=rf"pairs\.jsonl:2: {re.escape(words)}|pairs\.jsonl:2: .*{re.escape(words)}"
    ):
        prepared(model, folder, [TEXT, record])


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("preference", r"set `preference\.images: true`"),
        ("reward_model", "a reward model scores only texts"),
    ],
)
def test_images_are_not_dropped_where_nothing_sees_them(
    task: str, words: str, model: Path, folder: Path
) -> None:
    config = config_of(model, folder, [SPELLINGS["trl"]])
    blind = config.model_dump(exclude_unset=True) | {"task": task, "preference": {}}
    with pytest.raises(
        DataError, match=rf"pairs\.jsonl:1: has images, which a language model cannot see; {words}"
    ):
        prepare(Config.model_validate(blind))


def test_an_image_that_changed_asks_the_reference_anew(model: Path, folder: Path) -> None:
    digests = []
    for seed in (1, 5):
        paint(folder / IMAGE, "red", seed)
        digests.append(
            prepared(
                model, folder, [SPELLINGS["trl"]], cache=str(folder / f"cache-{seed}")
            ).train.image_digest
        )
    assert len(set(digests)) == 2


def test_a_check_shows_both_answers_with_their_image(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(model, folder, [SPELLINGS["trl"], TEXT])
    report = check(config, load_tokenizer(config.model), samples=2)
    assert report.ok
    assert report.sample_answers == ["chosen", "rejected"] * 2
    texts = ["".join(text for text, _ in sample) for sample in report.samples]
    assert ["<|vision_start|>" in text for text in texts] == [True, True, False, False]
    assert report.stats["train"]["images"] == 1
    overrides = [
        "preference.images=true",
        "task=preference",
        f"data.cache={folder / 'cache'}",
        "data.num_proc=1",
    ]
    page = folder / "data.html"
    command = [
        "data",
        "check",
        str(folder / "pairs.jsonl"),
        "--model",
        str(model),
        "--html",
        str(page),
        *overrides,
    ]
    assert main(command) == 0
    assert "data:image/jpeg;base64," in page.read_text()
    capsys.readouterr()
    assert main(["data", "check", str(folder / "pairs.jsonl")]) == 0
    assert "with images" in capsys.readouterr().out
    sampled = estimate_lengths(DataSpec.of(config), config.training, {})
    rows = prepare(config).train
    assert sampled is not None
    assert sampled.tokens_per_row == pytest.approx(np.mean(rows.lengths))


@pytest.mark.parametrize("to", ["preference", "judged"])
def test_conversion_keeps_the_images(to: str, folder: Path) -> None:
    (folder / "pairs.jsonl").write_text(json.dumps(SPELLINGS["rlaif-v"]) + "\n")
    output = folder / "elsewhere" / "out.jsonl"
    output.parent.mkdir()
    assert (
        main(["data", "convert", str(folder / "pairs.jsonl"), "--to", to, "-o", str(output)]) == 0
    )
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["images"] for record in written] == [[str(folder / IMAGE)]] * (
        1 if to == "preference" else 2
    )
    again = convert(written[0], kind="pair" if to == "preference" else "judged")
    assert "<image>why?" in str(again)
