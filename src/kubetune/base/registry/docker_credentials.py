"""Credentials for a registry, from the file that `docker login` writes and from the programs that it names."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kubetune.base.registry.address import DOCKER_HUB
from kubetune.errors import EnvironmentFault

# Under this name docker keeps the credentials for its hub.
_DOCKER_HUB_KEY: Final = "https://index.docker.io/v1/"
# A helper that gives this name gives a token in place of a password.
_TOKEN_NAME: Final = "<token>"
_HELPER_SECONDS: Final = 120.0


@dataclass(frozen=True)
class Credential:
    """A name with its password, or a token that a token server takes."""

    user: str = ""
    password: str = ""
    identity_token: str = ""

    @property
    def basic(self) -> str:
        """Return the header for basic authentication."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def config_file() -> Path:
    """Return the place of docker's config."""
    folder = os.environ.get("DOCKER_CONFIG")
    return (Path(folder) if folder else Path("~/.docker").expanduser()) / "config.json"


def find(host: str) -> Credential | None:
    """Return what docker's config has for a registry. None if it has nothing.

    As docker does: the helper of this registry, else the helper for all, else what is in the file itself. Raise
    EnvironmentFault if the file or the helper is broken.
    """
    config = _read(config_file())
    key = _DOCKER_HUB_KEY if host in DOCKER_HUB else host
    helper = _part(config, "credHelpers").get(key) or config.get("credsStore")
    if helper:
        credential = _ask(str(helper), key)
        if credential is not None:
            return credential
    entries = _part(config, "auths")
    # Older versions of docker wrote the address with its scheme.
    for name in (key, f"https://{key}", f"https://{key}/v1/", f"http://{key}"):
        if isinstance(entries.get(name), dict):
            return _of_entry(entries[name])
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise EnvironmentFault(
            f"{path}: docker's config cannot be read: {error}. Nothing was sent."
        ) from None
    return config if isinstance(config, dict) else {}


def _part(config: dict[str, Any], key: str) -> dict[str, Any]:
    part = config.get(key)
    return part if isinstance(part, dict) else {}


def _of_entry(entry: dict[str, Any]) -> Credential | None:
    """Return the credential of an entry of `auths`. docker leaves the entry empty where a helper has it."""
    token = entry.get("identitytoken")
    if token:
        return Credential(identity_token=str(token))
    if entry.get("auth"):
        try:
            pair = base64.b64decode(str(entry["auth"]), validate=True).decode().rstrip("\0")
        except ValueError:
            raise EnvironmentFault(
                f"{config_file()}: `auth` is not in base64; run `docker login` again. Nothing was sent."
            ) from None
        user, _, password = pair.partition(":")
        return Credential(user, password)
    if entry.get("username"):
        return Credential(str(entry["username"]), str(entry.get("password", "")))
    return None


def _ask(helper: str, key: str) -> Credential | None:
    """Run one of docker's helpers. None if it knows nothing of this registry."""
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run(
            [program, "get"],
            input=key,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_HELPER_SECONDS,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise _broken(program, str(error)) from None
    if done.returncode != 0:
        words = " ".join((done.stdout + done.stderr).split())
        # The protocol has no exit code for this, only these words.
        if "credentials not found" in words:
            return None
        raise _broken(program, f"exit code {done.returncode}: {words[:200]}")
    try:
        answer = json.loads(done.stdout)
        user = str(answer["Username"])
        secret = str(answer["Secret"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _broken(program, "it printed no Username with a Secret") from None
    if user == _TOKEN_NAME:
        return Credential(identity_token=secret)
    return Credential(user, secret)


def _broken(program: str, reason: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"{config_file()} names {program} for credentials, and it failed: {reason}. Nothing was sent."
    )
