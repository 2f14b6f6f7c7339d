"""Programs that log people in (`exec` of a kubeconfig), as kubectl runs them.

lightkube runs those of older versions alone and takes nothing but a token; kr8s tells them nothing of the cluster and
leaves the keys that they give on the disk. Neither shows what a program asks of the person at the terminal.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from lightkube.config.models import FileStr

from kubetune.base.reminders import reminding
from kubetune.errors import EnvironmentFault
from kubetune.k8s.api.api_errors import NotLoggedIn
from kubetune.k8s.api.kubeconfig import (
    ClusterEntry,
    LoginProgram,
    beside,
    build_decoders,
    convert,
)

_VERSIONS = (
    "client.authentication.k8s.io/v1",
    "client.authentication.k8s.io/v1beta1",
    "client.authentication.k8s.io/v1alpha1",
)
_MODES = ("Never", "IfAvailable", "Always")
_EXTENSION = "client.authentication.k8s.io/exec"
_UNAUTHORIZED = 401
_REMINDER_SECONDS = 15.0
# A token is not used up to its last moment: clocks differ, and a request takes its time.
_MARGIN_SECONDS = 10.0
# How long a program is left alone that fails after it has worked.
_PAUSE_SECONDS = 10.0


class Credential(msgspec.Struct):
    """What a program gives: a token, a client certificate with its key, or both."""

    token: str | None = None
    clientCertificateData: str | None = None
    clientKeyData: str | None = None
    expirationTimestamp: str | None = None

    def until(self) -> float:
        """Return until when it may be used, in seconds since the epoch; for ever where it has no end."""
        try:
            end = datetime.fromisoformat(self.expirationTimestamp or "")
        except ValueError:
            return float("inf")
        return end.timestamp() - _MARGIN_SECONDS


build_decoders(Credential)


class ExecLogin(httpx2.Auth):
    """Signs requests with what a program gives. It is run at the first request, and when the server refuses that.

    A program that fails after it has worked may only miss the network, as on a laptop that has just woken up. Then
    NotLoggedIn is raised, and who follows a run asks again.
    """

    def __init__(
        self,
        program: LoginProgram,
        cluster: ClusterEntry,
        verify: ssl.SSLContext,
        file: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._program = program
        self._cluster = cluster
        self._verify = verify
        self._file = file
        self._tell = tell
        self._lock = threading.Lock()
        self._credential = Credential()
        self._until = 0.0  # the credential may be used, in seconds since the epoch
        self._runs = 0  # of the program, that succeeded
        self._failure: NotLoggedIn | None = None  # the last one since the program worked
        self._failed_until = 0.0  # the program is not run again before, by time.monotonic()

    def sync_auth_flow(
        self, request: httpx2.Request
    ) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Sign a request, and once more with a new credential where the server refuses the first."""
        run = self._log_in(0)
        self._sign(request)
        response = yield request
        if response.status_code == _UNAUTHORIZED:
            self._log_in(run)
            self._sign(request)
            yield request

    def _sign(self, request: httpx2.Request) -> None:
        """Add the token, if there is one; a certificate is the connection's."""
        if self._credential.token:
            request.headers["Authorization"] = f"Bearer {self._credential.token}"

    def _log_in(self, refused: int) -> int:
        """Run the program unless what it last gave still holds; return the number of that run.

        `refused` is the run whose credential the server refused, 0 for none.
        """
        with self._lock:
            # Another thread may have run it meanwhile, and then `_runs` is higher.
            if self._runs == refused or datetime.now(UTC).timestamp() > self._until:
                self._credential = self._renewed()
                self._until = self._credential.until()
                self._runs += 1
            return self._runs

    def _renewed(self) -> Credential:
        """Return what the program gives. Raise NotLoggedIn where it fails though it has worked before."""
        if self._failure is not None and time.monotonic() < self._failed_until:
            raise self._failure
        try:
            credential = self._take(self._ask())
        except EnvironmentFault as fault:
            if not self._runs:
                raise
            if self._failure is None:
                self._tell(f"{fault}; trying again")
            self._failure = NotLoggedIn(str(fault), _PAUSE_SECONDS)
            self._failed_until = time.monotonic() + _PAUSE_SECONDS
            raise self._failure from None
        self._failure = None
        return credential

    def _take(self, credential: Credential) -> Credential:
        """Have connections show the certificate, if there is one. Raise EnvironmentFault without any credential."""
        certificate = credential.clientCertificateData
        key = credential.clientKeyData
        if certificate and key:
            # ssl reads them from files only; lightkube deletes its files when these objects go.
            certificate_file = FileStr(base64.b64encode(certificate.encode()).decode())
            key_file = FileStr(base64.b64encode(key.encode()).decode())
            try:
                self._verify.load_cert_chain(certificate_file, key_file)
            # Errors of ssl are OSErrors.
            except OSError as error:
                raise self._fault(f": the client certificate cannot be used: {error}") from None
        elif not credential.token:
            raise self._fault(" gave neither a token nor a client certificate with its key")
        return credential

    def _ask(self) -> Credential:
        """Run the program and return what it printed. Raise EnvironmentFault where that is no credential."""
        is_interactive = self._may_use_terminal()
        done = self._run(is_interactive)
        if done.returncode != 0:
            words = (done.stderr or "").strip() or "it said nothing"
            raise self._fault(f" ended with exit code {done.returncode}: {words}")
        try:
            answer = json.loads(done.stdout)
            is_credential = answer["kind"] == "ExecCredential" and isinstance(
                answer["status"], dict
            )
        except (ValueError, LookupError, TypeError, RecursionError):
            is_credential = False
        if not is_credential:
            raise self._fault(" printed no ExecCredential with a status")
        try:
            return convert(answer["status"], Credential)
        except ValueError as error:
            raise self._fault(f" printed an ExecCredential of which {error}") from None

    def _may_use_terminal(self) -> bool:
        """True if the program may ask the person at the terminal. Raise EnvironmentFault where it cannot be run."""
        program = self._program
        if not program.command:
            raise EnvironmentFault(f"{self._file}: `command` of the login program is missing")
        if program.apiVersion not in _VERSIONS:
            expected = ", ".join(_VERSIONS)
            raise self._fault(f": found apiVersion {program.apiVersion}; expected {expected}")
        mode = program.interactiveMode
        if not mode and program.apiVersion != _VERSIONS[0]:
            mode = "IfAvailable"
        if mode not in _MODES:
            expected = ", ".join(_MODES)
            raise self._fault(f": interactiveMode is {mode or 'left out'}; expected {expected}")
        has_terminal = sys.stdin is not None and sys.stdin.isatty()
        if mode == "Always" and not has_terminal:
            raise self._fault(" asks for a terminal, and there is none; log in from one first")
        return mode != "Never" and has_terminal

    def _run(self, is_interactive: bool) -> subprocess.CompletedProcess[str]:
        """Run the program to its end. Raise EnvironmentFault where it cannot be started."""
        program = self._program
        command = program.command
        # A bare name is looked up on the PATH.
        if os.sep in command:
            command = str(beside(self._file, command))
        variables = {entry.name: entry.value for entry in program.env}
        variables["KUBERNETES_EXEC_INFO"] = json.dumps(self._info(is_interactive))
        try:
            with reminding(self._remind, _REMINDER_SECONDS):
                return subprocess.run(
                    [command, *program.args],
                    env={**os.environ, **variables},
                    stdin=None if is_interactive else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    # What it says is for the person who is to open a page or type a code.
                    stderr=None if is_interactive else subprocess.PIPE,
                    text=True,
                    errors="replace",
                    check=False,
                )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            hint = program.installHint.strip()
            raise self._fault(f" cannot be started: {reason}; {hint}") from None

    def _remind(self, taken: str) -> None:
        self._tell(f"{self._name()} has said nothing for {taken}")

    def _info(self, is_interactive: bool) -> dict[str, Any]:
        """Return the input of the program: facts on us and, if it asks for them, on the cluster."""
        spec: dict[str, Any] = {"interactive": is_interactive}
        if self._program.provideClusterInfo:
            cluster = self._cluster
            facts: dict[str, Any] = {
                "server": cluster.server,
                "tls-server-name": cluster.tls_server_name,
                "insecure-skip-tls-verify": cluster.insecure,
                "certificate-authority-data": cluster.certificate_auth_data,
                "proxy-url": cluster.proxy_url,
            }
            for extension in cluster.extensions:
                if extension.get("name") == _EXTENSION:
                    facts["config"] = extension.get("extension")
            spec["cluster"] = {key: fact for key, fact in facts.items() if fact}
        return {"apiVersion": self._program.apiVersion, "kind": "ExecCredential", "spec": spec}

    def _name(self) -> str:
        return f"{self._file}: the login program {self._program.command}"

    def _fault(self, text: str) -> EnvironmentFault:
        return EnvironmentFault(f"{self._name()}{text}")
