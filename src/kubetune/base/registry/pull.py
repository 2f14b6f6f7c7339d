"""Fetch an image with a model into this user's cache: by its digest, checked, whole or not at all.

    ~/.cache/kubetune/oci/registry.example.com+5000/team/bot/sha256-1a2b…/config.json

Pods may have the image mounted instead, in the same place below /images.

An image may come from anybody. So its manifest is checked before it is believed, and what it unpacks to has limits: bytes,
files, folders in a path, and the headers of a tar.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, Annotated, Final, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kubetune.base import files, locks, whole_folder
from kubetune.base.registry.address import (
    FOLDER,
    MODELS_LINK,
    ROOT,
    STORE,
    Address,
    folder_of_digest,
    mounted_folder,
    parse,
)
from kubetune.base.registry.registry_client import Registry
from kubetune.errors import EnvironmentFault, ModelError, first_line

# Where ModelPack and oras write the path of a file that is a layer by itself.
_PATHS: Final = ("org.cncf.model.filepath", "org.opencontainers.image.title")
_BUFFER_BYTES: Final = 1024 * 1024
# An image unpacks to no more than this many times its packed size, beyond what small files may. Weights hardly shrink
# when they are packed, text to a fifth.
_MOST_GROWTH: Final = 10
_SMALL_FILES_BYTES: Final = 256 * 1024 * 1024
_MOST_FILES: Final = 10_000
_MOST_FOLDERS: Final = 32  # of a path
# Between the files of a tar: a header, with the long names and other attributes that precede it.
_MOST_HEADER_BYTES: Final = 4 * 1024 * 1024
# What the readers raise of damaged bytes; RecursionError of a header that announces the next, a thousand times.
_NO_TAR: Final = (
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    ValueError,
    RecursionError,
)
_GZIP: Final = b"\x1f\x8b"


class _Layer(BaseModel):
    """What a manifest says of a layer."""

    model_config = ConfigDict(strict=True, frozen=True)

    digest: Annotated[str, Field(pattern=r"\Asha256:[0-9a-f]{64}\z")]
    size: Annotated[int, Field(ge=0)]
    media_type: Annotated[str, Field(alias="mediaType")]
    annotations: dict[str, str] | None = None


class _Manifest(BaseModel):
    """The part of a manifest that a pull needs."""

    model_config = ConfigDict(strict=True, frozen=True)

    layers: Annotated[tuple[_Layer, ...], Field(min_length=1, strict=False)]


def fetch(
    text: str,
    digest: str | None = None,  # of the image; left out: today's of the tag
    *,
    offline: bool = False,
    tell: Callable[[str], None] = print,
) -> Path:
    """Return the folder with the files of an image, which is fetched unless it is there.

    Raise ConfigError for what is no address, ModelError if there is no such image or it is no model's,
    EnvironmentFault if the registry refuses, cannot be reached, or gives other bytes; nothing is left then.
    """
    address = parse(text)
    if digest is None and address.has_digest:
        digest = address.reference
    place = _store() / FOLDER / address.folder
    # What has a digest never changes, so the registry need not be asked.
    if digest is not None:
        for folder in (Path(mounted_folder(address, digest)), place / folder_of_digest(digest)):
            # What is mounted stays as it is, so such an image is fetched.
            if folder.is_dir() and not _has_layout_of_kserve(folder):
                return folder
    if offline:
        raise ModelError(
            f"model {address} is not in {place} by its digest, and model.local_files_only is set; fetch it once without "
            "that, and name it by its digest"
        )

    with Registry(address, tell) as registry:
        content = registry.manifest(digest or address.reference)
        if content is None:
            raise ModelError(f"{address.host} has no image {digest or address}")
        actual = f"sha256:{sha256(content).hexdigest()}"
        if digest not in (None, actual):
            raise EnvironmentFault(f"{address.host} gives another image than {digest}")
        layers = _layers(content, address)
        folder = place / folder_of_digest(actual)
        place.mkdir(parents=True, exist_ok=True)
        # One rank of this machine fetches, and the others wait.
        with locks.lock(place / "pull.lock", wait=True):
            if not folder.is_dir():
                whole_folder.remove_leftovers(place)
                _fill(registry, layers, folder, tell)
    return folder


def _store() -> Path:
    """Return the folder of fetched images: this user's cache, or the one that all pods of a run see."""
    shared = os.environ.get(STORE)
    if shared:
        return Path(shared)
    return files.user_cache(os.environ) / "kubetune"


def _layers(content: bytes, address: Address) -> tuple[_Layer, ...]:
    """Return the layers that a manifest names. Raise ModelError if it is not one of a single image."""
    try:
        return _Manifest.model_validate_json(content).layers
    except ValidationError:
        raise ModelError(
            f"{address} is no single image with layers; expected one such as `kubetune push` writes"
        ) from None


def _fill(
    registry: Registry, layers: tuple[_Layer, ...], folder: Path, tell: Callable[[str], None]
) -> None:
    packed = sum(layer.size for layer in layers)
    _require_room(folder.parent, packed, registry.address)
    tell(f"fetching {registry.address} ({packed / 1e9:.2f} GB)")
    with whole_folder.written(folder, "pull") as unpacked:
        allowance = _Allowance(packed * _MOST_GROWTH + _SMALL_FILES_BYTES, _MOST_FILES)
        for layer in layers:
            # After a lost connection the files of the layer are written anew.
            unpack = partial(_unpack, registry, layer, unpacked, allowance)
            allowance = registry.persistently(unpack)
        if allowance.files == _MOST_FILES:
            raise ModelError(f"{registry.address} holds no files; expected those of a model")
        if _has_layout_of_kserve(unpacked):
            _lift(unpacked)


def _has_layout_of_kserve(folder: Path) -> bool:
    """True if an image has its files in a folder `models`, which KServe mounts, and nothing beside it."""
    return (folder / MODELS_LINK).is_dir() and len(list(folder.iterdir())) == 1


def _lift(folder: Path) -> None:
    """Move the files of an image to its root, where those of every other image are."""
    # One of them may be called as the folder is.
    lifted = (folder / MODELS_LINK).rename(files.temporary_sibling(folder / MODELS_LINK))
    for path in lifted.iterdir():
        path.rename(folder / path.name)
    lifted.rmdir()


def _require_room(folder: Path, needed: int, address: Address) -> None:
    free = files.free_bytes(folder)
    if free < needed:
        raise EnvironmentFault(f"{folder}: {address} takes {needed:,} bytes, {free:,} are free")


@dataclass(frozen=True)
class _Allowance:
    """How much an image may still unpack to."""

    bytes: int
    files: int  # folders count too

    def less(self, size: int, address: Address) -> _Allowance:
        """Return what is left after a file. Raise ModelError if that is too large, or one too many."""
        # A damaged header may have a negative size.
        if not 0 <= size <= self.bytes:
            raise ModelError(
                f"{address} unpacks to more than {_MOST_GROWTH} times its size, which no model does. Nothing was kept."
            )
        if self.files < 1:
            raise ModelError(f"{address} holds more than {_MOST_FILES:,} files. Nothing was kept.")
        return _Allowance(self.bytes - size, self.files - 1)


def _unpack(registry: Registry, layer: _Layer, folder: Path, allowance: _Allowance) -> _Allowance:
    """Write the files of a layer. Return what the image may still unpack to."""
    chunks = registry.blob(layer.digest, layer.size)
    kind = layer.media_type
    address = registry.address
    # ModelPack calls a file that is a layer by itself raw; oras gives it a type of its own.
    if kind.endswith(".raw") or "tar" not in kind:
        annotations = layer.annotations or {}
        name = next((annotations[key] for key in _PATHS if key in annotations), None)
        if name is None:
            raise ModelError(f"{address}: a layer of type {kind!r} has no path of its file")
        left = allowance.less(layer.size, address)
        with open(_place_of(folder, name, address), "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        return left
    if kind.endswith("zstd"):
        raise ModelError(f"{address}: a layer is packed by zstd; expected tar or gzip")
    try:
        left = _unpack_tar(_Stream(chunks), folder, allowance, address)
    except _NO_TAR as error:
        reason = first_line(error) or type(error).__name__
        raise ModelError(f"{address}: a layer is no tar: {reason}") from None
    # The digest is compared at the end, which a tar's reader does not read up to.
    for _ in chunks:
        pass
    return left


def _unpack_tar(
    packed: _Stream, folder: Path, allowance: _Allowance, address: Address
) -> _Allowance:
    content: IO[bytes] = cast(IO[bytes], packed)
    if packed.begins_with(_GZIP):
        # It unpacks no more at a time than is read; tarfile would unpack a megabyte to a gigabyte at once.
        content = cast(IO[bytes], gzip.GzipFile(fileobj=content))
    stream = _TarStream(content, address)
    with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", bufsize=_BUFFER_BYTES) as archive:
        for member in archive:
            allowance = allowance.less(member.size, address)
            _require_room(folder, member.size, address)
            stream.allow(member.offset_data + member.size)
            if not member.isdir() and not _is_link_to_root(member):
                _write(archive, member, folder, address)
    return allowance


def _is_link_to_root(member: tarfile.TarInfo) -> bool:
    """True if a tar's entry shows all files a second time, where KServe looks for them."""
    return member.issym() and (member.name, member.linkname) == (MODELS_LINK, ROOT)


def _write(
    archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, address: Address
) -> None:
    """Write a file of a tar. Links and devices are refused: they could lead out of the folder."""
    source = archive.extractfile(member) if member.isreg() else None
    if source is None:
        raise ModelError(
            f"{address}: {member.name!r} is neither a file nor a folder; expected an image that holds only a model's files"
        )
    with open(_place_of(folder, member.name, address), "wb") as file:
        shutil.copyfileobj(source, file, _BUFFER_BYTES)


def _place_of(folder: Path, name: str, address: Address) -> Path:
    """Return where a file goes. Raise ModelError for a path out of the folder, or one that no model has."""
    parts = Path(name.removeprefix("./")).parts
    leads_out = not parts or name.startswith("/") or ".." in parts
    # Names are shown in terminals.
    if leads_out or not name.isprintable() or len(parts) > _MOST_FOLDERS:
        shown = name if len(name) <= 100 else f"{name[:100]}…"
        raise ModelError(f"{address}: {shown!r} is no path inside the image")
    if any(files.is_temporary(part) for part in parts):
        raise ModelError(
            f"{address}: {name!r} is a copy that was never finished; push the model again"
        )
    path = folder.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


class _Stream:
    """Chunks of bytes as a file that can be read once."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        # A view, so that small reads of a large chunk copy only what they return.
        self._rest = memoryview(next(chunks, b""))

    def begins_with(self, mark: bytes) -> bool:
        """True if the bytes begin with `mark`. Asked before the first read."""
        return bytes(self._rest[: len(mark)]) == mark

    def read(self, count: int) -> bytes:
        """Return the next bytes, `count` at most, and none only at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        content = bytes(self._rest[:count])
        self._rest = self._rest[count:]
        return content


class _TarStream:
    """A tar that may be read so far as its files go that are known, and a header further.

    tarfile reads a header into memory whole, and a header says itself how large it is.
    """

    def __init__(self, content: IO[bytes], address: Address) -> None:
        self._content = content
        self._address = address
        self._position = 0
        self._end = _MOST_HEADER_BYTES

    def allow(self, end: int) -> None:
        """Let the reader go to the end of a file, and to the one after it."""
        self._end = end + _MOST_HEADER_BYTES

    def read(self, count: int) -> bytes:
        """Return the next bytes, `count` at most. Raise ModelError beyond what may be read."""
        if self._position > self._end:
            raise ModelError(
                f"{self._address}: a layer has a header of more than {_MOST_HEADER_BYTES >> 20} MiB"
            )
        content = self._content.read(count)
        self._position += len(content)
        return content
