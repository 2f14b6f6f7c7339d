"""Where credentials for an object store come from, and whether a machine or the pods of a run have any.

The libraries of the stores find them by many ways. This looks at the places alone: it reads no secret, runs no program of a
profile, and leaves it open whether the store accepts what lies there.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from kubetune.errors import ConfigError

# At this address the machines of AWS, Google and Azure learn their own role, without a key.
_OF_MACHINES: Final = ("169.254.169.254", 80)
_SECONDS: Final = 0.5


@dataclass(frozen=True)
class Origins:
    """Where the library of a store looks for credentials."""

    wanted: str  # the usual way to give them, as a command for people
    variables: re.Pattern[str]  # environment variables, one of which is enough
    files: tuple[str, ...]  # below the home folder; a variable names another place
    # The variable that, being true, keeps the library from asking the machine.
    without_role: str = ""
    contents: re.Pattern[str] = re.compile("")  # what a file of them holds


_S3 = Origins(
    wanted="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    variables=re.compile(
        r"AWS_(ACCESS_KEY_ID|PROFILE|DEFAULT_PROFILE|WEB_IDENTITY_TOKEN_FILE|CONTAINER_CREDENTIALS_.*|"
        r"SHARED_CREDENTIALS_FILE|CONFIG_FILE|EC2_METADATA_SERVICE_ENDPOINT)|BOTO_CONFIG|FSSPEC_(S3|S3A)(_.*)?"
    ),
    without_role="AWS_EC2_METADATA_DISABLED",
    files=(".aws/credentials", ".aws/config", ".boto"),
    # A file of AWS may hold only a region.
    contents=re.compile(r"access_key|role_arn|sso_|credential_process|web_identity|login_session"),
)
_GOOGLE = Origins(
    wanted="GOOGLE_APPLICATION_CREDENTIALS",
    variables=re.compile(
        r"GOOGLE_APPLICATION_CREDENTIALS|CLOUDSDK_CONFIG|STORAGE_EMULATOR_HOST|GCE_METADATA_.*|FSSPEC_(GS|GCS)(_.*)?"
    ),
    without_role="NO_GCE_CHECK",
    files=(".config/gcloud/application_default_credentials.json", ".gcs_tokens"),
)
_AZURE = Origins(
    wanted="AZURE_STORAGE_CONNECTION_STRING",
    variables=re.compile(
        r"AZURE_(STORAGE|CLIENT|TENANT|FEDERATED)_.*|(MSI|IDENTITY)_ENDPOINT|FSSPEC_(AZ|ABFS|ABFSS)(_.*)?"
    ),
    files=(".azure/azureProfile.json",),
)
ORIGINS: Final = {
    "s3": _S3,
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
}


def origins_of(address: str) -> Origins:
    """Return where credentials for the store of an address are looked for."""
    return ORIGINS[address.partition("://")[0]]


def require_credentials(address: str, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if this machine has no credentials for the store of an address.

    Nothing is refused on a machine that may have a role of its own.
    """
    origins = origins_of(address)
    if named_by(origins, environ) or _in_files(origins, environ):
        return
    is_refused = environ.get(origins.without_role, "").lower() == "true"
    if not is_refused and _may_have_role():
        return
    raise ConfigError(
        f"mirror: there are no credentials for {address}: set {origins.wanted}, or write them to ~/{origins.files[0]}. "
        "Nothing was sent."
    )


def named_by(origins: Origins, variables: Iterable[str]) -> bool:
    """True if one of these environment variables gives credentials."""
    return any(origins.variables.fullmatch(name) for name in variables)


def _in_files(origins: Origins, environ: Mapping[str, str]) -> bool:
    """True if a file of the user's holds credentials, or settings of fsspec, which may."""
    home = Path(environ.get("HOME") or Path.home())
    settings = Path(environ.get("FSSPEC_CONFIG_DIR") or home / ".config" / "fsspec")
    if any(settings.glob("*.json")) or any(settings.glob("*.ini")):
        return True
    for name in origins.files:
        try:
            text = (home / name).read_text("utf-8", errors="replace")
        except IsADirectoryError:
            return True
        except OSError:
            continue
        if origins.contents.search(text):
            return True
    return False


@lru_cache(maxsize=1)
def _may_have_role() -> bool:
    """True if something answers at the address at which a machine of a cloud learns its role."""
    try:
        socket.create_connection(_OF_MACHINES, _SECONDS).close()
    except OSError:
        return False
    return True
