"""The kubeconfig files that kubectl reads, as one.

lightkube reads one file and keeps a part of it, so its models are extended here. kr8s reads several files, but knows
neither `tokenFile` nor impersonation. A test fails once lightkube can do all of this.
"""

from __future__ import annotations

import base64
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from lightkube.config import models
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kubetune.errors import EnvironmentFault


class ClusterEntry(models.Cluster):
    """A cluster, with its proxy, its name in certificates, and what login programs get to know of it."""

    server: str = ""
    tls_server_name: str | None = msgspec.field(name="tls-server-name", default=None)
    proxy_url: str | None = msgspec.field(name="proxy-url", default=None)
    extensions: list[dict[str, Any]] = msgspec.field(default_factory=list)


class EnvironmentVariable(msgspec.Struct):
    """Variable of a login program."""

    name: str
    value: str = ""


class LoginProgram(msgspec.Struct):
    """Program that logs people in."""

    apiVersion: str = ""
    command: str = ""
    args: list[str] = msgspec.field(default_factory=list)
    env: list[EnvironmentVariable] = msgspec.field(default_factory=list)
    installHint: str = "is it on the PATH?"
    interactiveMode: str = ""
    provideClusterInfo: bool = False


class UserEntry(models.User):
    """A user, with the identity that they impersonate."""

    # lightkube's own model of it knows a part of the keys.
    exec: LoginProgram | None = None  # type: ignore[assignment]
    as_user: str = msgspec.field(name="as", default="")
    as_uid: str = msgspec.field(name="as-uid", default="")
    as_groups: list[str] = msgspec.field(name="as-groups", default_factory=list)
    as_extra: dict[str, list[str]] = msgspec.field(name="as-user-extra", default_factory=dict)


class ContextEntry(models.Context):
    """A context: which cluster, as which user, in which namespace."""

    cluster: str = ""


_MODELS: dict[str, Any] = {"cluster": ClusterEntry, "user": UserEntry, "context": ContextEntry}
# What may be in a file, with the names that lightkube has for it.
_CONTENTS = {
    "certificate-authority": "certificate_auth",
    "client-certificate": "client_cert",
    "client-key": "client_key",
}
_NOT_READ = (OSError, YAMLError, RecursionError, ValueError, TypeError, LookupError, AttributeError)
# How messages describe a value of a wrong type, by msgspec's name for the expected type.
_EXPECTED = {"str": "no text", "bool": "neither true nor false", "array": "no list of texts"}
_MISFIT = re.compile(r"Expected `(?P<type>\w+)[^`]*`, got `\w+`(?: - at `\$\.?(?P<path>[^`]*)`)?")

S = TypeVar("S")


class Kubeconfig:
    """All files as one: of entries with the same name the first counts, as for kubectl.

    Raise EnvironmentFault where kubectl refuses them.
    """

    def __init__(self, files: list[Path]) -> None:
        self.name = os.pathsep.join(map(str, files))
        self.current = ""  # name of the current context
        # By kind and name: each entry with the file that it is from.
        self._entries: dict[str, dict[str, tuple[Any, Path]]] = {kind: {} for kind in _MODELS}
        for path in files:
            # Files of any content: all that a reader of YAML and our models may raise.
            try:
                self._add(YAML(typ="safe", pure=True).load(path) or {}, path)
            except _NOT_READ as error:
                reason = str(error).replace("\n", " ") or type(error).__name__
                raise EnvironmentFault(
                    f"{path}: no kubeconfig can be read from it: {reason}"
                ) from None

    def _add(self, content: dict[str, Any], path: Path) -> None:
        """Add the entries of a file. An entry that an earlier file has is kept."""
        for kind, model in _MODELS.items():
            for entry in content.get(f"{kind}s") or []:
                name = str(entry["name"])
                parsed = convert(entry.get(kind) or {}, model, f"{kind} {name}: ")
                # The first file that names it counts.
                self._entries[kind].setdefault(name, (parsed, path))
        self.current = self.current or str(content.get("current-context") or "")

    def names(self, kind: str) -> str:
        """Return the names of all entries, for messages."""
        return ", ".join(self._entries[kind]) or "those of the file, which has none"

    def entry(self, kind: str, name: str | None, who: str) -> tuple[Any, Path]:
        """Return the entry of that name with its files' contents, and the file it is from. `who` refers to it."""
        if name not in self._entries[kind]:
            raise EnvironmentFault(
                f"{self.name}: {who} names {kind} {name}; expected one of {self.names(kind)}"
            )
        entry, file = self._entries[kind][name]
        # Read here, since paths are relative to the kubeconfig's folder, which lightkube does not know.
        for key, attribute in _CONTENTS.items():
            if hasattr(entry, attribute):
                setattr(entry, f"{attribute}_data", _data(entry, key, attribute, file))
                setattr(entry, attribute, None)
        return entry, file


def _data(entry: Any, key: str, attribute: str, file: Path) -> str | None:
    """Return the content of `key-data`, or of the file that `key` names, as base64."""
    data: str | None = getattr(entry, f"{attribute}_data")
    path = getattr(entry, attribute)
    if path and not data:
        return base64.b64encode(content(file, key, path)).decode()
    try:
        base64.b64decode(data or "", validate=True)
    except ValueError:
        raise EnvironmentFault(f"{file}: {key}-data is not base64") from None
    return data


def content(file: Path, key: str, path: str) -> bytes:
    """Return what is in a file that a key of the kubeconfig `file` names."""
    try:
        return beside(file, path).read_bytes()
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{file}: {key}: {error}") from None


def beside(file: Path, path: str) -> Path:
    """Return a path as the kubeconfig `file` means it: relative to its folder."""
    return file.parent / os.path.expanduser(path)


def build_decoders(*types: type) -> None:
    """Have msgspec build what it reads these types with, before there are threads.

    It builds that at the first use of a type, without a lock: two threads that are first at once crash the process.
    """
    for model in types:
        # A value with no required field does not fit, but by then the decoder is built.
        with suppress(msgspec.ValidationError):
            msgspec.json.decode(b"{}", type=model)


def convert(section: Any, model: type[S], where: str = "") -> S:
    """Return what was read as a model. Raise ValueError naming the key that does not fit."""
    try:
        return msgspec.convert(_without_nulls(section), model)
    except msgspec.ValidationError as error:
        match = _MISFIT.match(str(error))
        if match is None or match["type"] not in _EXPECTED:
            raise ValueError(f"{where}{error}") from None
        # exec.args[0] becomes "exec: args".
        path = re.sub(r"\[[^]]*\]", "", match["path"] or "").replace(".", ": ")
        raise ValueError(f"{where}{path} is {_EXPECTED[match['type']]}") from None


def _without_nulls(value: Any) -> Any:
    """Return a value in which keys that hold nothing are left out, as kubectl reads it."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


build_decoders(*_MODELS.values())
