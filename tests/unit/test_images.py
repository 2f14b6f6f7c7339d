"""Images named by data: found by path and nowhere else, and only used when they are whole and of a sane size."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from kubetune.data.reading.images import (
    ImageFolders,
    UnusableImage,
    data_address,
    image_file,
    image_of_row,
    verify_image,
)

Image = pytest.importorskip("PIL.Image")


def draw(file: Path, size: tuple[int, int] = (40, 30), mode: str = "RGB") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise(size, 80).convert(mode).save(file)
    return file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (
        "coco/train2017/1.jpg",
        "gqa/images/2.jpg",
        "mathvista/images/3.jpg",
        "mathvista/images/2.jpg",
    ):
        draw(tmp_path / "root" / name)
    draw(tmp_path / "elsewhere.jpg")
    (tmp_path / "root" / "coco" / "link.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    return tmp_path / "root"


def reason_of(folders: ImageFolders, path: str) -> str:
    with pytest.raises(UnusableImage) as caught:
        folders.find(path)
    return caught.value.reason


def test_images_are_found_by_path(root: Path) -> None:
    folders = ImageFolders(root)
    image = root / "coco" / "train2017" / "1.jpg"
    assert folders.find("coco/train2017/1.jpg") == image
    assert ImageFolders(root / "coco").find("coco/train2017/1.jpg") == image
    assert ImageFolders(root / "coco" / "train2017").find("coco/train2017/1.jpg") == image
    assert folders.find("images/3.jpg") == root / "mathvista" / "images" / "3.jpg"
    assert reason_of(folders, "images/2.jpg") == "image_ambiguous"  # GQA's or MathVista's?
    assert reason_of(folders, "sam/train2017/1.jpg") == "image_missing"
    assert reason_of(folders, "1.jpg") == "image_missing"  # nothing is guessed from a bare name
    assert reason_of(folders, "coco/" + "x" * 300) == "image_missing"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../elsewhere.jpg",
        "coco/../../elsewhere.jpg",
        "coco/link.jpg",
        "a\0.jpg",
        "http://x/a.jpg",
    ],
)
def test_paths_do_not_lead_outside(root: Path, path: str) -> None:
    assert reason_of(ImageFolders(root), path) == "image_outside"


def test_rows_name_images_from_their_own_folder(tmp_path: Path) -> None:
    assert image_of_row("/data/rows.jsonl", "images/1.jpg") == Path("/data/images/1.jpg")
    assert image_of_row("/data/rows.jsonl", "/images/1.jpg") == Path("/images/1.jpg")


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.gif", "a.bmp"])
def test_whole_images_are_known_by_their_bytes(name: str, tmp_path: Path) -> None:
    file = draw(tmp_path / name)
    file = file.rename(tmp_path / "without-suffix")
    facts = verify_image(file)
    assert (facts.width, facts.height, facts.bytes) == (40, 30, file.stat().st_size)


@pytest.mark.parametrize("kind", ["", "image/png"])
def test_images_that_rows_hold_are_kept_by_their_content(kind: str, tmp_path: Path) -> None:
    content = draw(tmp_path / "a.png").read_bytes()
    file = image_file("/data/rows.jsonl", data_address(content, kind), tmp_path / "cache")
    assert file.read_bytes() == content
    file.write_bytes(content[:-1])  # as a full disk might have left it
    assert image_file("x", data_address(content), tmp_path / "cache").read_bytes() == content


@pytest.mark.parametrize(
    "address",
    ["data:image/png;base64,a", "data:image/png,a", "data:;base64,é", "data:", "data:a/b"],
)
def test_addresses_that_hold_no_image(address: str, tmp_path: Path) -> None:
    with pytest.raises(UnusableImage):
        image_file("/data/rows.jsonl", address, tmp_path)
    assert not any(tmp_path.iterdir())


def test_frames_and_shades_that_are_not_seen_are_known(tmp_path: Path) -> None:
    plain, moving, deep = (tmp_path / name for name in ("a.gif", "b.gif", "c.png"))
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    frames[0].save(plain)
    frames[0].save(moving, save_all=True, append_images=frames[1:])
    Image.new("I;16", (40, 30), 40_000).save(deep)
    facts_seen = [
        (facts.is_animated, facts.is_deep) for facts in map(verify_image, (plain, moving, deep))
    ]
    assert facts_seen == [(False, False), (True, False), (False, True)]


def png(width: int, height: int) -> bytes:
    """Return a small PNG that claims to be of any size."""
    chunks = b""
    for kind, content in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", b""),
        (b"IEND", b""),
    ):
        chunks += (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "image_damaged"),
        (b"<html>not found</html>", "image_unknown"),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "image_unknown",
        ),  # would start another program
        (png(30_000, 30_000), "image_too_large"),
        (png(10_000, 10_000), "image_too_large"),
        (png(5_000, 10), "image_too_narrow"),
        (png(50, 50), "image_damaged"),
    ],
    ids=["empty", "html", "postscript", "bomb", "large", "narrow", "without pixels"],
)
def test_what_is_no_sound_image(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UnusableImage) as caught:
        verify_image(tmp_path / "a.png")
    assert caught.value.reason == reason


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_images_cut_off_are_found(name: str, tmp_path: Path) -> None:
    file = draw(tmp_path / name, (300, 200))
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    with pytest.raises(UnusableImage) as caught:
        verify_image(file)
    assert caught.value.reason == "image_damaged"
