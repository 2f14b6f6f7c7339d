"""What goes into the container image by name and version, and the bill that says so; the image itself is not built."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

ROOT = Path(__file__).parents[2]
STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.41-12+deb13u4
Description: GNU C Library
 Package: not this line

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1
"""
REPLACED = "Package: libibverbs1\nStatus: install ok installed\nVersion: 50\nArchitecture: amd64\n"
UNPACKED = "Package: libibverbs1\nVersion: 56.1-1\nArchitecture: amd64\n"
# It builds nothing: what it is asked to do is on its last line, and a bill is what it would copy.
BUILDER = """\
#!/bin/sh
case "$1" in
    create) echo container ;;
    cp) echo '{}' > "$3" ;;
    rm) ;;
    *) printf '%s\\n' "$@" > "$TOLD" ;;
esac
"""


def bill(folder: Path) -> str:
    """Return the bill of this Python's packages and of two of Debian's."""
    (folder / "status.d").mkdir(exist_ok=True)
    (folder / "status").write_text(f"{STATUS}\n{REPLACED}")
    (folder / "status.d" / "libibverbs1").write_text(UNPACKED)
    command = [
        sys.executable,
        ROOT / "scripts" / "sbom.py",
        "kubetune",
        "1.0",
        "--python",
        sys.prefix,
    ]
    done = subprocess.run([*command, "--dpkg", folder], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_bill_lists_every_package_by_its_identity(tmp_path: Path) -> None:
    text = bill(tmp_path)
    document = json.loads(text)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    by_name: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in document["components"]}
    torch = version("torch")
    assert by_name["torch"]["purl"] == f"pkg:pypi/torch@{quote(torch)}"
    assert by_name["torch"]["version"] == torch
    assert by_name["transformers"]["licenses"]
    libc, verbs = (
        by_name[name]["purl"].partition("&distro=")[0] for name in ("libc6", "libibverbs1")
    )
    assert libc == "pkg:deb/debian/libc6@2.41-12%2Bdeb13u4?arch=amd64"
    assert verbs == "pkg:deb/debian/libibverbs1@56.1-1?arch=amd64"
    assert "gone" not in by_name
    purls = [entry["purl"] for entry in document["components"]]
    assert purls == sorted(set(purls))
    assert bill(tmp_path) == text  # no time, no random number


def test_a_folder_without_packages_is_told(tmp_path: Path) -> None:
    command = [
        sys.executable,
        ROOT / "scripts" / "sbom.py",
        "kubetune",
        "1.0",
        "--python",
        tmp_path,
    ]
    stderr = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert f"no package is installed in {tmp_path}" in stderr


def test_the_image_script_says_how_it_is_used(copy: Path) -> None:
    """Not the builder, which has words of that name too."""
    done = subprocess.run(
        [copy / "scripts/image", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Build the container image: scripts/image [cpu|cuda")
    assert "KUBETUNE_TORCH_INDEX" in done.stdout.splitlines()[-1]


@contextmanager
def registry(digest: str | None) -> Iterator[tuple[str, list[str]]]:
    """Yield a registry that knows one image, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            if digest:
                self.send_header("Docker-Content-Digest", digest)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return the files that the scripts read and write, to be changed."""
    shutil.copytree(
        ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("Dockerfile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("digest", ["sha256:" + "ab" * 32, None])
def test_the_base_is_named_by_the_digest_that_its_registry_has(
    copy: Path, digest: str | None
) -> None:
    before = (copy / "Dockerfile").read_text()
    with registry(digest) as (address, asked):
        environ = {**os.environ, "REGISTRY": address, "no_proxy": "127.0.0.1"}
        done = subprocess.run(
            [copy / "scripts/image-pins", "base"], env=environ, capture_output=True, text=True
        )
    assert asked == ["/v2/library/python/manifests/3.11-slim-trixie"]
    after = (copy / "Dockerfile").read_text()
    if digest:
        assert done.returncode == 0, done.stderr
        assert f"ARG BASE=python:3.11-slim-trixie@{digest}\n" in after
    else:
        assert done.returncode == 3
        assert "Nothing was written" in done.stderr
        assert after == before


def test_base_and_debian_packages_are_pinned() -> None:
    base = re.search(r"^ARG BASE=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert base is not None
    assert re.fullmatch(r"python:3\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base[1])
    pins = dict(
        re.findall(r'^(\w+)="?([^"\n]*)', (ROOT / "scripts/image.pins").read_text(), re.MULTILINE)
    )
    assert re.fullmatch(r"\d{8}T\d{6}Z", pins["SNAPSHOT"])
    named = dict(
        pin.split("=")
        for key in ("RDMA_PACKAGES", "COMPILER_PACKAGES")
        for pin in pins[key].split()
    )
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1t64", "gcc", "libc6-dev"} <= named.keys()
    assert all(re.fullmatch(r"[0-9][\w.+:~-]*", number) for number in named.values())


def asked_of_builder(copy: Path, *words: str, **environ: str) -> tuple[dict[str, str], list[str]]:
    """Return the build arguments that scripts/image gives a builder, and its other words."""
    (copy / "bin").mkdir(exist_ok=True)
    builder = copy / "bin" / "builder"
    record = copy / "told"
    builder.write_text(BUILDER)
    builder.chmod(0o755)
    path = f"{copy / 'bin'}:{os.environ['PATH']}"
    environment = {
        "PATH": path,
        "BUILDER": "builder",
        "TOLD": str(record),
        "HOME": str(copy),
        **environ,
    }
    subprocess.run(
        [copy / "scripts/image", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = record.read_text().splitlines()
    arguments = [lines[i + 1] for i, line in enumerate(lines) if line == "--build-arg"]
    return dict(argument.split("=", 1) for argument in arguments), lines


def test_training_images_hold_what_training_needs(copy: Path) -> None:
    arguments, words = asked_of_builder(copy, "cpu")
    assert (arguments["EXTRAS"], arguments["PACKAGES"]) == ("hub,vision,s3", "")
    assert words[-1] == "."
    assert "--label" not in words  # there is no source to name: no git, no origin
    tag = words[words.index("--tag") + 1]
    assert list((copy / "dist").iterdir()) == [copy / "dist" / f"{tag.replace(':', '-')}.cdx.json"]

    arguments, _ = asked_of_builder(copy, "cuda")
    assert arguments["EXTRAS"] == "hub,vision,s3,quantization"
    assert "libibverbs1=" in arguments["PACKAGES"]
    assert " gcc=" in arguments["PACKAGES"]
    assert arguments["SNAPSHOT"]
    # The versions are those of the base's release; of another base nothing is known.
    arguments, _ = asked_of_builder(copy, "cuda", BASE="localhost/other:1")
    assert arguments["PACKAGES"] == "ibverbs-providers libibverbs1 librdmacm1 gcc libc6-dev"
    arguments, words = asked_of_builder(copy, "cuda-slim", BASE="localhost/other:1")
    assert arguments["PACKAGES"] == "ibverbs-providers libibverbs1 librdmacm1"
    assert (arguments["VARIANT"], arguments["EXTRAS"]) == ("cuda", "hub,vision,s3,quantization")
    assert words[words.index("--tag") + 1].endswith("-cuda-slim")


def test_tools_architectures_and_the_source_are_options(copy: Path) -> None:
    arguments, words = asked_of_builder(
        copy, "tools", PLATFORM="linux/arm64", SOURCE="https://git.example/kubetune"
    )
    assert arguments["EXTRAS"] == "hub,vision,s3,tracking,ui,jupyter"
    assert arguments["VARIANT"] == "cpu"
    assert (
        words[words.index("--label") + 1]
        == "org.opencontainers.image.source=https://git.example/kubetune"
    )
    assert words[words.index("--platform") + 1] == "linux/arm64"
    assert words[words.index("--tag") + 1].endswith("-tools-arm64")
    subprocess.run(["git", "init", "-q", copy], check=True)
    origin = "https://somebody:a-token@git.example/kubetune.git"
    subprocess.run(["git", "-C", copy, "remote", "add", "origin", origin], check=True)
    _, words = asked_of_builder(copy, "cpu")
    assert (
        words[words.index("--label") + 1]
        == "org.opencontainers.image.source=https://git.example/kubetune.git"
    )
