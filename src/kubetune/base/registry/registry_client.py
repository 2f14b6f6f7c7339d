"""Blobs and manifests of a registry, sent and fetched, each tried again after a lost connection."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from kubetune.base.registry.address import Address
from kubetune.base.registry.session import (
    Body,
    Interrupted,
    NotInRegistry,
    RegistrySession,
    read_body,
)
from kubetune.errors import EnvironmentFault

# Between attempts.
WAITS_SECONDS = (2.0, 10.0, 30.0)

MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
MOST_MANIFEST_BYTES: Final = 4 * 1024 * 1024  # the spec asks registries for no more

T = TypeVar("T")


class Registry:
    """One repository of a registry."""

    def __init__(self, address: Address, tell: Callable[[str], None] = print) -> None:
        self.address = address
        self._tell = tell
        self._session = RegistrySession(address)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *error: object) -> None:
        self._session.close()

    def has_blob(self, digest: str) -> bool:
        """True if the repository has a blob."""

        def ask() -> bool:
            try:
                with self._session.send("HEAD", f"{self.address.url}/blobs/{digest}"):
                    return True
            except NotInRegistry:
                return False

        return self.persistently(ask)

    def put_blob(self, digest: str, size: int, body: Body) -> None:
        """Send a blob of `size` bytes. `body` is called for each attempt. The registry checks the digest."""

        def send() -> None:
            with self._session.send("POST", f"{self.address.url}/blobs/uploads/") as response:
                location = response.headers.get("Location", "")
                place = response.url.join(location)
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Length": str(size),
            }
            # The place may carry a state of the registry's own, which must come back as it is.
            url = place.copy_merge_params({"digest": digest})
            try:
                with self._session.send("PUT", str(url), body, headers):
                    pass
            except NotInRegistry:
                # The registry was started anew and has forgotten that this upload began.
                raise Interrupted("the registry has lost the upload") from None

        self.persistently(send)

    def blob(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield the bytes of a blob, without trying again. Raise EnvironmentFault if they are not what was asked for."""
        sha256 = hashlib.sha256()
        count = 0
        url = f"{self.address.url}/blobs/{digest}"
        with self._session.send("GET", url, follow=True) as response:
            for chunk in response.iter_raw(1024 * 1024):
                sha256.update(chunk)
                count += len(chunk)
                # A registry must not fill the disk with what nobody asked for.
                if count > size:
                    raise EnvironmentFault(
                        f"{self.address.host} gives more than the {size:,} bytes that {digest} is to have"
                    )
                yield chunk
        if count < size:
            raise EnvironmentFault(
                f"{self.address.host} gives {count:,} of the {size:,} bytes that {digest} is to have"
            )
        if f"sha256:{sha256.hexdigest()}" != digest:
            raise EnvironmentFault(
                f"{self.address.host} gives other bytes than {digest}, which it was asked for"
            )

    def check_blob(self, digest: str, size: int) -> None:
        """Fetch a blob and compare it with its digest."""

        def read() -> None:
            for _ in self.blob(digest, size):
                pass

        self.persistently(read)

    def manifest(self, reference: str) -> bytes | None:
        """Return a manifest by its tag or digest. None if the repository has none such."""

        def ask() -> bytes | None:
            url = f"{self.address.url}/manifests/{reference}"
            try:
                with self._session.send("GET", url, headers={"Accept": MANIFEST_TYPE}) as response:
                    content = read_body(response, MOST_MANIFEST_BYTES)
            except NotInRegistry:
                return None
            if len(content) > MOST_MANIFEST_BYTES:
                raise EnvironmentFault(f"{self.address}: the manifest is larger than 4 MiB")
            return content

        return self.persistently(ask)

    def put_manifest(self, reference: str, content: bytes) -> None:
        """Write a manifest under a tag or its digest. All that it names must be there."""

        def send() -> None:
            url = f"{self.address.url}/manifests/{reference}"
            headers = {"Content-Type": MANIFEST_TYPE, "Content-Length": str(len(content))}
            with self._session.send("PUT", url, lambda: [content], headers):
                pass

        self.persistently(send)

    def persistently(self, attempt: Callable[[], T]) -> T:
        """Call until the registry answers. Raise EnvironmentFault if it does not in the end, or has no such repository."""
        for wait in (*WAITS_SECONDS, None):
            try:
                return attempt()
            except NotInRegistry as error:
                raise EnvironmentFault(
                    f"{self.address.host} has no repository {self.address.name}, or lacks a part of the image ({error}); "
                    "some registries want a repository made before the first push"
                ) from error
            except Interrupted as error:
                if wait is None:
                    raise EnvironmentFault(
                        f"{self.address.host} could not be asked to the end: {error}. What has arrived stays there; run "
                        "the same command again to go on"
                    ) from error
                self._tell(f"{self.address.host}: {error}; going on in {wait:g} s")
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")
