"""Folders that appear whole or not at all, whatever becomes of their writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune.base import fault_injection, whole_folder
from kubetune.base.files import write_atomic
from kubetune.errors import EnvironmentFault

WRITER = """
import json, sys
from pathlib import Path
from kubetune.base import whole_folder
final = Path(sys.argv[1])
with whole_folder.written(final, "test") as partial:
    (partial / "below").mkdir()
    (partial / "below" / "rows").write_text("new" * 1000)
    (partial / "list").write_text(json.dumps({"files": whole_folder.checksums(partial)}))
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def old(final: Path) -> None:
    final.mkdir()
    (final / "rows").write_text("old")


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("point", ["sealed", "renamed"])
def test_a_writer_killed_leaves_the_former_folder_or_the_new_one(
    tmp_path: Path, before: bool, point: str
) -> None:
    final = tmp_path / "model[1]"  # brackets mean something to a glob
    if before:
        old(final)
    environ = {**os.environ, fault_injection.FAULT: f"signal 9:test.{point}"}
    command = [sys.executable, "-c", WRITER, str(final)]
    assert subprocess.run(command, env=environ, check=False).returncode == -signal.SIGKILL
    if point == "renamed":
        assert whole_folder.is_whole(final, "list", thorough=True)
    elif before:
        assert (final / "rows").read_text() == "old"
    else:
        assert not final.exists()
    whole_folder.remove_leftovers(tmp_path, final.name)
    assert names(tmp_path) == ([final.name] if final.exists() else [])
    subprocess.run(command, check=True)
    assert whole_folder.is_whole(final, "list", thorough=True)
    assert names(tmp_path) == [final.name]


def test_a_block_that_fails_leaves_all_as_it_was(tmp_path: Path) -> None:
    final = tmp_path / "model"
    old(final)

    def write() -> None:
        with whole_folder.written(final, "test") as partial:
            (partial / "rows").write_text("new")
            raise OSError(28, "No space left on device")

    with pytest.raises(EnvironmentFault, match=r"cannot write .*model: No space left"):
        write()
    assert (final / "rows").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_a_former_folder_can_be_kept_under_another_name(tmp_path: Path) -> None:
    final = tmp_path / "model"
    old(final)
    with whole_folder.written(
        final, "test", set_aside=lambda path: path.rename(tmp_path / "damaged")
    ) as partial:
        (partial / "rows").write_text("new")
    assert (final / "rows").read_text() == "new"
    assert (tmp_path / "damaged" / "rows").read_text() == "old"


def test_a_folder_that_lacks_bytes_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("abc")
    write_atomic(tmp_path / "list", '{"files": {"rows": {"bytes": 3, "sha256": "no"}}}')
    assert whole_folder.is_whole(tmp_path, "list")
    assert not whole_folder.is_whole(tmp_path, "list", thorough=True)
    (tmp_path / "rows").write_text("ab")
    assert not whole_folder.is_whole(tmp_path, "list")
    for damaged in ("[]", '{"files": {"rows": 3}}', "no JSON"):
        write_atomic(tmp_path / "list", damaged)
        assert not whole_folder.is_whole(tmp_path, "list")


def test_remove_removes_and_minds_no_absence(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    whole_folder.remove(tmp_path / "a")
    whole_folder.remove(tmp_path / "a")
    assert names(tmp_path) == []


def test_leftovers_of_another_name_stay(tmp_path: Path) -> None:
    for name in (".model.ab12.tmp", ".other.ab12.tmp"):
        (tmp_path / name / "x").mkdir(parents=True)
    (tmp_path / ".link.ab12.tmp").symlink_to(tmp_path / "nowhere")
    whole_folder.remove_leftovers(tmp_path, "model")
    assert names(tmp_path) == [".link.ab12.tmp", ".other.ab12.tmp"]
    whole_folder.remove_leftovers(tmp_path)
    assert names(tmp_path) == []
