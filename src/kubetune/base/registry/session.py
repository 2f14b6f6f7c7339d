"""One connection to a registry: each request is sent with the login that the registry asks for.

Credentials go to the registry and to the token server that it names, never to where it redirects a download.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from kubetune.base.registry import docker_credentials
from kubetune.base.registry.address import Address, is_loopback
from kubetune.errors import EnvironmentFault, causes, first_line

# Some registries copy a layer to another place before they answer that they have it.
PATIENCE_SECONDS = 600.0
_MOST_TOKEN_BYTES: Final = 1024 * 1024
_MOST_REASON_BYTES: Final = 10_000
_UNAUTHORIZED: Final = 401
# A registry that is busy or out of order may do better later; so may one that has forgotten an upload.
_LATER: Final = (408, 425, 429)

Body = Callable[[], Iterable[bytes]]


class Interrupted(Exception):
    """Another attempt may do better."""


class NotInRegistry(Exception):
    """The registry has no such blob, manifest or repository."""


class RegistrySession:
    """Sends requests to a registry, logged in if it asks for that."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._origin = _origin(httpx.URL(address.url))
        self._authorization: str | None = None
        self._client = httpx.Client(
            timeout=httpx.Timeout(PATIENCE_SECONDS, connect=30.0),
            # A body that is packed for the transfer could grow a thousandfold as it is read.
            headers={"User-Agent": "kubetune", "Accept-Encoding": "identity"},
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @contextlib.contextmanager
    def send(
        self,
        method: str,
        url: str,
        body: Body | None = None,
        headers: dict[str, str] | None = None,
        *,
        follow: bool = False,
    ) -> Iterator[httpx.Response]:
        """Yield the answer to a request, logged in if the registry asks for that.

        Raise NotInRegistry for 404, Interrupted for what another attempt may fix, EnvironmentFault for a refusal.
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
        """Raise errors of the connection as Interrupted, or as EnvironmentFault if waiting fixes nothing."""
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
            raise Interrupted(first_line(error) or type(error).__name__) from error

    def _require_success(self, response: httpx.Response) -> None:
        status = response.status_code
        if response.is_success:
            return
        reason = f"{status}: {_reason(response)}"
        if status == 404:
            raise NotInRegistry(reason)
        if status >= 500 or status in _LATER:
            raise Interrupted(f"it answers with {reason}")
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
        credential = docker_credentials.find(self.address.host)
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
            content = read_body(response, _MOST_TOKEN_BYTES)
        finally:
            response.close()
        if response.status_code >= 500 or response.status_code in _LATER:
            raise Interrupted(f"its token server answers with {response.status_code}")
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
        credential: docker_credentials.Credential | None,
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


def read_body(response: httpx.Response, most_bytes: int) -> bytes:
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
        content = read_body(response, _MOST_REASON_BYTES)
        error: Any = json.loads(content)["errors"][0]
        text = f"{error['code']} {error.get('message', '')}".strip()
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        text = response.reason_phrase
    return " ".join(text.split())[:200]
