"""What a received folder holds is opened only where it is a file inside that folder, and nothing waits."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kubetune import cli, errors
from kubetune.base import files, jsonl, locks, whole_folder
from kubetune.config.schema import ModelConfig
from kubetune.data.reading import hub
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.models.adapters import on_base
from kubetune.rundir import checkpoints
from kubetune.rundir.status import log_lines
from tests.architectures import save_model
from tests.tiny import train_tokenizer


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def endless_device(path: Path, outside: Path) -> None:
    path.symlink_to("/dev/zero")


def link_out(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def link_up(path: Path, outside: Path) -> None:
    path.symlink_to(os.path.relpath(outside, path.parent))


def bound_socket(path: Path, outside: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may have some 100 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


IRREGULAR = [pipe, endless_device, link_out, link_up, bound_socket]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text('{"secret": "hunter2"}\n')
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "received" / "sub").mkdir(parents=True)
    return tmp_path / "received"


@pytest.mark.parametrize("plant", IRREGULAR)
@pytest.mark.parametrize("name", ["file", "sub/file"])
def test_irregular_files_are_refused(
    folder: Path, outside: Path, plant: Callable[[Path, Path], None], name: str
) -> None:
    plant(folder / name, outside)
    for refused in (
        lambda: files.read_inside(folder / name, folder),
        lambda: files.require_plain(folder),
        lambda: files.read_object(folder / name),
        lambda: list(jsonl.read(folder / name)),
        lambda: jsonl.last_lines(folder / name, 100),
        lambda: jsonl.sample(folder / name, 2),
    ):
        with pytest.raises(files.IrregularFileError, match=r"is a (pipe|link|socket)"):
            refused()
    assert not files.is_file_inside(folder / name, folder)
    assert list(jsonl.Follower(folder / name).read()) == []


def test_folders_that_are_links_out(folder: Path, outside: Path) -> None:
    (folder / "logs").symlink_to(outside.parent)
    with pytest.raises(files.IrregularFileError, match="leads out of"):
        files.read_inside(folder / "logs" / "secret", folder)
    with pytest.raises(files.IrregularFileError, match="leads out of"):
        files.require_plain(folder)


def test_links_inside_are_followed(folder: Path) -> None:
    (folder / "sub" / "file").write_text("text")
    (folder / "link").symlink_to("sub/file")
    (folder / "best").symlink_to("sub")
    assert files.read_inside(folder / "link") == b"text"
    assert files.read_inside(folder / "best" / "file", folder) == b"text"
    files.require_plain(folder)


def test_snapshots_of_the_hub_link_to_their_blobs(tmp_path: Path, outside: Path) -> None:
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "0").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/0")
    assert files.read_inside(snapshot / "config.json") == b"{}"
    (snapshot / "other.json").symlink_to(outside)
    with pytest.raises(files.IrregularFileError):
        files.read_inside(snapshot / "other.json")


LINKED_FOLDERS = ["assets", "additional_chat_templates", "deep/er/still"]


@pytest.mark.parametrize("name", LINKED_FOLDERS)
def test_folders_of_models_and_adapters_that_are_links_out(
    name: str, tmp_path: Path, outside: Path
) -> None:
    model = save_model(tmp_path / "model")
    train_tokenizer(model)
    (model / name).parent.mkdir(parents=True, exist_ok=True)
    (model / name).symlink_to(outside.parent)
    problem = rf"{name} is a link that leads out of .*\. Nothing was loaded"
    config = ModelConfig(path=str(model))
    for refused in (
        lambda: hub.check_model_folder(config),
        lambda: load_tokenizer(config),
        lambda: on_base.require_plain_adapter(model),
    ):
        with pytest.raises(errors.ModelError, match=problem):
            refused()


def test_folders_of_models_that_the_user_names_by_a_link(tmp_path: Path) -> None:
    model = save_model(tmp_path / "elsewhere")
    (model / "assets").mkdir()
    (model / "more").symlink_to("assets")
    (tmp_path / "model").symlink_to("elsewhere")
    hub.check_model_folder(ModelConfig(path=str(tmp_path / "model")))


def test_snapshots_of_models_with_folders_in_the_hubs_cache(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "blobs").mkdir()
    snapshot = save_model(repo / "snapshots" / ("a" * 40))
    (snapshot / "assets").mkdir()
    (snapshot / "assets" / "image.txt").write_text("text")
    for number, path in enumerate(sorted(snapshot.rglob("*.*"))):
        blob = repo / "blobs" / str(number)
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, path.parent))
    hub.check_model_folder(ModelConfig(path=str(snapshot)))


@pytest.mark.parametrize("plant", IRREGULAR)
def test_manifests(folder: Path, outside: Path, plant: Callable[[Path, Path], None]) -> None:
    step = folder / "checkpoints" / "step-000001"
    step.mkdir(parents=True)
    plant(step / checkpoints.MANIFEST, outside)
    assert checkpoints.verify(step) == "has a manifest that kubetune has not written so"
    assert not whole_folder.is_whole(step, checkpoints.MANIFEST)
    assert checkpoints.newest_step(folder) == 0


def test_manifests_that_name_what_lies_outside(folder: Path, outside: Path) -> None:
    facts = {"bytes": outside.stat().st_size, "sha256": files.sha256_file(outside)}
    for name in ("../secret", str(outside)):
        (folder / "manifest.json").write_text(json.dumps({"files": {name: facts}}))
        assert not whole_folder.is_whole(folder, "manifest.json", thorough=True)
        assert "lacks" in str(checkpoints.verify(folder)) or checkpoints.verify(folder)


@pytest.mark.parametrize("plant", IRREGULAR)
def test_logs(folder: Path, outside: Path, plant: Callable[[Path, Path], None]) -> None:
    (folder / "logs").mkdir()
    plant(folder / "logs" / "rank-0.log", outside)
    (line,) = log_lines(folder, 0)
    assert "hunter2" not in line
    assert "rank-0.log is a" in line


def test_a_link_is_no_lock(folder: Path, outside: Path) -> None:
    (folder / "lock").symlink_to(outside)
    with pytest.raises(errors.EnvironmentFault), locks.lock(folder / "lock", wait=False):
        pass
    assert "hunter2" in outside.read_text()


@pytest.mark.parametrize("plant", [pipe, endless_device, bound_socket])
def test_run_files(
    folder: Path, outside: Path, plant: Callable[[Path, Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plant(folder / "run.yaml", outside)
    assert cli.main(["plan", str(folder / "run.yaml")]) == errors.USER
    assert "expected a file, a run file" in capsys.readouterr().err


def test_run_files_that_the_shell_hands_over() -> None:
    """`kubetune plan <(make-run-file)`: a pipe that the user has made for this very process."""
    code = (
        "import sys; from kubetune.config.load import read_tree; print(read_tree(sys.argv[1])[0])"
    )
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" <(echo "name: handed-over")', sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
