"""Bases from a registry: fetched by digest into the cache, checked, and nothing left of what is wrong."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kubetune import errors
from kubetune.base import files
from kubetune.base.registry import address, pull, registry_client
from kubetune.base.registry import image_fetch_worker as image_worker
from kubetune.config.naming import model_short_name
from kubetune.config.schema import ModelConfig
from kubetune.data.prepared import fetch_worker, identity
from kubetune.data.reading import hub
from tests import registry as registries
from tests.registry import Registry

TAR = "application/vnd.oci.image.layer.v1.tar"
RAW = "application/vnd.cncf.model.weight.v1.raw"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(registry_client, "WAITS_SECONDS", (0.0, 0.0))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kubetune" / "oci"


@pytest.fixture
def registry() -> Iterator[Registry]:
    with registries.serving() as server:
        yield server


def tar(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def link(target: str, name: str = "model") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type = tarfile.SYMTYPE
        member.linkname = target
        archive.addfile(member)
    return buffer.getvalue()


def declaring(size: int) -> bytes:
    """Return a tar whose only file is declared to be that large, and is empty."""
    member = tarfile.TarInfo("zeros")
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def pax(size: int) -> bytes:
    """Return a tar that begins with attributes of that many bytes."""
    header = tarfile.TarInfo("attributes")
    header.type = tarfile.XHDTYPE
    header.size = size
    return header.tobuf() + bytes(size) + tar({"config.json": b"{}"})


def long_names(number: int) -> bytes:
    """Return a tar in which a header announces a long name for the next header, which does the same, and so on."""
    header = tarfile.TarInfo("name")
    header.type = tarfile.GNUTYPE_LONGNAME
    return header.tobuf() * number + tar({"config.json": b"{}"})


def many_files(number: int) -> bytes:
    return tar({f"{count}": b"" for count in range(number)})


def put(server: Registry, *layers: tuple[str, bytes, dict[str, str]]) -> str:
    """Put an image of these layers (type, bytes, annotations) at tag 1, and return its digest."""
    described: list[dict[str, Any]] = []
    for media_type, content, notes in layers:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        server.blobs[digest] = content
        layer = {"mediaType": media_type, "digest": digest, "size": len(content)}
        described.append(layer | {"annotations": notes})
    manifest = json.dumps({"layers": described}).encode()
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    server.manifests |= {"1": manifest, digest: manifest}
    return digest


def test_an_image_is_fetched_once_by_its_digest(registry: Registry, cache: Path) -> None:
    path = f"oci://{registry.host}/team/bot:1"
    small = tar({"config.json": b"{}", "./extra/a.jinja": b"x"})
    weights = {"org.cncf.model.filepath": "model.safetensors"}
    digest = put(registry, (f"{TAR}+gzip", gzip.compress(small), {}), (RAW, b"w" * 3000, weights))
    folder = pull.fetch(path)
    assert folder == cache / registry.host.replace(":", "+") / "team" / "bot" / digest.replace(
        ":", "-"
    )
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    assert names == ["config.json", "extra/a.jinja", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"w" * 3000
    assert model_short_name(str(folder)) == "bot"

    registry.requests.clear()
    assert pull.fetch(path) == folder
    assert registry.requests == ["GET /v2/team/bot/manifests/1"]
    by_digest = f"oci://{registry.host}/team/bot@{digest}"
    assert pull.fetch(by_digest, offline=True) == folder
    fetch_worker.fetch(ModelConfig(path=by_digest))
    model = ModelConfig(path=path)
    assert hub.find_files(model, path, ["config.json"]) == {"config.json": folder / "config.json"}
    assert "model.safetensors" in hub.list_files(model, path)
    with pytest.raises(errors.ModelError, match="local_files_only is set"):
        pull.fetch(path, offline=True)


def test_the_link_for_kserve_is_passed_over(registry: Registry) -> None:
    put(registry, (TAR, tar({"config.json": b"{}"}), {}), (TAR, link(".", "models"), {}))
    folder = pull.fetch(f"oci://{registry.host}/team/bot:1")
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_the_folder_that_kserve_mounts_may_hold_all_files(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As images that were built for KServe have it."""
    monkeypatch.setattr(address, "MOUNTED", str(tmp_path / "images"))
    weights = {"org.cncf.model.filepath": "models/model.safetensors"}
    small = tar({"models/config.json": b"{}", "./models/models/a": b"x"})
    digest = put(registry, (TAR, small, {}), (RAW, b"w", weights))
    path = f"oci://{registry.host}/team/bot@{digest}"
    mounted = Path(address.mounted_folder(address.parse(path), digest))
    (mounted / "models").mkdir(parents=True)
    folder = pull.fetch(path)
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    assert names == ["config.json", "model.safetensors", "models/a"]


def test_an_image_that_is_mounted_is_not_fetched(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes has it at a place that is named by its digest, as it mounts nothing at a path with a colon."""
    monkeypatch.setattr(address, "MOUNTED", str(tmp_path / "images"))
    digest = put(registry, (TAR, tar({"config.json": b"{}"}), {}))
    path = f"oci://{registry.host}/team/bot@{digest}"
    folder = Path(address.mounted_folder(address.parse(path), digest))
    assert ":" not in str(folder)
    folder.mkdir(parents=True)
    assert pull.fetch(path) == folder
    assert registry.requests == []
    # A run that went on elsewhere knows it by the same digest.
    assert address.cached_digest(str(folder), path) == digest


def test_all_pods_of_a_run_may_share_what_one_has_fetched(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(address.STORE, str(tmp_path / "shared"))
    put(registry, (TAR, tar({"config.json": b"{}"}), {}))
    folder = pull.fetch(f"oci://{registry.host}/team/bot:1")
    assert folder.is_relative_to(tmp_path / "shared" / "oci")


def test_a_server_finds_what_was_fetched_before_it_starts(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(registry, (TAR, tar({"config.json": b"{}"}), {}))
    links = tmp_path / "models"
    links.mkdir()
    words = [str(links), f"bot=oci://{registry.host}/team/bot:1"]
    # A second start of the container does the same.
    for _ in range(2):
        assert image_worker.main(words) == errors.OK
        assert (links / "bot" / "config.json").read_bytes() == b"{}"
    assert image_worker.main([str(links), f"no=oci://{registry.host}/team/no:2"]) == errors.USER
    assert "has no image" in capsys.readouterr().err


def test_a_run_stays_with_the_image_that_it_began_with(registry: Registry, tmp_path: Path) -> None:
    path = f"oci://{registry.host}/team/bot:1"
    first = put(registry, (TAR, tar({"config.json": b"{}"}), {}))
    begun = identity.pinned(ModelConfig(path=path), tmp_path)
    assert begun.path.endswith(first.replace(":", "-"))
    part = {"path": begun.path, "commit": None, "files": {}}
    (tmp_path / identity.IDENTITY).write_text(json.dumps({"parts": {"model": part}}))
    second = put(registry, (TAR, tar({"config.json": b"[]"}), {}))
    assert second != first
    assert identity.pinned(ModelConfig(path=path), tmp_path).path == begun.path
    assert pull.fetch(path).name == second.replace(":", "-")
    # A digest of another repository says nothing of this one.
    assert address.cached_digest(begun.path, f"oci://{registry.host}/team/other:1") is None


def test_what_is_no_model_in_whole_is_refused_and_leaves_nothing(
    registry: Registry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"oci://{registry.host}/team/bot:1"
    with pytest.raises(errors.ModelError, match="has no image"):
        pull.fetch(path)
    monkeypatch.setattr(pull, "_MOST_FILES", 100)
    for layers, message in (
        ([(TAR, tar({"../evil": b""}), {})], "no path inside the image"),
        ([(TAR, tar({"/evil": b""}), {})], "no path inside the image"),
        ([(TAR, link("/etc"), {})], "neither a file nor a folder"),
        ([(TAR, link("/etc", "models"), {})], "neither a file nor a folder"),
        ([(TAR, b"no tar at all" * 100, {})], "a layer is no tar"),
        ([(RAW, b"w", {})], "has no path of its file"),
        ([(RAW, b"w", {"org.cncf.model.filepath": "../evil"})], "no path inside the image"),
        ([(f"{TAR}+zstd", b"", {})], "packed by zstd"),
        ([(RAW, b"w", {"org.cncf.model.filepath": "a/" * 1500 + "b"})], "no path inside the image"),
        ([(TAR, tar({"a/" * 1500 + "b": b""}), {})], "no path inside the image"),
        (
            [(TAR, tar({"config\x1b[2J.json": b""}), {})],
            r"'config\\x1b.* is no path inside the image",
        ),
        ([(TAR, tar({".w.safetensors.1a2b.tmp": b""}), {})], "was never finished"),
        ([(f"{TAR}+gzip", gzip.compress(declaring(300 << 20)), {})], "than 10 times its size"),
        ([(f"{TAR}+gzip", gzip.compress(declaring(1 << 50)), {})], "than 10 times its size"),
        ([(TAR, declaring(-512), {})], "than 10 times its size|is no tar"),
        ([(f"{TAR}+gzip", gzip.compress(pax(8 << 20)), {})], "a header of more than 4 MiB"),
        ([(TAR, long_names(5000), {})], "a layer is no tar"),
        ([(f"{TAR}+gzip", gzip.compress(tar({"a": b"x" * 999}))[:-20], {})], "a layer is no tar"),
        ([(f"{TAR}+gzip", gzip.compress(many_files(101)), {})], "more than 100 files"),
        ([(TAR, tar({}), {})], "holds no files"),
        ([], "no single image with layers"),
    ):
        put(registry, *layers)
        with pytest.raises(errors.ModelError, match=message):
            pull.fetch(path)
    layer = f'"mediaType": "{TAR}", "digest": "sha256:{"0" * 64}"'
    for manifest in (
        '{"manifests": []}',
        '{"layers": [1]}',
        f'{{"layers": [{{{layer}, "size": 1e999}}]}}',
        f'{{"layers": [{{{layer}, "size": -1}}]}}',
        f'{{"layers": [{{{layer}, "size": 1, "annotations": "text"}}]}}',
        f'{{"layers": [{{{layer}, "size": 1, "annotations": ["text"]}}]}}',
        f'{{"layers": [{{{layer}, "size": 1, "annotations": {{"a": 1}}}}]}}',
        "[" * 100_000,
        "\xff",
    ):
        registry.manifests["1"] = manifest.encode("latin-1")
        with pytest.raises(errors.ModelError, match="no single image with layers"):
            pull.fetch(path)

    # The digest is right, and the size is not.
    content = tar({"config.json": b"{}" * 5000})
    for size in (5, len(content) - 1, len(content) + 1):
        put(registry, (TAR, content, {}))
        named = json.loads(registry.manifests["1"])
        named["layers"][0]["size"] = size
        registry.manifests["1"] = json.dumps(named).encode()
        with pytest.raises(errors.EnvironmentFault, match=r"bytes that sha256:.* is to have"):
            pull.fetch(path)

    put(registry, (TAR, tar({"config.json": b"{}" * 5000}), {}))
    registry.damaged = set(registry.blobs)
    with pytest.raises(errors.EnvironmentFault, match="gives other bytes"):
        pull.fetch(path)
    registry.damaged = set()
    with monkeypatch.context() as patched:
        patched.setattr(files, "free_bytes", lambda path: 100)
        with pytest.raises(errors.EnvironmentFault, match="bytes, 100 are free"):
            pull.fetch(path)
    left = [file.name for file in cache.rglob("*") if file.name.startswith((".", "sha256-"))]
    assert left == []
    registry.answers = {"GET": [503, 503]}
    assert (pull.fetch(path) / "config.json").is_file()
