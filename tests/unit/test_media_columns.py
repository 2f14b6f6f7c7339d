"""Images, sounds, films and documents are known by what they are, whatever their columns are called."""

from __future__ import annotations

import json
import shlex
import subprocess
from base64 import b64encode
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kubetune import cli
from kubetune.cli.local.demo import EMBEDDED
from kubetune.config.schema import RecordKind, SourceConfig
from kubetune.data.column_facts import Columns
from kubetune.data.media import medium_of
from kubetune.data.proposed.proposal import values_of
from kubetune.data.proposed.proposing import propose
from kubetune.data.reading.examples import Chat, images_of
from kubetune.data.reading.formats import read
from kubetune.data.unread_columns import left_out
from kubetune.errors import DataError

MODEL = str(EMBEDDED / "model")
ASKED = {"question": "What does the sign at the gate say?", "answer": "Closed on Mondays."}
PAIR = {
    "prompt": "What does the sign say?",
    "chosen": "Closed on Mondays.",
    "rejected": "It says nothing.",
}
TALK = {
    "messages": [
        {"role": "user", "content": "What does the sign say?"},
        {"role": "assistant", "content": "Closed on Mondays."},
    ]
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def picture(kind: str) -> bytes:
    stream = BytesIO()
    Image.new("RGB", (24, 16), "red").save(stream, kind)
    return stream.getvalue()


def lines(make: Callable[[int], dict[str, Any]], name: str = "d.jsonl") -> str:
    Path(name).write_text("".join(json.dumps(make(number)) + "\n" for number in range(40)))
    return name


def asked(number: int) -> dict[str, Any]:
    return {
        "question": f"What does the sign at gate {number} say?",
        "answer": f"Closed after {number}.",
    }


IMAGES: list[Any] = [
    "scans/Page 12.PNG",
    "C:\\photos\\cat.jpeg",
    "file:///images/a%20b.webp",
    "data:image/png;base64,iVBORw0KGgo=",
    f"data:;base64,{b64encode(picture('JPEG')).decode()}",
    b64encode(picture("PNG")).decode(),
    b64encode(picture("GIF")).decode(),
    picture("BMP"),
    {"bytes": picture("WEBP"), "path": None},
    {"bytes": None, "path": "x/0001.tiff"},
    {"url": "a.gif", "width": 20, "height": 10},
    ["a.png", "b.png"],
    [{"bytes": picture("PNG"), "path": "a"}],
]
OTHERS: list[tuple[Any, str]] = [
    ("calls/7.wav", "audio"),
    ("Screenshot 2024-01-01 at 10.00.00.mov", "video"),
    ("handbook.v2.PDF", "document"),
    ("report.docx", "document"),
    ({"array": [0.0, 0.1], "sampling_rate": 16000, "path": None}, "audio"),
    ({"bytes": b"RIFF\x24\x08\0\0WAVEfmt ", "path": None}, "audio"),
    (b"\0\0\0\x18ftypisom\0\0", "video"),
    (["v/1.mp4", "v/2.mp4"], "video"),
    (f"data:application/pdf;base64,{b64encode(b'%PDF-1.7 and more bytes').decode()}", "document"),
]
TEXTS: list[Any] = [
    "",
    "Closed on Mondays.",
    "please rename the old file to logo.png",
    "https://example.org/about.html",
    "report.txt",
    "train.jsonl",
    ".png",
    "i.e. the first",
    "Internationalisierungsmassnahmen" * 4,
    b"plain bytes",
    {"city": "Bonn", "rooms": 3},
    ["a.png", "a sentence that ends otherwise"],
    {"file": "a.pdf", "page": 3},
    [0.1, 0.2],
    7,
    None,
]  # fmt: skip


@pytest.mark.parametrize("value", IMAGES)
def test_an_image_is_known_by_its_shape(value: Any) -> None:
    assert medium_of(value) == "image"
    for record in ({**ASKED, "whatever": value}, {**PAIR, "b7": value}, {**TALK, "x": value}):
        kind: RecordKind = "pair" if "chosen" in record else "text"
        name = list(record)[-1]
        with pytest.raises(
            ValueError, match=rf"has .*image.* in `{name}`.*columns: .*image: {name}"
        ):
            read(record, kind=kind)
        # What is advised is read.
        if "tiff" not in str(value) and "width" not in str(value):
            assert images_of(read(record, "auto", {"image": name}, kind=kind).example)


@pytest.mark.parametrize(("value", "medium"), OTHERS)
def test_what_no_model_is_shown_is_refused_by_its_shape(value: Any, medium: str) -> None:
    assert medium_of(value) == medium
    with pytest.raises(
        ValueError, match=r"which kubetune cannot show to a model.*columns: \{question: question"
    ):
        read({**ASKED, "thing": value})
    # Whoever names the question has seen the other columns.
    reading = read({**ASKED, "thing": value}, "auto", {"question": "question"})
    assert reading.unused == ("thing",)


@pytest.mark.parametrize("value", TEXTS)
def test_a_text_is_no_image(value: Any) -> None:
    assert medium_of(value) is None
    assert isinstance(read({**ASKED, "whatever": value}).example, Chat)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("url", "https://example.org/gates.html"),
        ("file_name", "notes/7.txt"),
        ("source", "handbook.pdf"),
        ("source_document", "handbook.pdf"),
        ("doc_id", "gates-7.pdf"),
        ("paper", "https://example.org/gates.pdf"),
        ("metadata", {"file": "handbook.pdf", "page": 3}),
        ("thumbnail", None),
    ],
)
def test_where_a_record_is_from_is_no_image(
    name: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(lambda number: {**asked(number), name: value})
    assert cli.main(["data", "check", path, "--model", MODEL]) == 0
    said = capsys.readouterr().out
    assert "warning" not in said
    assert propose(SourceConfig(path=path)).task.value == "causal_lm"


def test_images_beside_the_one_that_is_read_are_refused() -> None:
    record = {**TALK, "image": "a.png", "before": "b.png"}
    with pytest.raises(
        ValueError, match="write those of `image` and `before` as a list into `images`"
    ):
        read(record)
    with pytest.raises(ValueError, match="`photo` and `before`"):
        read({**TALK, "photo": "a.png", "before": "b.png"}, "auto", {"image": "photo"})


@pytest.mark.parametrize("name", ["photo", "figure", "scan", "image_1"])
def test_a_column_of_images_is_proposed_whatever_it_is_called(name: str) -> None:
    path = lines(lambda number: {**asked(number), name: f"img/{number}.png"})
    proposal = propose(SourceConfig(path=path))
    assert proposal.task.value == "vision_language"
    assert values_of(proposal.columns) == {"image": name}


def test_pairs_about_images_are_proposed_as_such() -> None:
    path = lines(
        lambda number: {**PAIR, "prompt": f"What does sign {number} say?", "scan": "a.png"}
    )
    proposal = propose(SourceConfig(path=path))
    assert proposal.task.value == "preference"
    assert proposal.images is not None
    assert values_of(proposal.columns) == {"image": "scan"}


def test_the_program_for_several_columns_of_images_makes_records_that_are_read() -> None:
    path = lines(
        lambda number: {
            **asked(number),
            "left": f"img/{number}.png",
            "others": [f"img/{number}-{other}.png" for other in range(number % 3)],
        }
    )
    with pytest.raises(DataError, match="images in `left` and `others`") as caught:
        propose(SourceConfig(path=path))
    program = str(caught.value).partition(": `")[2].partition("`, or leave")[0]
    assert shlex.split(program)[0] == "python3"
    subprocess.run(program, shell=True, check=True)
    proposal = propose(SourceConfig(path="d-texts.jsonl"))
    assert proposal.task.value == "vision_language"
    reading = read(proposal.records[2].value)
    assert images_of(reading.example) == ("img/2.png", "img/2-0.png", "img/2-1.png")


def test_what_nobody_can_be_shown_is_refused_by_all_in_the_same_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = lines(lambda number: {**asked(number), "speech": f"a/{number}.flac"})
    for words in (["init", path, "--model", MODEL, "-o", "y.yaml"], ["data", "check", path]):
        assert cli.main(words) == 2
        said = "".join(capsys.readouterr())
        assert "`speech`" in said
        assert "sound" in said
        assert "--columns prompt=question completion=answer" in said or "columns: {question" in said
    assert not Path("y.yaml").exists()


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("cover", "img/{}.png", "task: vision_language"),
        ("recording", "a/{}.mp3", "no sounds"),
        ("image_url", "https://example.org/{}.jpg", "download them"),
    ],
)
def test_beside_a_whole_text_they_are_warned_of(
    name: str, value: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(
        lambda number: {
            "text": f"A long walk to gate {number} by the river.",
            name: value.format(number),
        }
    )
    assert cli.main(["data", "check", path, "--model", MODEL]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"warning: train: `{name}`" in said
    assert advice in said
    assert any(f"`{name}`" in sentence for sentence in propose(SourceConfig(path=path)).unused)


def test_the_counts_of_two_batches_are_those_of_all() -> None:
    parts = [Columns(), Columns()]
    for number in range(8):
        value = {**asked(number), "scan": f"{number}.png"}
        parts[number % 2].note("scan", value, {}, ())
    facts = (parts[0] + parts[1]).to_json(8)
    (column,) = left_out(facts, "d.jsonl")
    assert (column.meaning, column.what, column.is_decisive) == ("medium", "images", True)
