"""Push an export to a registry as an OCI image, read it back, and only then give it its tag.

    export/               image (any container runtime mounts it)      artifact (ModelPack; CRI-O mounts it)
      README.md      ┐    layer 1: a tar of all small files            one layer a file, its bytes as they are
      config.json    │
      models -> .    ┘
      a.safetensors       layer 2: a tar of this file
      b.safetensors       layer 3: a tar of this file

KServe mounts the folder `models` of an image, every other reader its root: the link makes them one.

Nothing is written to the disk: a tar is headers, padding and the files' own bytes, read while they are sent. The same
export always gives the same digests, so a second push finds its layers there, sends nothing and compares again.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from kubetune import errors
from kubetune.base import files, humanize, whole_folder
from kubetune.base.registry.address import MODELS_LINK, ROOT, Address
from kubetune.base.registry.registry_client import MANIFEST_TYPE, Registry
from kubetune.result.forms.wanted import PROVENANCE
from kubetune.result.publishing.base_files import is_licence

_IMAGE_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_IMAGE_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
# From ModelPack's spec, https://github.com/modelpack/model-spec.
_MODEL_MANIFEST: Final = "application/vnd.cncf.model.manifest.v1+json"
_MODEL_CONFIG: Final = "application/vnd.cncf.model.config.v1+json"
_MODEL_LAYER: Final = "application/vnd.cncf.model.{what}.v1.raw"
_FILE_PATH: Final = "org.cncf.model.filepath"

_WEIGHTS: Final = (".safetensors", ".gguf", ".bin")
# Overlay file systems take 127 layers at most.
_MOST_WEIGHT_LAYERS: Final = 100
_CHUNK_BYTES: Final = 1024 * 1024


@dataclass(frozen=True)
class ImageLayer:
    """A blob of an image, and the files that it is made of."""

    folder: Path
    names: tuple[str, ...]  # of the files, sorted
    media_type: str
    is_tar: bool  # else it is the bytes of its one file
    # A tar with a link to its own root, so that a folder of the image has the same files.
    has_link: bool = False
    digest: str = ""
    size: int = 0  # bytes

    @property
    def descriptor(self) -> dict[str, Any]:
        """Return how a manifest names this layer."""
        described: dict[str, Any] = {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.size,
        }
        # A reader that wants one file of an image finds its layer by this.
        if len(self.names) == 1:
            described["annotations"] = {_FILE_PATH: self.names[0]}
        return described

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the layer."""
        if not self.is_tar:
            yield from _bytes_of(self.folder / self.names[0])
            return
        for name in self.names:
            path = self.folder / name
            size = path.stat().st_size
            # Owner, mode and time are the same for everybody, so that digests are too.
            header = tarfile.TarInfo(name)
            header.size = size
            header.mode = 0o644
            yield header.tobuf(tarfile.PAX_FORMAT)
            yield from _bytes_of(path)
            yield bytes(-size % tarfile.BLOCKSIZE)

        if self.has_link:
            link = tarfile.TarInfo(MODELS_LINK)
            link.type = tarfile.SYMTYPE
            link.linkname = ROOT
            link.mode = 0o777
            yield link.tobuf(tarfile.PAX_FORMAT)

        # Two empty blocks end a tar.
        yield bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Image:
    """All that is sent for an export."""

    layers: list[ImageLayer]
    config: bytes
    manifest: bytes

    @property
    def digest(self) -> str:
        """Return the digest by which the image is known."""
        return _digest(self.manifest)


@dataclass(frozen=True)
class PushedImage:
    """An image in a registry."""

    digest: str  # of its manifest
    layers: int
    sent: int  # layers that were not there before
    size: int  # bytes of all layers


def push(
    folder: Path,
    address: Address,
    title: str,
    *,
    as_modelpack: bool = False,
    tell: Callable[[str], None] = print,
) -> PushedImage:
    """Send an export, fetch it back, compare it, and write the tag last.

    Layers that are there are not sent again, so the same command goes on after a break. Raise ConfigError if the
    export is damaged, before anything is sent; EnvironmentFault if the registry refuses, cannot be reached in the end,
    or gives back other bytes. The tag is then what it was before.
    """
    tell(f"reading {folder}")
    image = build(folder, title, as_modelpack=as_modelpack)
    size = sum(layer.size for layer in image.layers)
    with Registry(address, tell) as registry:
        # What such a tag names may have been damaged or deleted since: it is compared once more.
        has_tag = registry.manifest(address.reference) == image.manifest
        if has_tag:
            tell(f"{address} is this image already")

        sent = 0
        for number, layer in enumerate(image.layers, start=1):
            what = f"layer {number} of {len(image.layers)} ({humanize.size(layer.size)})"
            if registry.has_blob(layer.digest):
                tell(f"{what} is there already")
                continue
            tell(f"sending {what}")
            registry.put_blob(layer.digest, layer.size, layer.chunks)
            sent += 1

        config_digest = _digest(image.config)
        if not registry.has_blob(config_digest):
            registry.put_blob(config_digest, len(image.config), lambda: [image.config])

        if not has_tag:
            # Some registries give back only what a manifest names. This one has no tag yet.
            registry.put_manifest(image.digest, image.manifest)
        _compare(registry, image, tell)
        # Some registries refuse to write a tag twice, even if it stays the same.
        if not has_tag:
            _write_tag(registry, image)

    return PushedImage(image.digest, len(image.layers), sent, size)


def _write_tag(registry: Registry, image: Image) -> None:
    """Write the tag, and look at it. Raise EnvironmentFault if it names another image then."""
    address = registry.address
    registry.put_manifest(address.reference, image.manifest)
    if registry.manifest(address.reference) != image.manifest:
        raise errors.EnvironmentFault(
            f"{address} was written, and the registry gives another image for it; has someone else pushed?"
        )


def _compare(
    registry: Registry,
    image: Image,
    tell: Callable[[str], None],
) -> None:
    """Fetch back every blob and the manifest. Raise EnvironmentFault if one differs from what was sent."""
    tell("reading it back")
    if registry.manifest(image.digest) != image.manifest:
        raise errors.EnvironmentFault(
            f"{registry.address.host} gives another manifest than {image.digest}, which was sent"
        )

    registry.check_blob(_digest(image.config), len(image.config))
    for layer in image.layers:
        registry.check_blob(layer.digest, layer.size)


def build(
    folder: Path,
    title: str,
    *,
    as_modelpack: bool = False,
) -> Image:
    """Return the image of an export. Raise ConfigError if the export is not as its provenance says."""
    facts = files.read_object(folder / PROVENANCE)
    names = list(whole_folder.contents(folder))
    weights = [name for name in names if name.endswith(_WEIGHTS)]
    others = [name for name in names if name not in weights]

    layers = []
    if as_modelpack:
        for name in [*others, *weights]:
            media_type = _MODEL_LAYER.format(what=_what_is(name))
            layers.append(ImageLayer(folder, (name,), media_type, is_tar=False))
    else:
        layers.append(ImageLayer(folder, tuple(others), _IMAGE_LAYER, is_tar=True, has_link=True))
        # One layer a file, so that a push that broke off goes on after the last whole file.
        count = -(-len(weights) // _MOST_WEIGHT_LAYERS) or 1
        for first in range(0, len(weights), count):
            together = tuple(weights[first : first + count])
            layers.append(ImageLayer(folder, together, _IMAGE_LAYER, is_tar=True))

    # Whatever is pushed is what was proved.
    damage = whole_folder.damage(folder, facts["files"], but=PROVENANCE)
    if damage is not None:
        raise errors.ConfigError(
            f"{folder} {damage}; remove the folder, and run the same again. Nothing was sent."
        )

    # Digests come before anything is sent: a registry is asked by them what it has.
    layers = [_measured(layer) for layer in layers]
    return _image(layers, facts, title, as_modelpack=as_modelpack)


def _image(
    layers: list[ImageLayer],
    facts: dict[str, Any],
    title: str,
    *,
    as_modelpack: bool,
) -> Image:
    digests = [layer.digest for layer in layers]
    config: dict[str, Any]
    if as_modelpack:
        config_type = _MODEL_CONFIG
        config = {
            "descriptor": {
                "createdAt": facts["time"],
                "name": title,
                "version": f"step {facts['checkpoint']['step']}",
            },
            "config": {"format": "safetensors", "precision": facts["dtype"]},
            "modelfs": {"type": "layers", "diffIds": digests},
        }
    else:
        config_type = _IMAGE_CONFIG
        config = {
            "created": facts["time"],
            # There is no program in it, but runtimes refuse an image without these.
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            # Layers are not compressed, so these are their digests too.
            "rootfs": {"type": "layers", "diff_ids": digests},
        }

    config_bytes = _json(config)
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {
            "mediaType": config_type,
            "digest": _digest(config_bytes),
            "size": len(config_bytes),
        },
        "layers": [layer.descriptor for layer in layers],
        "annotations": {
            "org.opencontainers.image.created": facts["time"],
            "org.opencontainers.image.title": title,
            "org.opencontainers.image.version": f"step {facts['checkpoint']['step']}",
            "org.opencontainers.image.description": f"{facts['kind']} of {facts['base']['name']}, {facts['made_by']}",
        },
    }
    if as_modelpack:
        manifest["artifactType"] = _MODEL_MANIFEST
    return Image(layers, config_bytes, _json(manifest))


def _measured(layer: ImageLayer) -> ImageLayer:
    """Return a layer with its digest and size."""
    # Read once for the digest, and once more when it is sent: layers are too large to be kept.
    sha256 = hashlib.sha256()
    size = 0
    for chunk in layer.chunks():
        sha256.update(chunk)
        size += len(chunk)
    digest = f"sha256:{sha256.hexdigest()}"
    return replace(layer, digest=digest, size=size)


def _what_is(name: str) -> str:
    """Return what a file is in ModelPack's words."""
    if name.endswith(_WEIGHTS):
        return "weight"
    if name.endswith(".py"):
        return "code"
    is_doc = is_licence(name) or PurePosixPath(name).suffix in (".md", ".svg")
    return "doc" if is_doc else "weight.config"


def _bytes_of(path: Path) -> Iterator[bytes]:
    with files.open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _json(value: Any) -> bytes:
    # Keys in order, so that the same export has the same digest.
    return json.dumps(value, sort_keys=True, ensure_ascii=False).encode()


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
