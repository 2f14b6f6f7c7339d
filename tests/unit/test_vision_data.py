"""Rows with images: as many tokens as features, none of them a label, and a clear word for what cannot be used."""

from __future__ import annotations

import json
import random
import shutil
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor

from kubetune.batching.feed import batch_of
from kubetune.batching.image_batches import picture_reader
from kubetune.cli import main
from kubetune.config.schema import Config
from kubetune.data.inspect.check import check
from kubetune.data.inspect.estimate import estimate_lengths
from kubetune.data.prepared.fingerprint import fingerprint
from kubetune.data.prepared.prepare import prepare
from kubetune.data.prepared.row_writer import PICTURED_FILES
from kubetune.data.reading.examples import Chat
from kubetune.data.reading.formats import convert
from kubetune.data.reading.images import data_address, verify_image
from kubetune.data.spec import DataSpec
from kubetune.data.text.encode import Encoded, Encoder
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.data.vision.encode_images import VisionEncoder
from kubetune.data.vision.image_processor import ImageProcessor, processor_of, write_limits
from kubetune.errors import ConfigError, DataError, ModelError
from tests.architectures import save_model
from tests.pictures import COLOURS, paint, save_seeing_model, write_questions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("model"), "qwen3_vl")


def make_config(model: Path, folder: Path, **sections: Any) -> Config:
    data = {
        "train": str(folder / "train.jsonl"),
        "max_length": 256,
        "cache": str(folder / "cache"),
        "num_proc": 1,
    }
    settings = {"model": str(model), "task": "vision_language", **sections}
    return Config.model_validate({**settings, "data": {**data, **sections.get("data", {})}})


def processor_for(config: Config) -> ImageProcessor:
    processor = processor_of(DataSpec.of(config), load_tokenizer(config.model))
    assert processor is not None
    return processor


def encoder_of(config: Config, **settings: Any) -> VisionEncoder:
    return VisionEncoder(Encoder(load_tokenizer(config.model), **settings), processor_for(config))


def chat(*turns: str, images: list[Path] | None = None) -> Chat:
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    chat_seen = convert({"messages": messages, "images": [str(image) for image in images or []]})
    assert isinstance(chat_seen, Chat)
    return chat_seen


def encode(encoder: VisionEncoder, example: Chat) -> Encoded:
    [row] = encoder.encode_batch([example])
    assert isinstance(row, Encoded), row
    return row


@pytest.mark.parametrize(
    "vision", [{}, {"image_max_tokens": 40}, {"image_min_tokens": 30, "image_max_tokens": 50}]
)
def test_an_image_has_as_many_tokens_as_the_tower_makes_features(
    model: Path, tmp_path: Path, vision: dict[str, int]
) -> None:
    processor = processor_for(make_config(model, tmp_path, vision=vision))
    draw = random.Random(0)
    for number in range(12):
        file = tmp_path / f"{number}.png"
        Image.new("RGB", (draw.randint(3, 700), draw.randint(4, 500)), (number, 9, 9)).save(file)
        tokens = processor.measure(verify_image(file))
        picture = processor.process(file.read_bytes())
        assert len(picture.pixel_values) == np.prod(picture.grid) == tokens * 4
        assert vision.get("image_min_tokens", 4) <= tokens <= vision.get("image_max_tokens", 1024)


@pytest.mark.parametrize("old", [{}, {"min_pixels": 3136, "max_pixels": 12845056}])
def test_the_image_processor_of_an_export_has_the_limits_of_the_run(
    model: Path, tmp_path: Path, old: dict[str, int]
) -> None:
    base = tmp_path / "base"
    out = tmp_path / "out"
    shutil.copytree(model, base)
    facts = json.loads((base / "preprocessor_config.json").read_text()) | old
    (base / "preprocessor_config.json").write_text(json.dumps(facts))
    config = make_config(base, tmp_path, vision={"image_min_tokens": 30, "image_max_tokens": 50})
    load_tokenizer(config.model).save(out)
    assert write_limits(processor_for(config), out) == ["preprocessor_config.json"]
    theirs = AutoImageProcessor.from_pretrained(out, backend="pil")
    for number, size in enumerate([(700, 500), (20, 30), (210, 190)]):
        file = tmp_path / f"{number}.png"
        Image.new("RGB", size, (number, 9, 9)).save(file)
        grid = theirs(images=[Image.open(file)], return_tensors="np")["image_grid_thw"][0]
        assert int(grid.prod()) // 4 == processor_for(config).measure(verify_image(file))


def test_a_photograph_held_sideways_is_turned(model: Path, tmp_path: Path) -> None:
    processor = processor_for(make_config(model, tmp_path))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (320, 160)).save(tmp_path / "sideways.jpg", exif=exif)
    assert processor.process((tmp_path / "sideways.jpg").read_bytes()).grid == (1, 20, 10)
    assert processor.measure(verify_image(tmp_path / "sideways.jpg")) == 50


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_tokens_of_images_are_never_labels(model: Path, tmp_path: Path, train_on: Any) -> None:
    config = make_config(model, tmp_path)
    token = processor_for(config).placeholder.token
    files = [paint(tmp_path / f"{colour}.png", colour, seed) for seed, colour in enumerate(COLOURS)]
    row = encode(
        encoder_of(config, train_on=train_on), chat("<image> and <image>?", "no", images=files[:2])
    )
    tokens = [processor_for(config).measure(verify_image(file)) for file in files[:2]]
    assert row.ids.count(token) == sum(tokens)
    assert not any(trained for id, trained in zip(row.ids, row.trained, strict=True) if id == token)
    assert any(row.trained)
    assert [Path(image.path).name for image in row.images] == ["red.png", "green.png"]
    runs = "".join("i" if id == token else " " for id in row.ids).split()
    assert [len(run) for run in runs] == tokens


def test_a_text_that_holds_the_placeholder_itself_is_refused(model: Path, tmp_path: Path) -> None:
    encoder = encoder_of(make_config(model, tmp_path))
    [row] = encoder.encode_batch([chat("say <|image_pad|>", "no")])
    assert isinstance(row, str)
    assert "0 images, but its text makes 1 of the tokens" in row


def test_a_row_is_never_cut_through_an_image(model: Path, tmp_path: Path) -> None:
    config = make_config(model, tmp_path)
    encoder = encoder_of(config)
    placeholder = processor_for(config).placeholder
    images = [paint(tmp_path / "a.png", "red", 1), paint(tmp_path / "b.png", "blue", 2)]
    example = chat("<image>what", "red", "<image>and", "blue", images=images)
    row = encode(encoder, example)
    counts = [processor_for(config).measure(verify_image(image)) for image in images]
    for limit in range(1, len(row.ids)):
        short = encoder.cut(example, row, limit)
        assert len(short.ids) == len(short.trained) <= limit
        assert short.ids.count(placeholder.token) == sum(counts[: len(short.images)])
        assert (
            not short.ids
            or short.ids[-1] != placeholder.start
            or row.ids[limit] != placeholder.token
        )


def test_prepared_rows_come_back_with_their_images(model: Path, tmp_path: Path) -> None:
    write_questions(tmp_path, "train", 5, text_rows=3)
    rows = prepare(make_config(model, tmp_path)).train
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for index, line in enumerate(lines):
        paths = [image.path for image in rows.images(index)]
        assert paths == [str(tmp_path / path) for path in line.get("images", [])]
    batch = batch_of(rows, np.arange(len(rows)), picture_reader(rows))
    assert batch.pictures is not None
    assert batch.pictures.grids is not None
    assert len(batch.pictures.grids) == 5
    assert int(batch.pictures.is_image.sum()) == int(batch.pictures.grids.prod(1).sum()) // 4
    assert rows.lengths.tolist() == np.diff(batch.cu_seqlens).tolist()
    text = next(i for i, line in enumerate(lines) if "images" not in line)
    alone = batch_of(rows, np.array([text]), picture_reader(rows)).pictures
    assert alone is not None
    assert alone.pixel_values is None


def test_no_bit_of_the_table_of_images_changes_in_silence(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_questions(tmp_path, "train", 3)
    config = make_config(model, tmp_path)
    folder = prepare(config).path
    for name in PICTURED_FILES.values():
        content = (folder / "train" / name).read_bytes()
        (folder / "train" / name).write_bytes(content[:-1] + bytes([content[-1] ^ 64]))
        caplog.clear()
        assert (prepare(config).path / "train" / name).read_bytes() == content
        assert f"has damage in train/{name} (its checksum differs)" in caplog.text


def test_an_image_that_changed_since_is_noticed(model: Path, tmp_path: Path) -> None:
    write_questions(tmp_path, "train", 2)
    rows = prepare(make_config(model, tmp_path)).train
    file = Path(rows.images(0)[0].path)
    paint(file, "yellow", 77)
    with pytest.raises(DataError, match="has changed since the data were prepared"):
        batch_of(rows, np.array([0]), picture_reader(rows))
    file.unlink()
    with pytest.raises(DataError, match="was there when the data were prepared"):
        batch_of(rows, np.array([0]), picture_reader(rows))


def test_bad_images_are_told_of_with_file_and_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_questions(tmp_path, "train", 8)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    files = [tmp_path / row["images"][0] for row in rows]
    files[0].write_bytes(files[0].read_bytes()[:-40])
    files[1].unlink()
    files[2].write_bytes(b"GIF? no.")
    Image.new("1", (9000, 9000)).save(files[3])
    Image.new("L", (2500, 3)).save(files[4])
    for row, content in zip(rows[5:7], (b"GIF? no.", files[5].read_bytes()[:-40]), strict=True):
        row["images"] = ["data:image/jpeg;base64," + b64encode(content).decode()]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(model, tmp_path)
    report = check(config, load_tokenizer(config.model))
    assert report.problems.total == 7
    words = ("cannot be decoded", "No such file", "is no image of JPEG", "81,000,000|9,000 × 9,000", "200 to 1",
             "image in the record itself is no image of", "image in the record itself cannot be decoded")  # fmt: skip
    for line, word in enumerate(words, 1):
        [problem] = [
            text
            for text in report.problems.first
            if text.startswith(f"{tmp_path}/train.jsonl:{line}: ")
        ]
        assert any(part in problem for part in word.split("|")), problem
    (tmp_path / "run.yaml").write_text(config.model_dump_json(exclude_none=True))
    assert main(["data", "check", str(tmp_path / "run.yaml")]) == 2
    shown = capsys.readouterr()
    assert "train.jsonl:2: image" in shown.err
    assert "<|vision_start|><|image_pad|>×" in shown.out


def test_images_decide_what_is_prepared_anew(model: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    second = tmp_path / "there"
    for folder in (here, second):
        folder.mkdir()
        write_questions(folder, "train", 2)
    configs = [
        make_config(model, here),
        make_config(model, second),
        make_config(model, here, vision={"image_max_tokens": 99}),
        make_config(model, here, vision={"image_min_tokens": 9}),
    ]
    assert (
        len({fingerprint(DataSpec.of(config), load_tokenizer(config.model)) for config in configs})
        == 4
    )


def test_repeats_are_those_of_text_and_image(model: Path, tmp_path: Path) -> None:
    write_questions(tmp_path, "train", 3)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    rows = [
        {**json.loads(lines[0]), "images": json.loads(line)["images"]}
        for line in (*lines, lines[0])
    ]
    for row in rows:
        row["messages"][1]["content"] = "red"
    for line in lines:  # images of one size, so that only what they show differs
        file = tmp_path / json.loads(line)["images"][0]
        Image.open(file).resize((64, 64)).save(file)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(model, tmp_path)
    assert check(config, load_tokenizer(config.model)).stats["train"]["duplicates"] == 1


def test_a_plan_counts_the_tokens_of_images(model: Path, tmp_path: Path) -> None:
    write_questions(tmp_path, "train", 6, text_rows=2)
    config = make_config(model, tmp_path)
    lengths = estimate_lengths(DataSpec.of(config), config.training, {})
    assert lengths is not None
    assert (lengths.sampled, lengths.bad_share) == (8, 0.0)
    assert lengths.tokens_per_row == prepare(config).train.lengths.mean()


def test_the_page_shows_images_and_what_they_cost(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_questions(tmp_path, "train", 6, text_rows=2)
    config = {
        "model": str(model),
        "task": "vision_language",
        "data": {"train": "train.jsonl", "num_proc": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    assert (
        main(["data", "check", str(tmp_path / "run.yaml"), "--html", str(tmp_path / "page.html")])
        == 0
    )
    capsys.readouterr()
    page = (tmp_path / "page.html").read_text()
    assert page.count('<img src="data:image/jpeg;base64,') == page.count("&lt;|image_pad|&gt;×") > 0
    assert "&lt;|image_pad|&gt;&lt;|image_pad|&gt;" not in page
    assert "Tokens of a row that are images, train" in page
    assert "Longer side of images, in pixels" in page


def _question(image: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "a pot"}]
    return {"messages": turns, "images": [image]}


def test_images_may_lie_inside_of_the_data(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As datasets writes them: in a Parquet file, in a folder saved by it; and as OpenAI writes them, in JSON."""
    datasets = pytest.importorskip("datasets")
    paint(tmp_path / "a.png", "red", 1)
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "json.jsonl").write_text(
        "".join(
            json.dumps(_question(image)) + "\n"
            for image in (data_address(content), {"path": "a.png"}, "a.png")
        )
    )
    features = datasets.Features(
        messages=[{"role": datasets.Value("string"), "content": datasets.Value("string")}],
        images=[datasets.Image()],
    )
    saved = datasets.Dataset.from_list(
        [_question({"bytes": content, "path": None})], features=features
    )
    saved.to_parquet(tmp_path / "rows.parquet")
    saved.save_to_disk(tmp_path / "saved")
    images = {}
    for place in ("json.jsonl", "rows.parquet", "saved"):
        prepared = prepare(make_config(model, tmp_path, data={"train": str(tmp_path / place)}))
        images |= {(place, row): prepared.train.images(row) for row in range(len(prepared.train))}
        assert (
            main(
                [
                    "data",
                    "convert",
                    str(tmp_path / place),
                    "-o",
                    str(tmp_path / f"{place}.out.jsonl"),
                ]
            )
            == 0
        )
        again = prepare(
            make_config(model, tmp_path, data={"train": str(tmp_path / f"{place}.out.jsonl")})
        )
        assert again.train.images(0)[0].crc == prepared.train.images(0)[0].crc
    assert len(images) == 5
    assert {Path(ref.path).read_bytes() for refs in images.values() for ref in refs} == {content}
    capsys.readouterr()


def test_what_is_not_seen_of_images_is_counted(model: Path, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (60, 60), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    Image.new("I;16", (60, 60), 40_000).save(tmp_path / "deep.png")
    Image.new("RGB", (1900, 10), "red").save(tmp_path / "narrow.png")
    rows = [_question(name) for name in ("moving.gif", "deep.png", "narrow.png")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(
        model,
        tmp_path,
        data={"train": str(tmp_path / "rows.jsonl")},
        vision={"image_max_tokens": 16},
    )
    report = check(config, load_tokenizer(config.model)).to_json()
    sentences = {finding["id"]: finding["sentence"] for finding in report["findings"]}
    assert sentences == {
        "images_above_budget": "1 image of train with more tokens than vision.image_max_tokens, because of a narrow shape",
        "images_animated": "1 animated image of train of which only the first frame is seen",
        "images_deep": "1 image of train with more than 8 bits of grey, whose brighter parts become white",
    }


def test_models_that_do_not_see_are_refused(tmp_path: Path, model: Path) -> None:
    save_model(tmp_path / "text")
    config = make_config(tmp_path / "text", tmp_path)
    with pytest.raises(ModelError, match="takes no images"):
        processor_for(config)
    config = make_config(model, tmp_path)
    processor = processor_for(config)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "CLIPImageProcessor"})
    )
    files = {"preprocessor_config.json": tmp_path / "preprocessor_config.json"}
    other = ImageProcessor("clip", files, config.vision, replace(processor.placeholder))
    with pytest.raises(ModelError, match="cuts images into a grid"):
        _ = other.theirs


def test_the_budget_of_tokens_is_checked_and_read_from_the_environment(
    model: Path, tmp_path: Path
) -> None:
    from kubetune.config.load import load_config

    with pytest.raises(ValueError, match="image_min_tokens is 9, image_max_tokens 8"):
        make_config(model, tmp_path, vision={"image_min_tokens": 9, "image_max_tokens": 8})
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ntask: vision_language\ndata: {train: t.jsonl}\n")
    assert (
        load_config(file, environ={"IMAGE_MAX_TOKEN_NUM": "2048"}).vision.image_max_tokens == 2048
    )
    with pytest.raises(ConfigError, match="IMAGE_MAX_TOKEN_NUM"):
        load_config(file, environ={"IMAGE_MAX_TOKEN_NUM": "many"})
