"""Run directories in Google's and Azure's stores: servers that stand in for them, asked by the real client libraries.

Skipped where these are not installed: gcsfs with gcp-storage-emulator, adlfs with Azurite (`npm install -g azurite`).
S3, with all that can go wrong, is test_mirror.py's.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError

import pytest

from kubetune import errors
from kubetune.base import fault_injection
from kubetune.cli import main
from kubetune.rundir import checkpoints
from kubetune.rundir.mirror import lease
from kubetune.rundir.mirror.sync import Mirror
from tests import toy
from tests.ranks import free_port, wait_until

pytestmark = pytest.mark.slow

ACCOUNT = "devstoreaccount1"
# Not a secret: Azurite knows this account alone, and its documentation says so.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def google(port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a server with the bucket `runs`, and what makes gcsfs speak to it."""
    if not find_spec("gcsfs") or not find_spec("gcp_storage_emulator"):
        pytest.skip("needs gcsfs and gcp-storage-emulator")
    command = [
        sys.executable,
        "-m",
        "gcp_storage_emulator",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    # Neither looks for credentials on the network, nor for the kind of the bucket by another service.
    quiet = {"NO_GCE_CHECK": "true", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    environ = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}", **quiet}
    return [*command, "--in-memory", "--default-bucket", "runs"], environ


def azure(port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a server, and what makes adlfs speak to it."""
    azurite = shutil.which("azurite-blob")
    if not find_spec("adlfs") or azurite is None:
        pytest.skip("needs adlfs and azurite-blob")
    command = [
        azurite,
        "--inMemoryPersistence",
        "--blobPort",
        str(port),
        "--skipApiVersionCheck",
        "--disableTelemetry",
    ]
    endpoint = f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT}"
    text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};{endpoint};"
    return command, {"AZURE_STORAGE_CONNECTION_STRING": text}


def make_container(port: int) -> None:
    """Create the container `runs`, by the request that Azure's documentation gives."""
    date = formatdate(usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:2023-11-03\n"
    signed = "PUT" + "\n" * 12 + headers + f"/{ACCOUNT}/{ACCOUNT}/runs\nrestype:container"
    digest = base64.b64encode(
        hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    ).decode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{ACCOUNT}/runs?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": "2023-11-03",
            "Authorization": f"SharedKey {ACCOUNT}:{digest}",
        },
    )
    urllib.request.urlopen(request).close()


STORES: dict[str, Callable[[int], tuple[list[str], dict[str, str]]]] = {"gs": google, "az": azure}


@contextmanager
def serving(scheme: str) -> Iterator[None]:
    """Yield a store with the empty bucket `runs` while the block runs; this process and its children use it."""
    port = free_port()
    command, environ = STORES[scheme](port)
    before = dict(os.environ)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: answers(port))
            if scheme == "az":
                make_container(port)
            os.environ.update(environ)
            yield
        finally:
            server.kill()
            os.environ.clear()
            os.environ.update(before)


def answers(port: int) -> bool:
    with suppress(URLError):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/").close()
        except urllib.request.HTTPError as refused:  # it answers, if only that it knows nobody
            refused.close()
        return True
    return False


@pytest.fixture(scope="module", params=sorted(STORES))
def scheme(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param):
        yield request.param


@pytest.fixture(scope="module")
def run_dir(inputs: Path) -> Path:
    return toy.finished(inputs / "run", toy.make_config(inputs, {"num_train_epochs": 1}))


def train(
    folder: Path, inputs: Path, address: str, fault: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `kubetune train` in a folder, as on a machine of its own."""
    folder.mkdir()
    toy.run_file(folder, inputs, address, num_train_epochs=1)
    environ = {**os.environ, **({fault_injection.FAULT: fault} if fault else {})}
    command = [sys.executable, "-m", "kubetune", "train", "run.yaml"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)


def test_what_is_sent_comes_back_the_same_and_steps_are_whole_or_not_there(
    scheme: str, run_dir: Path, tmp_path: Path
) -> None:
    address = f"{scheme}://runs/same"
    assert main(["sync", str(run_dir), address]) == 0
    assert main(["sync", address, str(tmp_path / "back")]) == 0
    assert toy.digests(tmp_path / "back") == toy.digests(run_dir)
    mine = tmp_path / "mine"
    shutil.copytree(run_dir, mine, symlinks=True)
    copy = Mirror(mine, address)
    copy.send()
    assert copy.stored.steps() == [3, 6, 7]
    shutil.rmtree(checkpoints.folder_of(mine, 3))
    copy.send()
    assert copy.stored.steps() == [6, 7]
    assert not [name for name in copy.stored.files() if "step-000003" in name]
    copy.stored.store.rm_file("runs/same/checkpoints/step-000007/manifest.json")
    assert copy.stored.steps() == [6]
    assert Mirror(tmp_path / "again", address).fetch() == 6


def test_a_run_goes_on_from_the_store_on_an_empty_machine(
    scheme: str, inputs: Path, run_dir: Path, tmp_path: Path
) -> None:
    address = f"{scheme}://runs/moved"
    ended = train(tmp_path / "first", inputs, address, "signal 9:step:6")
    assert ended.returncode not in (0, errors.USER), ended.stderr
    assert Mirror(tmp_path / "first/outputs/runs/moved", address).stored.steps() == [3]
    ended = train(tmp_path / "second", inputs, address)
    assert ended.returncode == 0, ended.stderr
    assert f"step 3 and the run so far came from {address}" in ended.stdout
    assert toy.digests(tmp_path / "second/outputs/runs/moved") == toy.digests(run_dir)
    assert Mirror(tmp_path, address).stored.steps() == [3, 6, 7]


def test_another_run_and_an_earlier_start_are_refused(
    scheme: str, run_dir: Path, tmp_path: Path
) -> None:
    address = f"{scheme}://runs/owned"
    other = tmp_path / "other"
    later = tmp_path / "later"
    mine = Mirror(shutil.copytree(run_dir, tmp_path / "mine", symlinks=True), address)
    mine.lease.take()
    mine.send()
    shutil.copytree(run_dir, other, symlinks=True, ignore=shutil.ignore_patterns(lease.LOCAL))
    assert main(["sync", str(other), address]) == errors.USER
    moved = Mirror(later, address)
    assert moved.fetch() == 7
    moved.lease.take()
    with pytest.raises(errors.ConfigError, match="is kept up by a later start of this run"):
        mine.send()
    moved.send()


def test_a_bucket_that_is_not_there_is_told_within_seconds(
    scheme: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = shutil.copytree(run_dir, tmp_path / "mine", symlinks=True)
    assert main(["sync", str(mine), f"{scheme}://nowhere/run"]) == errors.ENVIRONMENT
    stderr = capsys.readouterr().err
    assert f"{scheme}://nowhere/run cannot be written to" in stderr
    assert "Traceback" not in stderr
