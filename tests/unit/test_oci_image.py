"""Pushes of an export to a registry: whole or not at all, gone on with, compared, and refused in words."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.base import whole_folder
from kubetune.base.registry import docker_credentials, pull, registry_client
from kubetune.base.registry.address import parse
from kubetune.result.publishing import oci_image
from kubetune.result.publishing.oci_image import PushedImage
from tests import registry as registries
from tests.ranks import free_port, wait_until
from tests.registry import PASSWORD, USER, Registry

SERVER = shutil.which("docker-registry")
FILES = {
    "README.md": b"# a card",
    "LICENSE": b"terms",
    "config.json": b"{}",
    "additional_chat_templates/rag.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": bytes(range(256)) * 1000,
    "model-00002-of-00002.safetensors": b"w" * 513,
}


@pytest.fixture(autouse=True)
def _without_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry_client, "WAITS_SECONDS", (0.0, 0.0))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


@pytest.fixture
def registry() -> Iterator[Registry]:
    with registries.serving() as server:
        yield server


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    facts = {
        "made_by": "kubetune 0",
        "time": "2026-11-28T06:00:00.000Z",
        "kind": "merged",
        "dtype": "bfloat16",
        "base": {"name": "org/base"},
        "checkpoint": {"step": 7},
        "files": whole_folder.checksums(folder),
    }
    (folder / "provenance.json").write_text(json.dumps(facts))
    return folder


def push(export: Path, host: str, *, as_modelpack: bool = False) -> PushedImage:
    address = parse(f"oci://{host}/team/bot:1")
    return oci_image.push(export, address, "bot", as_modelpack=as_modelpack, tell=lambda text: None)


def log_in(host: str, **entry: str) -> None:
    """Write what `docker login` writes."""
    place = docker_credentials.config_file()
    place.parent.mkdir(exist_ok=True)
    if not entry:
        entry = {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}
    place.write_text(json.dumps({"auths": {host: entry}}))


def contents(export: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in whole_folder.contents(export).items()}


def pulled(fetch: Callable[[str], bytes]) -> dict[str, bytes]:
    """Return the files of an image, as any other tool unpacks them. `fetch` returns what lies at a path."""
    manifest = json.loads(fetch("manifests/1"))
    unpacked = {}
    links = []
    for layer in manifest["layers"]:
        content = fetch(f"blobs/{layer['digest']}")
        if layer["mediaType"].endswith(".raw"):
            unpacked[layer["annotations"]["org.cncf.model.filepath"]] = content
            continue
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive:
                if member.issym():
                    links.append((member.name, member.linkname))
                    continue
                file = archive.extractfile(member)
                assert file is not None
                assert (member.uid, member.mtime, member.mode) == (0, 0, 0o644)
                unpacked[member.name] = file.read()
    # KServe mounts the folder of this name, and so has what everybody else has at the root.
    is_artifact = "artifactType" in manifest
    assert links == ([] if is_artifact else [("models", ".")])
    return unpacked


def of(server: Registry) -> Callable[[str], bytes]:
    def fetch(path: str) -> bytes:
        kind, reference = path.split("/")
        return server.blobs[reference] if kind == "blobs" else server.manifests[reference]

    return fetch


@pytest.mark.parametrize("as_modelpack", [False, True])
def test_an_export_arrives_whole_and_again_sends_nothing(
    registry: Registry, export: Path, as_modelpack: bool
) -> None:
    pushed = push(export, registry.host, as_modelpack=as_modelpack)
    assert pulled(of(registry)) == contents(export)
    assert pushed.layers == pushed.sent == (7 if as_modelpack else 3)
    tag = registry.requests.index("PUT /v2/team/bot/manifests/1")
    assert not [line for line in registry.requests[tag:] if "/blobs/" in line], "the tag is last"
    manifest = json.loads(registry.manifests["1"])
    types = {layer["mediaType"] for layer in manifest["layers"]}
    if as_modelpack:
        assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
        kinds = {"weight", "weight.config", "doc"}
        assert types == {f"application/vnd.cncf.model.{kind}.v1.raw" for kind in kinds}
    else:
        assert types == {"application/vnd.oci.image.layer.v1.tar"}

    registry.requests.clear()
    again = push(export, registry.host, as_modelpack=as_modelpack)
    assert again.digest == pushed.digest
    assert again.sent == 0
    assert not [line for line in registry.requests if line.startswith(("POST", "PUT"))]


def test_a_second_push_sees_what_was_damaged_or_deleted_since(
    registry: Registry, export: Path
) -> None:
    pushed = push(export, registry.host)
    weights = oci_image.build(export, "bot").layers[1].digest
    registry.damaged = {weights}
    with pytest.raises(errors.EnvironmentFault, match=f"gives other bytes than {weights}"):
        push(export, registry.host)

    registry.damaged = set()
    del registry.blobs[weights]
    again = push(export, registry.host)
    assert (again.digest, again.sent) == (pushed.digest, 1)
    assert pulled(of(registry)) == contents(export)


def test_a_push_that_broke_off_goes_on_after_the_last_whole_layer(
    registry: Registry, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.breaks["PUT"] = 1
    assert push(export, registry.host).sent == 3, "the client itself tries again"

    registry.blobs.clear()
    registry.manifests.clear()
    monkeypatch.setattr(registry_client, "WAITS_SECONDS", ())
    put_blob = registry_client.Registry.put_blob

    def break_at_second(self: registry_client.Registry, *args: object) -> None:
        if registry.blobs:
            registry.breaks["PUT"] = 1
        put_blob(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(registry_client.Registry, "put_blob", break_at_second)
        with pytest.raises(errors.EnvironmentFault, match="What has arrived stays there"):
            push(export, registry.host)
    assert registry.manifests == {}, "nobody sees half a model"
    assert len(registry.blobs) == 1
    assert push(export, registry.host).sent == 2
    assert pulled(of(registry)) == contents(export)


def test_what_comes_back_otherwise_gets_no_tag(registry: Registry, export: Path) -> None:
    image = oci_image.build(export, "bot")
    registry.damaged = {image.layers[1].digest}
    with pytest.raises(errors.EnvironmentFault, match="gives other bytes than sha256:"):
        push(export, registry.host)
    assert "1" not in registry.manifests
    registry.damaged = set()
    assert push(export, registry.host).sent == 0
    assert "1" in registry.manifests


def test_a_damaged_export_is_not_sent(registry: Registry, export: Path) -> None:
    (export / "config.json").write_text("[]")
    with pytest.raises(errors.ConfigError, match=r"damage in config\.json"):
        push(export, registry.host)
    assert registry.requests == []


@pytest.mark.parametrize("login", ["basic", "bearer", "identity"])
def test_credentials_are_those_of_docker(registry: Registry, export: Path, login: str) -> None:
    registry.login = "basic" if login == "basic" else "bearer"
    with pytest.raises(errors.EnvironmentFault, match=f"run `docker login {registry.host}`"):
        push(export, registry.host)
    assert not registry.blobs
    if login == "identity":
        log_in(registry.host, identitytoken="an-identity-token")
    else:
        log_in(registry.host)
    with registries.serving() as store:
        # A registry may keep blobs elsewhere, which is told no secret.
        store.blobs = registry.blobs
        registry.store = f"http://{store.host}"
        push(export, registry.host)
        assert store.secrets_at_store
        assert set(store.secrets_at_store) == {None}
    assert pulled(of(registry)) == contents(export)


def test_no_host_that_a_registry_names_gets_its_login(
    registry: Registry, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a host asks for a login as the registry would, and names a token server of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    log_in(registry.host)
    push(export, registry.host)
    with registries.serving() as other:
        other.login = "bearer"
        elsewhere = f"http://localhost:{other.server_port}"
        registry.store = elsewhere
        with pytest.raises(
            errors.EnvironmentFault, match=r"localhost for .* No login was sent there"
        ):
            pull.fetch(f"oci://{registry.host}/team/bot:1")
        registry.store = None
        registry.blobs.clear()
        registry.uploads = f"{elsewhere}/store"
        with pytest.raises(
            errors.EnvironmentFault, match=r"localhost for .* No login was sent there"
        ):
            push(export, registry.host)
        assert other.secrets_at_store
        assert set(other.secrets_at_store) == {None}


@pytest.mark.parametrize("key", ["credHelpers", "credsStore"])
def test_helpers_of_docker_are_asked(
    registry: Registry, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    registry.login = "bearer"
    log_in(registry.host)
    place = docker_credentials.config_file()
    place.write_text(json.dumps({key: {registry.host: "x"} if key == "credHelpers" else "x"}))
    helper = tmp_path / "docker-credential-x"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(errors.EnvironmentFault, match="names docker-credential-x"):
        push(export, registry.host)

    answer = json.dumps({"ServerURL": "", "Username": USER, "Secret": PASSWORD})
    helper.write_text(
        f"#!/bin/sh\nread host\n[ \"$1 $host\" = 'get {registry.host}' ] && echo '{answer}'\n"
    )
    helper.chmod(0o755)
    push(export, registry.host)
    helper.write_text("#!/bin/sh\necho credentials not found in native keychain; exit 1\n")
    registry.manifests.clear()
    with pytest.raises(errors.EnvironmentFault, match="a request without a login"):
        push(export, registry.host)


def test_refusals_say_what_to_do(
    registry: Registry, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.answers = {"POST": [503, 500]}
    push(export, registry.host)
    registry.manifests.clear()
    registry.blobs.clear()
    for status, message in (
        (503, "answers with 503: UNKNOWN not now. What has arrived stays there"),
        (507, "answers with 507"),
        (403, "refused team/bot .403: UNKNOWN not now.: docker's config has no login for it"),
        (413, "refused team/bot .413"),
        (404, "has no repository team/bot"),
    ):
        registry.answers = {"POST": [status] * 3}
        with pytest.raises(errors.EnvironmentFault, match=message):
            push(export, registry.host)
        assert registry.manifests == {}
    with pytest.raises(errors.EnvironmentFault, match="could not be asked to the end"):
        push(export, f"127.0.0.1:{free_port()}")
    log_in(registry.host, auth="?")
    registry.login = "basic"
    registry.answers = {}
    with pytest.raises(errors.EnvironmentFault, match="`auth` is not in base64"):
        push(export, registry.host)


def test_an_unknown_host_is_not_tried_again(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "WAITS_SECONDS", (600.0,))
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def resolve(*args: object, **options: object) -> None:
        raise unknown

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(errors.EnvironmentFault, match=r"there is no host registry\.invalid"):
        push(export, "registry.invalid")


def test_no_secret_is_sent_without_encryption() -> None:
    address = parse("oci://registry.example.com/a:1")
    assert address.url == "https://registry.example.com/v2/a"
    assert parse("oci://registry.example.com/a:1", plain=True).url.startswith("http:")
    assert parse("oci://docker.io/org/a:1").url == "https://registry-1.docker.io/v2/org/a"
    for host in ("localhost:5000", "127.0.0.1", "[::1]:5000"):
        assert parse(f"oci://{host}/a:1").is_plain
    with (
        registry_client.Registry(address) as registry,
        pytest.raises(errors.EnvironmentFault, match="not encrypted"),
    ):
        registry._session._log_in('Bearer realm="http://elsewhere.example.com/token",service="x"')


@pytest.mark.parametrize(
    "text",
    [
        "oci://host/a",
        "oci://host/A:1",
        "oci://user:secret@host/a:1",
        "oci://host/a:1/../b",
        "oci://",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(errors.ConfigError, match="no address of an image"):
        parse(text)


@contextmanager
def debian(folder: Path) -> Iterator[str]:
    """Yield the host of a registry of Debian's package."""
    assert SERVER is not None
    port = free_port()
    config = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "storage")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (folder / "registry.yml").write_text(json.dumps(config))
    command = [SERVER, "serve", str(folder / "registry.yml")]
    with (
        open(folder / "registry.log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
    ):
        try:
            wait_until(lambda: answers(port))
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/") as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.mark.skipif(SERVER is None, reason="needs Debian's package docker-registry")
@pytest.mark.parametrize("as_modelpack", [False, True])
def test_a_real_registry_takes_it_and_gives_it_back(
    export: Path, tmp_path: Path, as_modelpack: bool
) -> None:
    with debian(tmp_path) as host:

        def fetch(path: str) -> bytes:
            url = f"http://{host}/v2/team/bot/{path}"
            request = urllib.request.Request(url, headers={"Accept": registry_client.MANIFEST_TYPE})
            with urllib.request.urlopen(request) as response:
                return bytes(response.read())

        pushed = push(export, host, as_modelpack=as_modelpack)
        assert pulled(fetch) == contents(export)
        assert push(export, host, as_modelpack=as_modelpack).sent == 0
        assert fetch(f"manifests/{pushed.digest}") == fetch("manifests/1")

        # Layers that have not changed are not sent again.
        (export / "README.md").write_text("# another card")
        facts = json.loads((export / "provenance.json").read_text())
        facts["files"] = whole_folder.checksums(export, but="provenance.json")
        (export / "provenance.json").write_text(json.dumps(facts))
        changed = push(export, host, as_modelpack=as_modelpack)
        assert changed.digest != pushed.digest
        assert changed.sent == (2 if as_modelpack else 1)
        assert pulled(fetch) == contents(export)
