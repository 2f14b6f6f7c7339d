"""Finds the images that data name, and checks that they can be used: format, size, whole to the last byte.

Paths in data are not trusted: they cannot lead out of the folders they are looked for in, and no file is decoded before
its header says that it is of a sane size. Nothing is changed; images that records hold are kept in a cache as files.
What rows look like is formats.py's, and where tags go conversations.py's.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from kubetune.base.files import explained_writes, join_inside, write_atomic

# Formats that are opened at all; Pillow's parsers of rarer formats stay out of reach of data.
FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

MAX_BYTES: Final = 50 * 2**20
# 64 megapixels, 192 MiB when decoded. A small file that claims more is a decompression bomb or useless.
MAX_PIXELS: Final = 2**26
# Longer side by shorter side. The image processors of Qwen-VL refuse more.
MAX_ASPECT_RATIO: Final = 200


class UnusableImage(ValueError):
    """An image that cannot be used."""

    def __init__(self, reason: str, message: str) -> None:
        # one of a few words to count by: image_missing, image_damaged, …
        self.reason = reason
        super().__init__(message)


class ImageRef(NamedTuple):
    """An image of a prepared row."""

    path: str  # absolute
    crc: int  # CRC-32 of the file when the row was prepared


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Facts of an image that can be used."""

    format: str  # as Pillow names it
    width: int  # pixels
    height: int  # pixels
    bytes: int  # of the file
    is_animated: bool = False  # has frames after the first, which nothing here looks at
    is_deep: bool = False  # has more than 8 bits of grey; what 8 bits cannot hold becomes white


def image_of_row(data_file: str, path: str) -> Path:
    """Return the file that a row of `data_file` means by `path`, which is absolute or begins at the data's folder."""
    # `file:///images/a%20b.png`, as Qwen-VL's documents write it.
    if path.startswith("file:"):
        path = unquote(urlsplit(path).path)
    # An absolute path replaces what is before it.
    return Path(data_file).parent / path


def image_file(data_file: str, image: str, cache: Path) -> Path:
    """Return the file of an image that a row of `data_file` names, or holds as an address of data.

    An image that the row holds becomes a file in the `cache`. Raise UnusableImage where it is no such address.
    """
    if not image.startswith(ADDRESS):
        return image_of_row(data_file, image)
    return _kept(_content(image), cache / "images")


# How addresses begin that hold the data themselves (RFC 2397).
ADDRESS: Final = "data:"

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SIZE_OF_A_COPY: Final = (200, 200)  # of an image on a page, at most, in pixels
_BASE64: Final = re.compile(r"data:(?:image/[\w.+-]+)?;base64,")


def data_address(content: bytes, kind: str = "") -> str:
    """Return the bytes of an image as an address of data: "data:image/png;base64,iVBORw…"."""
    return f"{ADDRESS}{kind};base64,{b64encode(content).decode()}"


def _content(address: str) -> bytes:
    start = _BASE64.match(address)
    if start is None:
        raise UnusableImage(
            "image_unknown", f"image {address[:40]!r}… begins with no `data:image/…;base64,`"
        )
    try:
        return b64decode(address[start.end() :], validate=True)
    except ValueError as error:
        raise UnusableImage(
            "image_damaged", f"image {address[:40]!r}… is not base64: {error}"
        ) from error


def _kept(content: bytes, folder: Path) -> Path:
    """Write an image to a folder under the name of its digest, unless it is there. Return its file."""
    # The same image in many records becomes one file.
    name = hashlib.sha256(content).hexdigest()
    file = folder / name[:2] / name
    if not (file.is_file() and file.stat().st_size == len(content)):
        with explained_writes(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, content)
    return file


@dataclass(frozen=True)
class ImageFolders:
    """A folder of a data set's images, in which they are looked for by path.

    path                    root          file
    coco/train2017/1.jpg    /data         /data/coco/train2017/1.jpg
    coco/train2017/1.jpg    /data/coco    /data/coco/train2017/1.jpg
    images/1.jpg            /data         /data/*/images/1.jpg, if there is only one
    """

    root: Path

    def find(self, path: str) -> Path:
        """Return the file of a path. Raise UnusableImage: `image_outside`, `image_missing`, `image_ambiguous`."""
        parts = path.split("/")
        try:
            candidates = self._exact(parts)
            for candidate in candidates:
                if candidate.is_file():
                    return candidate
            # Not where it says: it may lie in one of the folders below, if only one has it.
            matches = self._below_one_folder(path)
        except OSError as error:  # a name too long for the file system
            raise UnusableImage(
                "image_missing", f"image {path[:100]!r} cannot be looked for: {error}"
            ) from error
        except ValueError as error:
            raise UnusableImage("image_outside", str(error)) from error

        if len(matches) > 1:
            first, second = matches[0].parent, matches[1].parent
            raise UnusableImage("image_ambiguous", f"image {path!r} is in {first} and {second}")
        if not matches:
            places = " nor ".join(map(str, candidates))
            raise UnusableImage("image_missing", f"image {path!r} is not at {places}")
        return matches[0]

    def _exact(self, parts: list[str]) -> list[Path]:
        """Return where a path may lie: below the root, and without the folders that the root itself ends with."""
        candidates = [join_inside(self.root, "/".join(parts))]
        # `/data/coco` and `coco/train2017/1.jpg` overlap in `coco`.
        for depth in range(1, len(parts)):
            if list(self.root.parts[-depth:]) == parts[:depth]:
                candidates.append(join_inside(self.root, "/".join(parts[depth:])))
        return candidates

    def _below_one_folder(self, path: str) -> list[Path]:
        joined = (join_inside(folder, path) for folder in _folders_in(self.root))
        return [candidate for candidate in joined if candidate.is_file()]


@lru_cache(maxsize=4)
def _folders_in(root: Path) -> tuple[Path, ...]:
    return tuple(sorted(entry for entry in root.iterdir() if entry.is_dir()))


def _place(file: Path) -> str:
    """Return a file as messages name it. The digest that an image from a record has as its name would say nothing."""
    is_kept = _DIGEST.fullmatch(file.name) is not None and file.parent.name == file.name[:2]
    return "in the record itself" if is_kept else str(file)


def verify_image(file: Path) -> ImageFacts:
    """Check that an image file can be used, by decoding it. Raise UnusableImage with the reason.

    JPEGs are decoded at an eighth of their size, which reads every byte of them in a fraction of the time.
    """
    try:
        number = file.stat().st_size
    except OSError as error:
        raise UnusableImage(
            "image_missing", f"image {_place(file)} cannot be read: {error.strerror}"
        ) from error

    # Cheap checks come before the file is opened.
    if not number:
        raise UnusableImage("image_damaged", f"image {_place(file)} is empty")
    if number > MAX_BYTES:
        raise UnusableImage(
            "image_too_large",
            f"image {_place(file)} has {number:,} bytes; at most {MAX_BYTES:,} are read",
        )

    return _decode(file, number)


def _decode(file: Path, number: int) -> ImageFacts:
    image_module = pillow()
    with warnings.catch_warnings():
        # Pillow warns of sizes, which are checked below, and of odd metadata.
        warnings.simplefilter("ignore")
        try:
            with image_module.open(file, formats=FORMATS) as image:
                facts = ImageFacts(
                    str(image.format),
                    image.width,
                    image.height,
                    number,
                )
                # So far only the header was read; this comes before anything is decoded.
                _require_sane_size(file, facts)
                image.draft("RGB", (max(1, image.width // 8), max(1, image.height // 8)))
                image.load()
                return replace(
                    facts,
                    is_deep=image.mode[0] in "IF",  # modes I, I;16 and F
                    is_animated=getattr(image, "is_animated", False),
                )
        except UnusableImage:
            raise
        except image_module.DecompressionBombError as error:
            raise UnusableImage("image_too_large", f"image {_place(file)}: {error}") from error
        except image_module.UnidentifiedImageError as error:
            raise UnusableImage(
                "image_unknown", f"image {_place(file)} is no image of {', '.join(FORMATS)}"
            ) from error
        except Exception as error:
            # Pillow's parsers raise many kinds; each means that the bytes are no sound image.
            raise UnusableImage(
                "image_damaged", f"image {_place(file)} cannot be decoded: {error}"
            ) from error


def _require_sane_size(file: Path, facts: ImageFacts) -> None:
    longer = max(facts.width, facts.height)
    shorter = max(1, min(facts.width, facts.height))
    size = f"{facts.width:,} × {facts.height:,} pixels"
    if facts.width * facts.height > MAX_PIXELS:
        raise UnusableImage(
            "image_too_large",
            f"image {_place(file)} has {size}; at most {MAX_PIXELS:,} are decoded",
        )

    if longer > MAX_ASPECT_RATIO * shorter:
        raise UnusableImage(
            "image_too_narrow",
            f"image {_place(file)} has {size}; at most {MAX_ASPECT_RATIO} to 1 can be used",
        )


def thumbnail(file: str | Path) -> str:
    """Return a small copy of an image that has passed `verify_image`, as an address of data for a page."""
    from PIL import ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pillow().open(file, formats=FORMATS) as image:
            image.draft("RGB", _SIZE_OF_A_COPY)
            small = ImageOps.exif_transpose(image).convert("RGB")

    # Exact now: a draft of a JPEG is only about as small.
    small.thumbnail(_SIZE_OF_A_COPY)
    content = BytesIO()
    small.save(content, "JPEG", quality=80)
    return data_address(content.getvalue(), "image/jpeg")


@lru_cache(maxsize=1)
def pillow() -> Any:
    """Return Pillow's `Image` module. Raise MissingExtra, saying how to get it, where it is missing."""
    from kubetune.extras import require

    require("to read images", "PIL")
    from PIL import Image

    return Image


def verifier() -> Callable[[Path], ImageFacts]:
    """Return a `verify_image` that remembers the last images: neighbouring records often share one."""
    return lru_cache(maxsize=4096)(verify_image)
