"""Requests to a registry: blobs and manifests, sent and fetched, each tried again after a lost connection.

Credentials go to the registry and to the token server that it names, never to where it redirects a download.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx

from kubetune.base.registry import credentials
from kubetune.base.registry.address import Address, is_loopback
from kubetune.errors import EnvironmentFault, causes, first_line

# Between attempts.
WAITS_SECONDS = (2.0, 10.0, 30.0)
# Some registries copy a layer to another place before they answer that they have it.
PATIENCE_SECONDS = 600.0

MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
MOST_MANIFEST_BYTES: Final = 4 * 1024 * 1024  # the spec asks registries for no more
_MOST_TOKEN_BYTES: Final = 1024 * 1024
_MOST_REASON_BYTES: Final = 10_000
_UNAUTHORIZED: Final = 401
# A registry that is busy or out of order may do better later; so may one that has forgotten an upload.
_LATER: Final = (408, 425, 429)

Body = Callable[[], Iterable[bytes]]
T = TypeVar("T")


class _Interrupted(Exception):
    """Another attempt may do better."""


class _Missing(Exception):
    """The registry has no such blob, manifest or repository."""


class Registry:
    """One repository of a registry."""

    def __init__(self, address: Address, tell: Callable[[str], None] = print) -> None:
        self.address = address
        self._tell = tell
        self._origin = _origin(httpx.URL(address.url))
        self._authorization: str | None = None
        self._client = httpx.Client(
            timeout=httpx.Timeout(PATIENCE_SECONDS, connect=30.0),
            # A body that is packed for the transfer could grow a thousandfold as it is read.
            headers={"User-Agent": "kubetune", "Accept-Encoding": "identity"},
        )

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def has_blob(self, digest: str) -> bool:
        """True if the repository has a blob."""

        def ask() -> bool:
            try:
                with self._send("HEAD", f"{self.address.url}/blobs/{digest}"):
                    return True
            except _Missing:
                return False

        return self.persistently(ask)

    def put_blob(self, digest: str, size: int, body: Body) -> None:
        """Send a blob of `size` bytes. `body` is called for each attempt. The registry checks the digest."""

        def send() -> None:
            with self._send("POST", f"{self.address.url}/blobs/uploads/") as response:
                location = response.headers.get("Location", "")
                place = response.url.join(location)
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Length": str(size),
            }
            # The place may carry a state of the registry's own, which must come back as it is.
            url = place.copy_merge_params({"digest": digest})
            try:
                with self._send("PUT", str(url), body, headers):
                    pass
            except _Missing:
                # The registry was started anew and has forgotten that this upload began.
                raise _Interrupted("the registry has lost the upload") from None

        self.persistently(send)

    def blob(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield the bytes of a blob, without trying again. Raise EnvironmentFault if they are not what was asked for."""
        sha256 = hashlib.sha256()
        count = 0
        url = f"{self.address.url}/blobs/{digest}"
        with self._send("GET", url, follow=True) as response:
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
                with self._send("GET", url, headers={"Accept": MANIFEST_TYPE}) as response:
                    content = _read(response, MOST_MANIFEST_BYTES)
            except _Missing:
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
            with self._send("PUT", url, lambda: [content], headers):
                pass

        self.persistently(send)

    def persistently(self, attempt: Callable[[], T]) -> T:
        """Call until the registry answers. Raise EnvironmentFault if it does not in the end, or has no such repository."""
        for wait in (*WAITS_SECONDS, None):
            try:
                return attempt()
            except _Missing as error:
                raise EnvironmentFault(
                    f"{self.address.host} has no repository {self.address.name}, or lacks a part of the image ({error}); "
                    "some registries want a repository made before the first push"
                ) from error
            except _Interrupted as error:
                if wait is None:
                    raise EnvironmentFault(
                        f"{self.address.host} could not be asked to the end: {error}. What has arrived stays there; run "
                        "the same command again to go on"
                    ) from error
                self._tell(f"{self.address.host}: {error}; going on in {wait:g} s")
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    @contextlib.contextmanager
    def _send(
        self,
        method: str,
        url: str,
        body: Body | None = None,
        headers: dict[str, str] | None = None,
        *,
        follow: bool = False,
    ) -> Iterator[httpx.Response]:
        """Yield the answer to a request, logged in if the registry asks for that.

        Raise _Missing for 404, _Interrupted for what another attempt may fix, EnvironmentFault for a refusal.
        """
        self._require_safe(url)
        with self._explained():
            response = self._answer(method, url, body, headers, follow=follow)
            # The first answer says which login is wanted. So does one after which a token has run out. Where the
            # registry has sent us to another host, that host must not choose who gets the login.
            is_of_registry = _origin(response.url) == self._origin
            if response.status_code == _UNAUTHORIZED and is_of_registry:
                challenge = response.headers.get("WWW-Authenticate", "")
                response.close()
                self._log_in(challenge)
                response = self._answer(method, url, body, headers, follow=follow)
            try:
                self._require_success(response)
                yield response
            finally:
                response.close()

    def _answer(
        self,
        method: str,
        url: str,
        body: Body | None,
        headers: dict[str, str] | None,
        *,
        follow: bool,
    ) -> httpx.Response:
        all_headers = dict(headers or {})
        # An upload may go to a store beside the registry, which gets no secret.
        if self._authorization and _origin(httpx.URL(url)) == self._origin:
            all_headers["Authorization"] = self._authorization
        # The body is read anew for each attempt, since an iterator is used up by the first.
        content = body() if body is not None else None
        request = self._client.build_request(method, url, content=content, headers=all_headers)
        return self._client.send(request, stream=True, follow_redirects=follow)

    def _require_safe(self, url: str) -> None:
        """Raise EnvironmentFault for an address without encryption that the registry sends us to."""
        parts = urlsplit(url)
        if parts.scheme == "https" or self.address.is_plain or is_loopback(parts.netloc):
            return
        raise EnvironmentFault(
            f"{self.address.host} names {parts.scheme}://{parts.netloc}, which is not encrypted. Nothing was sent there"
        )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise errors of the connection as _Interrupted, or as EnvironmentFault if waiting fixes nothing."""
        host = self.address.host
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            for cause in causes(error, hidden=True):
                if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
                    raise EnvironmentFault(
                        f"there is no host {host}; look at the address"
                    ) from error
                if isinstance(cause, ssl.SSLError):
                    raise EnvironmentFault(
                        f"no encrypted connection to {host}: {cause.reason or cause}. SSL_CERT_FILE names the certificates "
                        "of a registry of your own; --plain-http asks one that has none"
                    ) from error
            raise _Interrupted(first_line(error) or type(error).__name__) from error

    def _require_success(self, response: httpx.Response) -> None:
        status = response.status_code
        if response.is_success:
            return
        reason = f"{status}: {_reason(response)}"
        if status == 404:
            raise _Missing(reason)
        if status >= 500 or status in _LATER:
            raise _Interrupted(f"it answers with {reason}")
        host = self.address.host
        if _origin(response.url) != self._origin:
            raise EnvironmentFault(
                f"{host} names {response.url.host} for {self.address.name}, which refused ({reason}). No login was sent "
                "there"
            )
        if status in (_UNAUTHORIZED, 403):
            what = "docker's config has no login for it"
            if self._authorization:
                what = "the login in docker's config may not do this"
            raise EnvironmentFault(
                f"{host} refused {self.address.name} ({reason}): {what}; run `docker login {host}`"
            )
        raise EnvironmentFault(f"{host} refused {self.address.name} ({reason})")

    def _log_in(self, challenge: str) -> None:
        """Get what the registry asks for in `WWW-Authenticate`: a name and password, or a token from its server."""
        scheme, _, rest = challenge.partition(" ")
        credential = credentials.find(self.address.host)
        if scheme.lower() == "basic":
            self._authorization = credential.basic if credential else None
            return
        parameters = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if scheme.lower() != "bearer" or "realm" not in parameters:
            raise EnvironmentFault(
                f"{self.address.host} asks for a login of an unknown kind: {challenge[:100]!r}"
            )
        realm = parameters.pop("realm")
        self._require_safe(realm)
        # A token to read is refused where something is written; then the registry asks for a second one.
        request = self._token_request(realm, parameters, credential)
        response = self._client.send(request, stream=True)
        try:
            content = _read(response, _MOST_TOKEN_BYTES)
        finally:
            response.close()
        if response.status_code >= 500 or response.status_code in _LATER:
            raise _Interrupted(f"its token server answers with {response.status_code}")
        try:
            answer = json.loads(content) if response.is_success else {}
            token = answer.get("token") or answer.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        if not token:
            who = "the login in docker's config" if credential else "a request without a login"
            host = self.address.host
            raise EnvironmentFault(
                f"{urlsplit(realm).netloc} refused {who} for {host} ({response.status_code}); run `docker login {host}`"
            )
        self._authorization = f"Bearer {token}"

    def _token_request(
        self,
        realm: str,
        parameters: dict[str, str],
        credential: credentials.Credential | None,
    ) -> httpx.Request:
        """Return the question to the token server, as docker asks it: with an identity token by POST, else by GET."""
        if credential is not None and credential.identity_token:
            form = {
                **parameters,
                "grant_type": "refresh_token",
                "refresh_token": credential.identity_token,
                "client_id": "kubetune",
            }
            return self._client.build_request("POST", realm, data=form)
        headers = {"Authorization": credential.basic} if credential is not None else {}
        return self._client.build_request("GET", realm, params=parameters, headers=headers)


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    # httpx writes hosts in lower case, and leaves out a scheme's own port.
    return url.scheme, url.host, url.port


def _read(response: httpx.Response, most_bytes: int) -> bytes:
    """Return the body of an answer. What goes beyond `most_bytes` is cut off soon after."""
    content = b""
    for chunk in response.iter_raw():
        content += chunk
        if len(content) > most_bytes:
            break
    return content


def _reason(response: httpx.Response) -> str:
    """Return the first error that a registry's answer names, as the spec has it; else the status in words."""
    try:
        content = _read(response, _MOST_REASON_BYTES)
        error: Any = json.loads(content)["errors"][0]
        text = f"{error['code']} {error.get('message', '')}".strip()
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        text = response.reason_phrase
    return " ".join(text.split())[:200]
