"""Cluster and identity: what kubectl would read from its kubeconfig files, and the programs that log people in.

Not for asking an API server anything: that is client.py's.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from kubetune.base.reminders import reminding
from kubetune.config.schema.cluster import DNS_LABEL
from kubetune.errors import EnvironmentFault

Section = dict[str, Any]

_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_DEFAULT = "~/.kube/config"
_VERSIONS = tuple(
    f"client.authentication.k8s.io/{version}" for version in ("v1", "v1beta1", "v1alpha1")
)
_MODES = ("Never", "IfAvailable", "Always")
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"
_UNAUTHORIZED = 401
# Fields as kubectl takes them; others are not looked at.
_TEXTS = (
    "cluster", "user", "namespace", "server", "tls-server-name", "proxy-url", "certificate-authority",
    "certificate-authority-data", "client-certificate", "client-certificate-data", "client-key", "client-key-data",
    "token", "tokenFile", "username", "password", "as", "as-uid", "apiVersion", "command", "interactiveMode",
    "installHint", "name", "value", "clientCertificateData", "clientKeyData", "expirationTimestamp",
)  # fmt: skip
_OF_HEADERS = ("token", "as", "as-uid")
_LISTS = ("args", "as-groups")
_SWITCHES = ("insecure-skip-tls-verify", "provideClusterInfo")
_REMINDER_SECONDS = 15.0
# A token is not used up to its last moment: clocks differ, and a request takes its time.
_MARGIN_SECONDS = 10.0


@dataclass(frozen=True)
class Login:
    """Everything that a connection to an API server is made from."""

    server: str
    namespace: str
    verify: ssl.SSLContext
    auth: httpx2.Auth | None = None
    proxy: str | None = None
    tls_server_name: str | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)

    @property
    def way(self) -> str:
        """The server, and the proxy that requests to it go by: the kubeconfig's, or the environment's (HTTPS_PROXY)."""
        try:
            parts = urlsplit(self.server)
            known = {} if proxy_bypass(parts.hostname or "") else getproxies()
        except ValueError:  # no address at all
            known = {}
        proxy = self.proxy or (known.get(parts.scheme) or known.get("all") if known else None)
        return f"{self.server} (by proxy {proxy})" if proxy else self.server


def read_login(tell: Callable[[str], None]) -> Login:
    """The login of the current context, as kubectl finds it; in a pod without a kubeconfig, that of its account.

    `tell` learns that a program which logs in takes long. Raises EnvironmentFault saying what is wrong, and in which
    file.
    """
    named = [
        Path(os.path.expanduser(name))
        for name in os.environ.get("KUBECONFIG", "").split(os.pathsep)
        if name
    ]
    files = [path for path in named or [Path(os.path.expanduser(_DEFAULT))] if os.path.isfile(path)]
    if files:
        return _login(_merged(files), tell)
    if not named and (_IN_CLUSTER / "token").is_file() and "KUBERNETES_SERVICE_HOST" in os.environ:
        return _account()
    where = " or ".join(map(str, named)) or _DEFAULT
    raise EnvironmentFault(
        f"there is no kubeconfig at {where}; set KUBECONFIG to one, or copy it there"
    )


def _merged(files: list[Path]) -> Section:
    """All files as one: of what several say the first counts. Relative paths become those they were meant as."""
    merged: Section = {"clusters": {}, "users": {}, "contexts": {}}
    for path in files:
        try:
            found = YAML(typ="safe", pure=True).load(path) or {}
            for plural, singular in (
                ("clusters", "cluster"),
                ("users", "user"),
                ("contexts", "context"),
            ):
                for entry in found.get(plural) or []:
                    section = {
                        **_checked(entry.get(singular) or {}, f"{singular} {entry['name']}: "),
                        "file": path,
                    }
                    merged[plural].setdefault(str(entry["name"]), section)
            current = found.get("current-context")
        except (
            OSError,
            ValueError,
            YAMLError,
            AttributeError,
            KeyError,
            TypeError,
            RecursionError,
        ) as error:
            said = str(error).replace("\n", " ") or type(error).__name__
            raise EnvironmentFault(f"{path}: no kubeconfig can be read from it: {said}") from None
        if current and "current" not in merged:
            merged["current"] = str(current)
    merged["files"] = os.pathsep.join(map(str, files))
    return merged


def _checked(section: Section, where: str) -> Section:
    """A part of a kubeconfig, or of what a login program prints. Raises ValueError where kubectl would refuse it."""
    for key, value in section.items():
        if value is None:
            continue
        is_text = isinstance(value, str) and "\0" not in value
        if key in _OF_HEADERS:
            is_text = is_text and value.strip().isprintable()
        if key in _TEXTS and not is_text:
            raise ValueError(f"{where}{key} is no text")
        if key in _LISTS and not (
            isinstance(value, list) and all(isinstance(one, str) for one in value)
        ):
            raise ValueError(f"{where}{key} is no list of texts")
        if key in _SWITCHES and not isinstance(value, bool):
            raise ValueError(f"{where}{key} is neither true nor false")
        if key == "as-user-extra":
            _checked(
                {"args": [text for texts in value.values() for text in texts]}, f"{where}{key}: "
            )
        if key == "exec":
            _checked(value, f"{where}exec: ")
            for entry in value.get("env") or []:
                _checked(
                    {"name": entry["name"], "value": entry.get("value")}, f"{where}exec: env: "
                )
    return section


def _login(config: Section, tell: Callable[[str], None]) -> Login:
    if "current" not in config:
        raise EnvironmentFault(
            f"{config['files']}: no current context; choose one of {_names(config['contexts'])}: "
            "kubectl config use-context NAME"
        )
    context = _entry(config, "contexts", config["current"], "current-context")
    cluster = _entry(config, "clusters", context.get("cluster"), f"context {config['current']}")
    user = (
        _entry(config, "users", context["user"], f"context {config['current']}")
        if context.get("user")
        else {}
    )
    if not cluster.get("server"):
        raise EnvironmentFault(
            f"{cluster['file']}: cluster {context.get('cluster')}: `server` is missing"
        )
    if user.get("auth-provider"):
        raise EnvironmentFault(
            f"{user['file']}: user {context['user']}: auth-provider is no longer understood, by kubectl neither; "
            "have the kubeconfig made anew by your cloud's command, which writes `exec` instead"
        )
    verify = _trusted(cluster)
    try:
        server = urlsplit(cluster["server"])
        is_address = (
            server.scheme in ("http", "https") and bool(server.hostname) and (server.port or 1) > 0
        )
    except ValueError:
        is_address = False
    if not is_address:
        expected = "expected https://HOST:PORT"
        raise EnvironmentFault(f"{cluster['file']}: `server` is {cluster['server']}; {expected}")
    namespace = str(context.get("namespace") or "default")
    if told := not_a_namespace(namespace):
        raise EnvironmentFault(f"{context['file']}: context {config['current']}: {told}")
    return Login(
        server=str(cluster["server"]),
        namespace=namespace,
        verify=verify,
        auth=_auth(user, cluster, verify, tell),
        proxy=cluster.get("proxy-url"),
        tls_server_name=cluster.get("tls-server-name"),
        headers=_impersonation(user),
    )


def not_a_namespace(name: str) -> str:
    """The fault of a name that no namespace can have; empty for others."""
    expected = "expected lower-case letters, digits and hyphens, up to 63"
    return "" if re.fullmatch(DNS_LABEL, name) else f"namespace is {name!r}; {expected}"


def _account() -> Login:
    """A pod's own credentials: the token of its service account, which changes now and then."""
    host, port = (
        os.environ["KUBERNETES_SERVICE_HOST"],
        os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
    )
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    namespace = _text({"file": _IN_CLUSTER}, "namespace", _IN_CLUSTER / "namespace")
    verify = _trusted({"certificate-authority": str(_IN_CLUSTER / "ca.crt"), "file": _IN_CLUSTER})
    auth = _bearer(lambda: _text({"file": _IN_CLUSTER}, "tokenFile", _IN_CLUSTER / "token"))
    return Login(server, namespace, verify, auth)


def _entry(config: Section, plural: str, name: object, who: str) -> Section:
    found: Section | None = config[plural].get(str(name))
    if found is None:
        raise EnvironmentFault(
            f"{config['files']}: {who} names {plural[:-1]} {name}; expected one of {_names(config[plural])}"
        )
    return found


def _names(found: Mapping[str, object]) -> str:
    return ", ".join(found) or "those of the file, which has none"


def _path(section: Section, name: str) -> Path:
    return Path(section["file"]).parent / Path(name).expanduser()


def _text(section: Section, key: str, path: Path) -> str:
    try:
        text = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{section['file']}: {key}: {error}") from None
    if not text.isprintable():
        raise EnvironmentFault(f"{section['file']}: {key}: {path} holds more than one line of text")
    return text


def _bytes(section: Section, key: str) -> bytes | None:
    """Content of `key-data`, or of the file that `key` names."""
    if data := section.get(f"{key}-data"):
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise EnvironmentFault(f"{section['file']}: {key}-data is not base64") from None
    if name := section.get(key):
        try:
            return _path(section, name).read_bytes()
        except OSError as error:
            raise EnvironmentFault(f"{section['file']}: {key}: {error}") from None
    return None


def _trusted(cluster: Section) -> ssl.SSLContext:
    """Proof that the server is the one that is meant."""
    if authority := _bytes(cluster, "certificate-authority"):
        try:
            return ssl.create_default_context(cadata=authority.decode())
        except (ssl.SSLError, ValueError) as error:
            raise EnvironmentFault(
                f"{cluster['file']}: certificate-authority: no certificates in PEM: {error}"
            ) from None
    try:
        return httpx2.create_ssl_context(verify=not cluster.get("insecure-skip-tls-verify"))
    except OSError as error:
        where = (
            f" of SSL_CERT_FILE ({os.environ['SSL_CERT_FILE']})"
            if "SSL_CERT_FILE" in os.environ
            else ""
        )
        raise EnvironmentFault(
            f"the certificates{where} that servers are known by cannot be read: {error}"
        ) from None


def _load_certificate(verify: ssl.SSLContext, certificate: bytes, key: bytes, where: str) -> None:
    """Have connections show a certificate. Raises EnvironmentFault when it and its key do not belong together."""
    # ssl reads them from files only; these are ours alone, and gone at once.
    with tempfile.NamedTemporaryFile() as first, tempfile.NamedTemporaryFile() as second:
        for file, content in ((first, certificate), (second, key)):
            file.write(content)
            file.flush()
        try:
            verify.load_cert_chain(first.name, second.name)
        except (ssl.SSLError, OSError) as error:
            raise EnvironmentFault(
                f"{where}: the client certificate cannot be used: {error}"
            ) from None


def _auth(
    user: Section, cluster: Section, verify: ssl.SSLContext, tell: Callable[[str], None]
) -> httpx2.Auth | None:
    certificate, key = _bytes(user, "client-certificate"), _bytes(user, "client-key")
    if certificate and key:
        _load_certificate(verify, certificate, key, str(user["file"]))
    elif certificate or key:
        missing = "client-key" if certificate else "client-certificate"
        raise EnvironmentFault(f"{user['file']}: {missing} (or {missing}-data) is missing")
    if user.get("exec"):
        return _ExecLogin(user, cluster, verify, tell)
    if user.get("tokenFile"):
        file = _path(user, user["tokenFile"])
        return _bearer(lambda: _text(user, "tokenFile", file))
    if user.get("token"):
        token = user["token"].strip()
        return _bearer(lambda: token)
    if user.get("username") and user.get("password"):
        return httpx2.BasicAuth(user["username"], user["password"])
    return None


def _impersonation(user: Section) -> list[tuple[str, str]]:
    """As whom to act, where the kubeconfig says so."""
    if not user.get("as"):
        return []
    headers = [("Impersonate-User", str(user["as"]))]
    headers += [("Impersonate-Group", str(group)) for group in user.get("as-groups") or []]
    headers += [("Impersonate-Uid", str(user["as-uid"]))] if user.get("as-uid") else []
    extra = user.get("as-user-extra") or {}
    return headers + [
        (f"Impersonate-Extra-{key}", str(text)) for key, texts in extra.items() for text in texts
    ]


def _bearer(token: Callable[[], str]) -> httpx2.Auth:
    """Requests with a token that is looked up for each of them, as somebody else may renew the file that it is in."""

    def sign(request: httpx2.Request) -> httpx2.Request:
        request.headers["Authorization"] = f"Bearer {token()}"
        return request

    return httpx2.FunctionAuth(sign)


class _ExecLogin(httpx2.Auth):
    """A program that gives us a token or a client certificate, asked when the first request is made."""

    def __init__(
        self, user: Section, cluster: Section, verify: ssl.SSLContext, tell: Callable[[str], None]
    ) -> None:
        self._program, self._cluster, self._verify, self._tell = (
            dict(user["exec"]),
            cluster,
            verify,
            tell,
        )
        self._file = user["file"]
        self._lock = threading.Lock()
        self._token: str | None = None
        self._runs, self._until = 0, 0.0

    def sync_auth_flow(
        self, request: httpx2.Request
    ) -> Generator[httpx2.Request, httpx2.Response, None]:
        run = self._log_in(0)
        self._sign(request)
        response = yield request
        if response.status_code == _UNAUTHORIZED:
            self._log_in(run)
            self._sign(request)
            yield request

    def _sign(self, request: httpx2.Request) -> None:
        if self._token:
            request.headers["Authorization"] = f"Bearer {self._token}"

    def _log_in(self, refused: int) -> int:
        """Run the program unless what it last gave still holds; `refused` is the run whose gift the server refused."""
        with self._lock:
            if self._runs == refused or datetime.now(UTC).timestamp() > self._until:
                status = self._ask()
                self._token = status.get("token")
                certificate, key = status.get("clientCertificateData"), status.get("clientKeyData")
                if certificate and key:
                    _load_certificate(self._verify, certificate.encode(), key.encode(), self._who())
                elif not self._token:
                    raise EnvironmentFault(
                        f"{self._who()} gave neither a token nor a client certificate with its key"
                    )
                self._until = _until(status.get("expirationTimestamp"))
                self._runs += 1
            return self._runs

    def _who(self) -> str:
        return f"{self._file}: the login program {self._program.get('command')}"

    def _ask(self) -> Section:
        program = self._program
        if program.get("apiVersion") not in _VERSIONS:
            expected = ", ".join(_VERSIONS)
            raise EnvironmentFault(
                f"{self._who()}: found apiVersion {program.get('apiVersion')}; expected {expected}"
            )
        if not (command := program.get("command")):
            raise EnvironmentFault(f"{self._file}: `command` of the login program is missing")
        mode = self._mode()
        is_interactive = mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
        if mode == "Always" and not is_interactive:
            raise EnvironmentFault(
                f"{self._who()} asks for a terminal, and there is none; log in from one first"
            )
        argv = [str(_path({"file": self._file}, command)) if os.sep in command else command]
        environ = {entry["name"]: entry.get("value") or "" for entry in program.get("env") or []}
        environ["KUBERNETES_EXEC_INFO"] = json.dumps(self._info(is_interactive))
        try:
            with reminding(
                lambda taken: self._tell(f"{self._who()} has said nothing for {taken}"),
                _REMINDER_SECONDS,
            ):
                done = subprocess.run(
                    [*argv, *(program.get("args") or [])],
                    env={**os.environ, **environ},
                    stdin=None if is_interactive else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    # What it says is for the person who is to open a page or type a code.
                    stderr=None if is_interactive else subprocess.PIPE,
                    text=True,
                    errors="replace",
                    check=False,
                )
        except (OSError, ValueError) as error:
            hint = (
                f"; {program['installHint'].strip()}"
                if program.get("installHint")
                else "; is it on the PATH?"
            )
            said = error.strerror if isinstance(error, OSError) else error
            raise EnvironmentFault(f"{self._who()} cannot be started: {said}{hint}") from None
        if done.returncode != 0:
            said = (done.stderr or "").strip() or "it said nothing"
            raise EnvironmentFault(f"{self._who()} ended with exit code {done.returncode}: {said}")
        try:
            answer = json.loads(done.stdout)
            if answer["kind"] == "ExecCredential" and isinstance(answer["status"], dict):
                return _checked(answer["status"], "")
            what = "no ExecCredential with a status"
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            told = type(error) is ValueError  # by _checked
            what = (
                f"an ExecCredential of which {error}" if told else "no ExecCredential with a status"
            )
        raise EnvironmentFault(f"{self._who()} printed {what}")

    def _mode(self) -> str:
        """When the program may use the terminal. As kubectl has it, only older versions may leave it out."""
        mode = self._program.get("interactiveMode")
        if mode is None and self._program["apiVersion"] != _VERSIONS[0]:
            return "IfAvailable"
        if mode not in _MODES:
            raise EnvironmentFault(
                f"{self._who()}: interactiveMode is {mode or 'left out'}; expected {', '.join(_MODES)}"
            )
        return str(mode)

    def _info(self, is_interactive: bool) -> Section:
        """Facts that the program is told of us, as KUBERNETES_EXEC_INFO."""
        spec: Section = {"interactive": is_interactive}
        if self._program.get("provideClusterInfo"):
            kept = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url")
            known = {key: self._cluster[key] for key in kept if self._cluster.get(key)}
            if authority := _bytes(self._cluster, "certificate-authority"):
                known["certificate-authority-data"] = base64.b64encode(authority).decode()
            extensions = self._cluster.get("extensions") or []
            own = [
                entry.get("extension")
                for entry in extensions
                if entry.get("name") == _EXEC_EXTENSION
            ]
            spec["cluster"] = {**known, **({"config": own[0]} if own else {})}
        return {"apiVersion": self._program["apiVersion"], "kind": "ExecCredential", "spec": spec}


def _until(stamp: str | None) -> float:
    """Until when, in seconds since the epoch, a credential may be used; for ever where nothing is said."""
    if not stamp:
        return float("inf")
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp() - _MARGIN_SECONDS
    except ValueError:
        return float("inf")
