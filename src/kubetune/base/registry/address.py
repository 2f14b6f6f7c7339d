"""Addresses of images: `oci://registry/name:tag`, and `oci://registry/name@sha256:…`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from kubetune.errors import ConfigError

SCHEME: Final = "oci://"
# Names and tags as the distribution spec has them.
_NAME: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
_ADDRESS: Final = re.compile(
    rf"oci://(?P<host>\[[0-9a-fA-F:.]+\](?::\d+)?|[\w.-]+(?::\d+)?)/(?P<name>{_NAME})"
    r"(?::(?P<tag>\w[\w.-]{0,127})|@(?P<digest>sha256:[0-9a-f]{64}))",
    re.ASCII,
)
# Where pods mount images by their digests, and the folder of images in it and in a user's cache.
MOUNTED: Final = "/images"
FOLDER: Final = "oci"
# The variable with another folder than the cache.
STORE: Final = "KUBETUNE_IMAGES"
# A link in images of `kubetune push` to their own root: KServe mounts the folder of this name.
MODELS_LINK: Final = "models"
ROOT: Final = "."
DOCKER_HUB: Final = ("docker.io", "index.docker.io", "registry-1.docker.io")


@dataclass(frozen=True)
class Address:
    """Where an image is, or is to be."""

    host: str  # of the registry, with the port if the address names one
    name: str  # of the repository
    reference: str  # the tag, or the digest
    is_plain: bool  # asked by http, without encryption

    def __str__(self) -> str:
        mark = "@" if self.has_digest else ":"
        return f"{SCHEME}{self.host}/{self.name}{mark}{self.reference}"

    @property
    def has_digest(self) -> bool:
        """True if the address can mean one image alone."""
        return self.reference.startswith("sha256:")

    @property
    def image(self) -> str:
        """Return the address as container runtimes write it, without a scheme."""
        return str(self).removeprefix(SCHEME)

    @property
    def folder(self) -> str:
        """Return the folder of the repository's images in a store of several. Kubernetes mounts nothing at a `:`."""
        return f"{self.host.replace(':', '+')}/{self.name}"

    @property
    def url(self) -> str:
        """Return the address of the repository in the registry's API."""
        # Docker's hub answers at another host than the one in its images' names.
        host = "registry-1.docker.io" if self.host in DOCKER_HUB else self.host
        scheme = "http" if self.is_plain else "https"
        return f"{scheme}://{host}/v2/{self.name}"


def parse(text: str, *, plain: bool = False) -> Address:
    """Return the parts of an address. `plain`: the registry is asked by http, as those of this machine always are.

    Raise ConfigError for what is no address.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is no address of an image; expected oci://registry/name:tag, the name in lower case"
        )
    host = match["host"]
    reference = match["tag"] or match["digest"]
    return Address(host, match["name"], reference, is_plain=plain or is_loopback(host))


def folder_of_digest(digest: str) -> str:
    """Return the name of the folder of an image: sha256-1a2b…"""
    return digest.replace(":", "-", 1)


def mounted_folder(address: Address, digest: str) -> str:
    """Return where a pod has an image that Kubernetes mounts for it."""
    return f"{MOUNTED}/{FOLDER}/{address.folder}/{folder_of_digest(digest)}"


def cached_digest(folder: str, address: str) -> str | None:
    """Return the digest of an image that lies in a folder of a cache. None if it is of another repository, or none."""
    wanted = parse(address)
    parent, _, last = folder.rpartition("/")
    # The caches of two machines differ in what is before this.
    is_of = parent.endswith(f"/{FOLDER}/{wanted.folder}")
    if not is_of or not last.startswith("sha256-"):
        return None
    return last.replace("-", ":", 1)


def is_loopback(host: str) -> bool:
    """True if a host, with its port or without, is this machine."""
    bare = re.sub(r":\d+$", "", host).strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"
