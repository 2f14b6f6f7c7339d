"""Kubeconfigs as people have them: several files, programs that log in, certificates, proxies, names that differ."""

from __future__ import annotations

import base64
import json
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import signature
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from lightkube import Client, KubeConfig
from lightkube import ConfigError as ConfigErrorOfLightkube
from lightkube.config.client_adapter import user_auth
from lightkube.config.models import Cluster as ClusterOfLightkube
from lightkube.config.models import User as UserOfLightkube
from lightkube.config.models import UserExec as ProgramOfLightkube

from kubetune.cli import main
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.k8s.api.api_errors import Unreachable
from kubetune.k8s.api.client import Cluster

V1 = "client.authentication.k8s.io/v1"


class Server(ThreadingHTTPServer):
    """An API server that has nothing, and remembers who asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[dict[str, str]] = []
        self.groups: list[str] = []
        self.paths: list[str] = []
        self.subjects: list[Any] = []
        self.good_tokens: set[str] | None = None
        self.answer = ""
        self.busy: list[tuple[int, str]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.seen.append(dict(self.headers))
        if self.server.busy:
            code, seconds = self.server.busy.pop(0)
            self.send_response(code)
            self.send_header("Retry-After", seconds)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.server.groups = self.headers.get_all("Impersonate-Group") or []
        self.server.paths.append(self.path)
        if isinstance(self.connection, ssl.SSLSocket) and (
            certificate := self.connection.getpeercert()
        ):
            self.server.subjects.append(dict(pair[0] for pair in certificate["subject"]))  # type: ignore[misc]
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        good = self.server.good_tokens is None or token in self.server.good_tokens
        body = (
            {"kind": "List", "items": []}
            if good
            else {"kind": "Status", "message": "Unauthorized", "code": 401}
        )
        text = (self.server.answer or json.dumps(body)).encode()
        self.send_response(200 if good else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[Server]:
    server = Server()
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Authority:
    """Makes certificates."""

    def __init__(self, folder: Path) -> None:
        x509 = pytest.importorskip("cryptography.x509")
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        self._folder, self._x509, self._hashes, self._serial, self._ec = (
            folder,
            x509,
            hashes,
            serialization,
            ec,
        )
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        self.certificate = self._sign(self._name, self._key.public_key(), None)

    def _sign(self, name: Any, public: Any, host: str | None) -> bytes:
        x509 = self._x509
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(public)
        )
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(
            now + timedelta(hours=1)
        )
        builder = builder.add_extension(
            x509.BasicConstraints(ca=host is None, path_length=None), critical=True
        )
        public_key = self._key.public_key()
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(public), critical=False
        )
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(public_key), critical=False
        )
        if host is not None:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False
            )
        pem: bytes = builder.sign(self._key, self._hashes.SHA256()).public_bytes(
            self._serial.Encoding.PEM
        )
        return pem

    def make(self, host: str) -> tuple[bytes, bytes]:
        """Return a certificate for a host or person, and its key."""
        x509 = self._x509
        serial = self._serial
        key = self._ec.generate_private_key(self._ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
        form = (serial.Encoding.PEM, serial.PrivateFormat.PKCS8, serial.NoEncryption())
        return self._sign(name, key.public_key(), host), key.private_bytes(*form)

    def context(self, host: str, *, asks: bool = False) -> ssl.SSLContext:
        """Return the TLS context of a server, which with `asks` wants certificates of its clients."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for name, content in zip(("server.pem", "server.key"), self.make(host), strict=True):
            (self._folder / name).write_bytes(content)
        context.load_cert_chain(self._folder / "server.pem", self._folder / "server.key")
        if asks:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=self.certificate.decode())
        return context


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def kubeconfig(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: dict[str, Any],
    cluster: dict[str, Any],
    **more: Any,
) -> Path:
    config = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
        "current-context": "x",
        **more,
    }
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


def plugin(folder: Path, script: str, **facts: Any) -> dict[str, Any]:
    path = folder / "log-in"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"exec": {"apiVersion": V1, "command": "./log-in", "interactiveMode": "Never", **facts}}


def credential(**status: str | int) -> str:
    return json.dumps({"apiVersion": V1, "kind": "ExecCredential", "status": status})


def url(server: Server, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{server.server_address[1]}"


@pytest.mark.parametrize(
    ("script", "facts", "message"),
    [
        (
            "true",
            {"command": "no-such-login", "installHint": "brew install it"},
            "cannot be started: .*brew install",
        ),
        ("true", {"command": "no-such-login"}, "is it on the PATH"),
        (
            "echo 'token expired, run az login' >&2; exit 4",
            {},
            "ended with exit code 4: token expired, run az login",
        ),
        ("echo '<html>'", {}, "printed no ExecCredential"),
        ("echo '[]'", {}, "printed no ExecCredential"),
        ("echo '{}'", {}, "printed no ExecCredential"),
        (
            f"echo '{credential(expirationTimestamp='2030-01-01T00:00:00Z')}'",
            {},
            "neither a token nor a client cert",
        ),
        (
            f"echo '{credential(clientCertificateData='x', clientKeyData='y')}'",
            {},
            "certificate cannot be used",
        ),
        (r"printf '\377\376'", {}, "printed no ExecCredential"),
        (r"printf '\377\376' >&2; exit 1", {}, "ended with exit code 1"),
        ("python3 -c 'print(chr(91) * 100_000)'", {}, "printed no ExecCredential"),
        (f"echo '{credential(token=5)}'", {}, "an ExecCredential of which token is no text"),
        (
            f"echo '{credential(token='t', expirationTimestamp=5)}'",
            {},
            "of which expirationTimestamp is no text",
        ),
        (
            f"echo '{credential(clientCertificateData=5, clientKeyData=6)}'",
            {},
            "clientCertificateData is no text",
        ),
        (
            "true",
            {"env": [{"name": "A=B", "value": "x"}]},
            "cannot be started: illegal environment variable name",
        ),
        (
            "true",
            {"apiVersion": "client.authentication.k8s.io/v9"},
            "found apiVersion .*/v9; expected",
        ),
        ("true", {"interactiveMode": "Always"}, "asks for a terminal"),
        ("true", {"interactiveMode": None}, "interactiveMode is left out; expected Never, IfAv"),
        ("true", {"interactiveMode": "Sometimes"}, "interactiveMode is Sometimes; expected Never"),
    ],
)
def test_a_login_program_that_does_not_work_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    script: str, facts: dict[str, Any], message: str,
) -> None:  # fmt: skip
    with serving() as server:
        kubeconfig(
            tmp_path / "config",
            monkeypatch,
            plugin(tmp_path, script, **facts),
            {"server": url(server)},
        )
        with pytest.raises(EnvironmentFault, match=message):
            Cluster().list("ConfigMap")
        assert main(["status"]) == 3
    assert capsys.readouterr().err.startswith(f"kubetune: {tmp_path}/config: the login program")


def test_older_login_programs_may_leave_out_when_they_use_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    beta = V1.replace("v1", "v1beta1")
    facts = {"apiVersion": beta, "interactiveMode": None}
    user = plugin(tmp_path, f"echo '{credential(token='t').replace(V1, beta)}'", **facts)
    kubeconfig(tmp_path / "config", monkeypatch, user, {"server": url(server)})
    assert Cluster().list("ConfigMap") == []
    assert server.seen[0]["Authorization"] == "Bearer t"


def test_a_login_program_is_told_of_the_cluster_and_asked_again_when_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    script = f"""
    echo "$KUBERNETES_EXEC_INFO" > {tmp_path}/info
    echo x >> {tmp_path}/runs
    echo "{credential(token="TOKEN").replace('"', chr(92) + '"').replace("TOKEN", "$(wc -l < runs | tr -d ' ')")}"
    """
    extensions = [{"name": "client.authentication.k8s.io/exec", "extension": {"tenant": "t"}}]
    cluster = {"server": url(server), "tls-server-name": "api", "extensions": extensions}
    user = plugin(
        tmp_path,
        f"cd {tmp_path}\n{script}",
        provideClusterInfo=True,
        env=[{"name": "A", "value": "1"}],
    )
    kubeconfig(tmp_path / "config", monkeypatch, user, cluster)
    trusted_cluster = Cluster()
    trusted_cluster.list("ConfigMap")
    trusted_cluster.list("Pod")
    assert (tmp_path / "runs").read_text() == "x\n"
    spec = json.loads((tmp_path / "info").read_text())["spec"]
    cluster_facts = {"server": url(server), "tls-server-name": "api", "config": {"tenant": "t"}}
    assert spec == {"interactive": False, "cluster": cluster_facts}
    server.good_tokens = {"2"}
    trusted_cluster.list("Pod")
    assert [seen["Authorization"] for seen in server.seen] == [
        "Bearer 1",
        "Bearer 1",
        "Bearer 1",
        "Bearer 2",
    ]


def test_a_credential_that_has_run_out_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    answer = credential(token="t", expirationTimestamp="2020-01-01T00:00:00Z")
    user = plugin(tmp_path, f"echo x >> {tmp_path}/runs; echo '{answer}'")
    kubeconfig(tmp_path / "config", monkeypatch, user, {"server": url(server)})
    cluster = Cluster()
    cluster.list("ConfigMap")
    cluster.list("ConfigMap")
    assert (tmp_path / "runs").read_text() == "x\nx\n"


def test_a_login_program_that_fails_after_it_worked_is_asked_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    server: Server,
) -> None:
    """As on a laptop that has just woken up: its token has run out, and the network is not there yet."""
    monkeypatch.setattr("kubetune.k8s.api.login_program._PAUSE_SECONDS", 2.0)
    answer = credential(token="t", expirationTimestamp="2020-01-01T00:00:00Z")
    script = f"echo x >> {tmp_path}/runs; test $(wc -l < {tmp_path}/runs) != 2 || exit 7; echo '{answer}'"
    kubeconfig(tmp_path / "config", monkeypatch, plugin(tmp_path, script), {"server": url(server)})
    cluster = Cluster()
    cluster.list("ConfigMap")
    cluster.list("ConfigMap")
    assert (tmp_path / "runs").read_text() == "x\nx\nx\n"
    stderr = capsys.readouterr().err
    assert "ended with exit code 7: it said nothing; trying again" in stderr
    assert "asks for" not in stderr


@pytest.mark.parametrize("by", ["program", "kubeconfig"])
def test_a_client_certificate_proves_who_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Authority, by: str
) -> None:
    certificate, key = authority.make("ann")
    (tmp_path / "answer").write_text(
        credential(clientCertificateData=certificate.decode(), clientKeyData=key.decode())
    )
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    encoded = {"client-certificate-data": certificate, "client-key-data": key}
    user = plugin(tmp_path, f"cat {tmp_path}/answer")
    if by == "kubeconfig":
        user = {name: base64.b64encode(text).decode() for name, text in encoded.items()}
    with serving(authority.context("127.0.0.1.example", asks=True)) as server:
        names = {"tls-server-name": "127.0.0.1.example", "certificate-authority": "ca.pem"}
        kubeconfig(
            tmp_path / "config", monkeypatch, user, {"server": url(server, "https"), **names}
        )
        Cluster().list("ConfigMap")
        assert server.subjects == [{"commonName": "ann"}]
    if by == "kubeconfig":
        user.pop("client-key-data")
        kubeconfig(tmp_path / "config", monkeypatch, user, {"server": "https://127.0.0.1:1"})
        with pytest.raises(
            EnvironmentFault, match=r"config: client-key \(or client-key-data\) is missing"
        ):
            Cluster()


def test_a_server_of_another_name_is_known_by_tls_server_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    with serving(authority.context("api.internal")) as server:
        cluster = {
            "server": url(server, "https"),
            "certificate-authority-data": base64.b64encode(authority.certificate).decode(),
        }
        kubeconfig(tmp_path / "config", monkeypatch, {"token": "t"}, cluster)
        with pytest.raises(
            EnvironmentFault,
            match=r"does not prove who it is: .*certificate-authority and tls-server",
        ):
            Cluster().list("ConfigMap")  # at once: no patience helps
        kubeconfig(
            tmp_path / "config",
            monkeypatch,
            {"token": "t"},
            {**cluster, "tls-server-name": "api.internal"},
        )
        assert Cluster().list("ConfigMap") == []


def test_a_proxy_is_gone_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    cluster = {"server": "http://api.invalid:6443/base", "proxy-url": url(server)}
    kubeconfig(tmp_path / "config", monkeypatch, {"token": "t"}, cluster)
    Cluster().list("ConfigMap")
    assert server.paths == ["http://api.invalid:6443/base/api/v1/namespaces/ml/configmaps"]
    kubeconfig(tmp_path / "config", monkeypatch, {}, {**cluster, "proxy-url": "gopher://x"})
    with pytest.raises(
        EnvironmentFault, match=r"no connection can be made to .* \(by proxy gopher"
    ):
        Cluster()
    kubeconfig(tmp_path / "config", monkeypatch, {}, {"server": "http://api.invalid:6443"})
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(
        Unreachable, match=r"api.invalid:6443 \(by proxy http://127.0.0.1:9\) does not answer"
    ):
        Cluster(patience_seconds=0.0).list("ConfigMap")
    monkeypatch.setenv("NO_PROXY", "api.invalid")
    assert Cluster().address == "http://api.invalid:6443"


def test_a_pod_is_its_account_and_takes_the_token_anew_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    """Without a kubeconfig, by the files that Kubernetes mounts and changes; a token that has gone is a sentence."""
    for name, text in {"token": "first", "namespace": "ml\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "ca.crt").write_bytes(authority.certificate)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setattr("kubetune.k8s.api.credentials._ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
    with serving(authority.context("localhost")) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_address[1]))
        cluster = Cluster(patience_seconds=0)
        assert cluster.namespace == "ml"
        cluster.list("ConfigMap")
        (tmp_path / "token").write_text("second")
        server.good_tokens = {"second"}
        cluster.list("ConfigMap")
        assert [seen["Authorization"] for seen in server.seen] == [
            "Bearer first",
            "Bearer first",
            "Bearer second",
        ]
        (tmp_path / "token").unlink()
        server.good_tokens = set()
        with pytest.raises(EnvironmentFault, match=r"Token file .*/token not found"):
            cluster.list("ConfigMap")
    (tmp_path / "token").write_text("third")
    (tmp_path / "ca.crt").write_text("none")
    with pytest.raises(EnvironmentFault, match="the pod's account cannot be used: "):
        Cluster()


def test_data_count_before_files_and_tokens_before_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    """As with kubectl, whose own kubeconfigs may hold both."""
    data = base64.b64encode(authority.certificate).decode()
    with serving(authority.context("localhost")) as server:
        cluster = {
            "server": f"https://localhost:{server.server_address[1]}",
            "certificate-authority": "gone.pem",
            "certificate-authority-data": data,
        }
        user = {"token": "t", **plugin(tmp_path, "exit 1")}
        kubeconfig(tmp_path / "config", monkeypatch, user, cluster)
        Cluster().list("ConfigMap")
        assert server.seen[0]["Authorization"] == "Bearer t"


def test_what_lightkube_lacks_is_why_there_is_code_of_ours(tmp_path: Path) -> None:
    """Where this fails, lightkube has learned something: take it from there."""
    cluster = ClusterOfLightkube
    user = UserOfLightkube
    program = ProgramOfLightkube
    assert not {"proxy-url", "tls-server-name"} & set(cluster.__struct_encode_fields__)
    assert not {"as", "as-groups", "as-user-extra"} & set(user.__struct_encode_fields__)
    assert not {"interactiveMode", "provideClusterInfo"} & set(program.__struct_encode_fields__)
    request = httpx2.Request("GET", "http://x")
    with pytest.raises(ConfigErrorOfLightkube, match=r"client.authentication.k8s.io/v1 not impl"):
        next(user_auth(user(exec=program(V1, "true"))).sync_auth_flow(request))
    with pytest.raises(ConfigErrorOfLightkube, match="not found"):
        KubeConfig.from_file(os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert not {"since_time", "previous"} & set(signature(Client.log).parameters)
    assert "bookmarks" not in str(signature(Client.watch))
    assert "validation" not in str(signature(Client.apply))


def test_several_files_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    """As kubectl merges them: the first that says something counts, and paths begin at the file that names them."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "token").write_text("from-b\n")
    first = {
        "users": [],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "first"}}],
    }
    (tmp_path / "a" / "config").write_text(yaml.safe_dump(first))
    impersonation = {"as": "bob", "as-groups": ["dev", "ops"], "as-user-extra": {"why": ["test"]}}
    second = kubeconfig(
        tmp_path / "b" / "config",
        monkeypatch,
        {"tokenFile": "token", **impersonation},
        {"server": url(server)},
    )
    paths = [tmp_path / "a" / "config", tmp_path / "missing", second]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, paths)))
    cluster = Cluster()
    assert cluster.namespace == "first"
    cluster.list("ConfigMap")
    assert server.seen[0]["Authorization"] == "Bearer from-b"
    assert (server.seen[0]["Impersonate-User"], server.seen[0]["Impersonate-Extra-why"]) == (
        "bob",
        "test",
    )
    assert server.groups == ["dev", "ops"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"current-context": "y"}, "current-context names context y; expected one of x"),
        ({"current-context": ""}, "no current context; choose one of x"),
        ({"clusters": []}, "context x names cluster c"),
        ({"users": []}, "context x names user u"),
        ({"clusters": [{"name": "c", "cluster": {}}]}, "`server` is missing"),
        (
            {"users": [{"name": "u", "user": {"auth-provider": {"name": "gcp"}}}]},
            "auth-provider is no longer",
        ),
        ({"users": [{"name": "u", "user": {"tokenFile": "none"}}]}, "tokenFile: .*No such file"),
        (
            {
                "clusters": [
                    {"name": "c", "cluster": {"server": "x", "certificate-authority-data": "!"}}
                ]
            },
            "not base64",
        ),
        (
            {
                "clusters": [
                    {"name": "c", "cluster": {"server": "x", "certificate-authority": "no"}}
                ]
            },
            "No such file",
        ),
        (
            {"clusters": [{"name": "c", "cluster": {"server": "127.0.0.1:6443"}}]},
            "expected https://HOST:PORT",
        ),
        (
            {"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:99999"}}]},
            "expected https://HOST:PORT",
        ),
        (
            {"clusters": [{"name": "c", "cluster": {"server": "http://x", "proxy-url": 5}}]},
            "proxy-url is no text",
        ),
        ({"users": [{"name": "u", "user": {"token": "a\nb"}}]}, "user u: token is no text"),
        ({"users": [{"name": "u", "user": {"tokenFile": 5}}]}, "user u: tokenFile is no text"),
        (
            {"users": [{"name": "u", "user": {"client-key-data": 5}}]},
            "user u: client-key-data is no text",
        ),
        (
            {"users": [{"name": "u", "user": {"as": "b", "as-groups": 5}}]},
            "as-groups is no list of texts",
        ),
        (
            {"users": [{"name": "u", "user": {"as": "b", "as-user-extra": {"why": 5}}}]},
            "no kubeconfig can be read",
        ),
        ({"users": [{"name": "u", "user": {"exec": [1]}}]}, "no kubeconfig can be read"),
        (
            {"users": [{"name": "u", "user": {"exec": {"command": "x", "args": 5}}}]},
            "exec: args is no list of texts",
        ),
        (
            {"users": [{"name": "u", "user": {"exec": {"command": "x", "env": [{"name": 1}]}}}]},
            "env: name is no text",
        ),
        (
            {"users": [{"name": "u", "user": {"exec": {"apiVersion": V1}}}]},
            "`command` of the login program is missing",
        ),
        ({"users": [{"name": "u", "user": {"as": "a\nb"}}]}, "user u: as is no text"),
        (
            {"users": [{"name": "u", "user": {"tokenFile": "config"}}]},
            "tokenFile: .* more than one line of text",
        ),
        ({"clusters": "c"}, "no kubeconfig can be read from it"),
        (
            {"contexts": [{"name": "x", "context": {"cluster": "c", "namespace": "a/b"}}]},
            "config: context x: namespace is 'a/b'; expected lower-case letters, digits and hyphens, up to 63",
        ),
    ],
)
def test_a_kubeconfig_that_does_not_fit_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    kubeconfig(
        tmp_path / "config", monkeypatch, {"token": "t"}, {"server": "http://127.0.0.1:1"}, **change
    )
    with pytest.raises(EnvironmentFault, match=message):
        Cluster(patience_seconds=0).list("ConfigMap")


def test_a_namespace_that_none_can_have_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig(tmp_path / "config", monkeypatch, {"token": "t"}, {"server": "http://127.0.0.1:1"})
    for name in ("a/b", "..", "Team"):
        with pytest.raises(
            ConfigError, match=rf"^namespace is '{name}'; expected lower-case letters"
        ):
            Cluster(name)


def test_no_kubeconfig_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(EnvironmentFault, match=r"there is no kubeconfig at .*none; set KUBECONFIG"):
        Cluster()
    (tmp_path / "none").write_text("a: [")
    with pytest.raises(EnvironmentFault, match=r"none: no kubeconfig can be read from it"):
        Cluster()
    (tmp_path / "none").write_text("[" * 1_000)
    with pytest.raises(EnvironmentFault, match=r"none: no kubeconfig can be read from it"):
        Cluster()
    monkeypatch.setenv("KUBECONFIG", "~nobody-of-that-name/config")
    with pytest.raises(
        EnvironmentFault, match=r"there is no kubeconfig at ~nobody-of-that-name/config"
    ):
        Cluster()


def test_certificates_that_the_environment_names_and_that_are_none_are_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig(tmp_path / "config", monkeypatch, {"token": "t"}, {"server": "https://127.0.0.1:1"})
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "config"))
    with pytest.raises(
        EnvironmentFault,
        match=r"SSL_CERT_FILE \(.*/config\) that servers are known by cannot be read",
    ):
        Cluster()


def test_a_login_program_that_takes_long_is_spoken_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setattr("kubetune.k8s.api.login_program._REMINDER_SECONDS", 0.01)
    user = plugin(
        tmp_path,
        f"until test -e {tmp_path}/told; do sleep 0.02; done; echo '{credential(token='t')}'",
    )
    kubeconfig(tmp_path / "config", monkeypatch, user, {"server": url(server)})
    messages: list[str] = []

    def tell(text: str) -> None:
        messages.append(text)
        (tmp_path / "told").touch()

    assert Cluster(tell=tell).list("ConfigMap") == []
    assert "the login program ./log-in has said nothing for " in messages[0]


@pytest.mark.parametrize(
    "answer",
    [
        '{"error": "login required"}',
        '{"kind": "List", "items": {"a": 1}}',
        '{"kind": "List", "items": [1]}',
        '{"kind": "ConfigMap", "metadata": NaN}',
        '{"type": "ADDED", "object": {"kind": "Pod", "metadata": {}}}',
        '{"type": "ERROR", "object": {"code": "x"}}',
        "[" * 10_000,
    ],
)
@pytest.mark.parametrize(
    "ask",
    [
        lambda cluster: cluster.list("ConfigMap"),
        lambda cluster: cluster.get("ConfigMap", "fit"),
        lambda cluster: cluster.serves("JobSet"),
        lambda cluster: cluster.require_namespace(),
        lambda cluster: list(cluster.watch("Pod", seconds=1)),
    ],
)
def test_json_of_somebody_else_is_never_taken_for_the_clusters(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Server,
    answer: str,
    ask: Callable[[Cluster], object],
) -> None:
    server.answer = answer
    kubeconfig(tmp_path / "config", monkeypatch, {"token": "t"}, {"server": url(server)})
    with pytest.raises(
        EnvironmentFault, match=r"is no object of Kubernetes|broke off within a line"
    ):
        ask(Cluster(patience_seconds=0))


class Clock:
    """Time that only sleeping takes."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def monotonic(self) -> float:
        return sum(self.slept)


def test_a_server_that_asks_for_a_pause_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    kubeconfig(tmp_path / "config", monkeypatch, {"token": "t"}, {"server": url(server)})
    clock = Clock()
    messages = list[str]()
    monkeypatch.setattr("kubetune.k8s.api.connection.time", clock)
    cluster = Cluster(tell=messages.append)
    server.busy = [(429, "7"), (503, "1"), (503, "soon")]
    assert cluster.list("ConfigMap") == []
    assert clock.slept == [7, 1, 0.4]
    assert messages == [f"{url(server)} asks for 7 s without requests; trying for 60 s"]
    server.busy = [(429, "3600")] * 3  # which nobody waits for
    with pytest.raises(EnvironmentFault, match=r"the API server has too much to do \(429\)"):
        cluster.list("ConfigMap")
    assert sum(clock.slept) == 7 + 1 + 0.4 + 60
    server.busy = [(429, "5")]
    with pytest.raises(Unreachable, match="has too much to do") as error:
        next(cluster.watch("Pod", seconds=1))
    assert error.value.pause_seconds == 5
