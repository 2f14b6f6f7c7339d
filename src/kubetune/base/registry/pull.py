"""Fetch an image with a model into this user's cache: by its digest, checked, whole or not at all.

    ~/.cache/kubetune/oci/registry.example.com+5000/team/bot/sha256-1a2b…/config.json

Pods may have the image mounted instead, in the same place below /images.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Final, cast

from kubetune.base import files, whole_folder
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
from kubetune.base.registry.client import Registry
from kubetune.errors import EnvironmentFault, ModelError

# Where ModelPack and oras write the path of a file that is a layer by itself.
_PATHS: Final = ("org.cncf.model.filepath", "org.opencontainers.image.title")
_BUFFER_BYTES: Final = 1024 * 1024


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
            if folder.is_dir():
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
        # Of all ranks of this machine one fetches, and the others wait.
        with files.lock(place / "pull.lock", wait=True):
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


def _layers(content: bytes, address: Address) -> list[dict[str, Any]]:
    """Return the layers that a manifest names. Raise ModelError if it is not one of a single image."""
    try:
        layers: list[dict[str, Any]] = json.loads(content)["layers"]
        for layer in layers:
            is_digest = re.fullmatch("sha256:[0-9a-f]{64}", layer["digest"])
            if not is_digest or int(layer["size"]) < 0 or not isinstance(layer["mediaType"], str):
                raise ValueError
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ModelError(
            f"{address} is no single image with layers; expected one such as `kubetune push` writes"
        ) from None
    return layers


def _fill(
    registry: Registry, layers: list[dict[str, Any]], folder: Path, tell: Callable[[str], None]
) -> None:
    # A tar packed by gzip takes more in the end, but weights hardly do.
    needed = sum(int(layer["size"]) for layer in layers)
    free = files.free_bytes(folder.parent)
    if free < needed:
        raise EnvironmentFault(
            f"{folder.parent}: {registry.address} takes {needed:,} bytes, {free:,} are free"
        )
    tell(f"fetching {registry.address} ({needed / 1e9:.2f} GB)")
    with whole_folder.written(folder, "pull") as partial:
        for layer in layers:
            _unpack_persistently(registry, layer, partial)


def _unpack_persistently(registry: Registry, layer: dict[str, Any], folder: Path) -> None:
    """Write the files of a layer. After a lost connection its files are written anew."""
    registry.persistently(lambda: _unpack(registry, layer, folder))


def _unpack(registry: Registry, layer: dict[str, Any], folder: Path) -> None:
    chunks = registry.blob(layer["digest"], int(layer["size"]))
    kind: str = layer["mediaType"]
    # ModelPack calls a file that is a layer by itself raw; oras gives it a type of its own.
    if kind.endswith(".raw") or "tar" not in kind:
        annotations = layer.get("annotations") or {}
        name = next((annotations[key] for key in _PATHS if key in annotations), None)
        if not isinstance(name, str):
            raise ModelError(f"{registry.address}: a layer of type {kind} has no path of its file")
        with open(_place_of(folder, name, registry.address), "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        return
    if kind.endswith("zstd"):
        raise ModelError(f"{registry.address}: a layer is packed by zstd; expected tar or gzip")
    stream = _Stream(chunks)
    try:
        with tarfile.open(
            fileobj=cast(IO[bytes], stream), mode="r|*", bufsize=_BUFFER_BYTES
        ) as archive:
            for member in archive:
                if not member.isdir() and not _is_link_to_root(member):
                    _write(archive, member, folder, registry.address)
    except tarfile.TarError as error:
        raise ModelError(f"{registry.address}: a layer is no tar: {error}") from None
    # The digest is compared at the end, which a tar's reader does not read up to.
    for _ in chunks:
        pass


def _is_link_to_root(member: tarfile.TarInfo) -> bool:
    """True if a tar's entry shows all files a second time, where KServe looks for them."""
    return member.issym() and (member.name, member.linkname) == (MODELS_LINK, ROOT)


def _write(
    archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, address: Address
) -> None:
    """Write a file of a tar. Links and devices are refused: they could lead out of the folder."""
    source = archive.extractfile(member) if member.isreg() else None
    if source is None:
        raise ModelError(f"{address}: {member.name} is neither a file nor a folder")
    with open(_place_of(folder, member.name, address), "wb") as file:
        shutil.copyfileobj(source, file, _BUFFER_BYTES)


def _place_of(folder: Path, name: str, address: Address) -> Path:
    """Return where a file goes. Raise ModelError for a path out of the folder."""
    parts = Path(name.removeprefix("./")).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise ModelError(f"{address}: {name!r} is no path inside the image")
    path = folder.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


class _Stream:
    """Chunks of bytes as a file that can be read once."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes, fewer at the end."""
        while len(self._rest) < count:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._rest += chunk
        content = self._rest[:count]
        self._rest = self._rest[count:]
        return content
