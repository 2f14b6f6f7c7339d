"""Images, sounds, films and documents in a value of a record: known by what they are, whatever their column is called.

"a/1.png"                              image
"data:audio/wav;base64,UklGR…"         audio
{"bytes": b"%PDF-1.7 …", "path": null} document
["a/1.mp4", "a/2.mp4"]                 video
"see the picture a.png for it"         nothing: a text
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from kubetune.data.column_names import names_origin
from kubetune.data.record_values import count_words, is_empty

Medium = Literal["image", "audio", "video", "document"]

# Suffixes of files of images that are opened.
IMAGE_SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
_SUFFIXES: Final[Mapping[Medium, tuple[str, ...]]] = {
    "image": (*IMAGE_SUFFIXES, ".tif", ".tiff", ".avif", ".heic", ".heif", ".jfif", ".svg"),
    "audio": (".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".wma", ".aiff", ".amr"),
    "video": (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".flv", ".3gp"),
    "document": (".pdf", ".doc", ".docx", ".ppt", ".pptx", ".xls", ".xlsx", ".odt", ".djvu", ".epub"),
}  # fmt: skip
_OF_SUFFIX: Final[Mapping[str, Medium]] = {
    suffix: medium for medium, suffixes in _SUFFIXES.items() for suffix in suffixes
}
# How the bytes of files begin.
_BEGINNINGS: Final[tuple[tuple[re.Pattern[bytes], Medium], ...]] = (
    (re.compile(rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|BM.{4}\0{4}|II\*\0|MM\0\*", re.DOTALL), "image"),
    (re.compile(rb"RIFF.{4}WEBP|.{4}ftyp(heic|heix|mif1|avif)", re.DOTALL), "image"),
    (re.compile(rb"RIFF.{4}WAVE|ID3|fLaC|OggS|\xff[\xfb\xf3\xf2]|.{4}ftypM4A", re.DOTALL), "audio"),
    (re.compile(rb"RIFF.{4}AVI |\x1a\x45\xdf\xa3|.{4}ftyp", re.DOTALL), "video"),
    (re.compile(rb"%PDF-|\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"), "document"),
)  # fmt: skip
_BASE64: Final = re.compile(r"(?:data:[^,]{0,100};base64,)?([A-Za-z0-9+/]{12,}={0,2})")
# Base64 without `data:` before it is a text like any other if it is short.
_SHORTEST: Final = 64
_LONGEST_PATH: Final = 1000
# Keys of an object that is a file and nothing else.
_OF_FILES: Final = frozenset((
    "bytes", "path", "url", "uri", "src", "file", "filename", "file_name", "name", "type", "mime_type", "width", "height",
    "size",
))  # fmt: skip
# Words in the name of a file; a text with more of them only ends with one.
_MOST_WORDS: Final = 3


def medium_of(value: Any) -> Medium | None:
    """Return what a value is, or what all items of a list are; None for texts and numbers."""
    if isinstance(value, bytes):
        return _of_bytes(value)
    if isinstance(value, str):
        return _of_text(value.strip())
    if isinstance(value, Mapping):
        return _of_object(value)
    if isinstance(value, (list, tuple)):
        media = {medium_of(item) for item in value if not is_empty(item)}
        return media.pop() if len(media) == 1 else None
    return None


def is_on_web(value: Any) -> bool:
    """True if a value names what lies on the web, which nothing here loads."""
    if isinstance(value, str):
        return value.strip().lower().startswith(("http://", "https://"))
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(map(is_on_web, value))


def _of_bytes(content: bytes) -> Medium | None:
    for beginning, medium in _BEGINNINGS:
        if beginning.match(content):
            return medium
    return None


def _of_text(text: str) -> Medium | None:
    """Return what a text names by its path, or holds as base64."""
    if not text or "\n" in text[:_LONGEST_PATH]:
        return None
    for medium in _SUFFIXES:
        if text.startswith(f"data:{medium}/"):
            return medium
    is_data = text.startswith("data:")
    coded = _BASE64.match(text[:_LONGEST_PATH])
    if coded is not None and (is_data or len(coded[1]) >= _SHORTEST):
        return _of_bytes(_decoded(coded[1]))
    return None if is_data or len(text) > _LONGEST_PATH else _of_path(text)


def _decoded(text: str) -> bytes:
    """Return the first bytes of base64; none for what is none."""
    # Whole groups of four signs are bytes of their own.
    try:
        return b64decode(text[: min(len(text), 64) // 4 * 4])
    except (ValueError, binascii.Error):
        return b""


def _of_path(text: str) -> Medium | None:
    path = text
    if "://" in text:
        try:
            path = urlsplit(text).path
        except ValueError:
            return None
    name = re.split(r"[/\\]", path)[-1]
    stem, dot, suffix = name.rpartition(".")
    if not dot or not stem or count_words(name) > _MOST_WORDS:
        return None
    return _OF_SUFFIX.get(f".{suffix.lower()}")


def _of_object(value: Mapping[str, Any]) -> Medium | None:
    """Return what an object holds: `bytes` or `path` as `datasets` has them, samples of a sound, or an address."""
    if {"array", "sampling_rate"} <= value.keys():
        return "audio"
    # Beside other facts, a path says where a record is from.
    is_file = value.keys() <= _OF_FILES
    for key, item in value.items():
        medium = medium_of(item) if is_file or not names_origin(key) else None
        if medium is not None:
            return medium
    return None
