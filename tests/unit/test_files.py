"""Files that appear whole or not at all, and locks that die with their holder."""

from __future__ import annotations

import errno
import hashlib
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetune.base import files
from kubetune.base.faults import fault_of
from kubetune.base.files import explained_writes, join_inside, sha256_file, write_atomic
from kubetune.base.locks import lock
from kubetune.base.whole_folder import remove_abandoned
from kubetune.cli import main
from kubetune.errors import EnvironmentFault


@pytest.mark.parametrize("content", ["text ü", b"\x00\xff", ""])
def test_write_atomic_writes_creates_folders_and_leaves_nothing_else(
    tmp_path: Path, content: str | bytes
) -> None:
    file = tmp_path / "a" / "b.txt"
    write_atomic(file, "old")
    write_atomic(file, content)
    assert file.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(file.parent.iterdir()) == [file]


def test_a_write_that_fails_keeps_the_old_content_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "a"
    write_atomic(file, "old")
    # A file size limit makes the kernel refuse the write, as a full disk does.
    script = f"""
import resource, signal
from kubetune.base.files import write_atomic
from kubetune.errors import EnvironmentFault
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomic({str(file)!r}, b"x" * 5000)
except EnvironmentFault as error:
    print(error)
"""
    stdout = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert str(file) in stdout
    assert "too large" in stdout
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_no_file_takes_the_place_of_a_pipe_a_device_or_a_stream(tmp_path: Path) -> None:
    """As root /dev/null and /dev/stdout themselves would be replaced, for every process of the machine."""
    pipe = tmp_path / "pipe"
    device = tmp_path / "device"
    os.mkfifo(pipe)
    device.symlink_to(os.devnull)
    for path, what in (
        (pipe, "is a pipe"),
        (device, "is a device"),
        (Path("/dev/fd/1"), "is a stream of this process"),
    ):
        with pytest.raises(EnvironmentFault, match=f"cannot write {path}: {what}; expected"):
            write_atomic(path, "text")
    assert sorted(os.listdir(tmp_path)) == ["device", "pipe"]
    assert pipe.is_fifo()
    assert device.is_symlink()


def test_what_is_written_within_a_folder_does_not_make_that_folder_anew(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for path in (run_dir / "plan.json", run_dir / "logs" / "rank-0.exit.json"):
        with pytest.raises(EnvironmentFault, match="No such file or directory"):
            write_atomic(path, "text", within=run_dir)
    assert not run_dir.exists()
    run_dir.mkdir()
    write_atomic(run_dir / "logs" / "rank-0.exit.json", "text", within=run_dir)


def test_an_unwritable_folder_is_an_environment_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot write"):
        write_atomic(tmp_path / "file" / "below", "x")


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 1000)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"abc" * 1000).hexdigest()


HOLDER = """
import sys
from kubetune.base.locks import lock
with lock(sys.argv[1], wait=True):
    print("held", flush=True)
    input()
"""


def test_a_held_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(EnvironmentFault, match=f"process {holder.pid} "),
            lock(path, wait=False),
        ):
            pass
        holder.kill()
    with lock(path, wait=False):
        assert f"process {os.getpid()} " in path.read_text()


def test_waiting_for_a_lock_gets_it_when_the_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    with lock(path, wait=False):
        command = [sys.executable, "-c", HOLDER, str(path)]
        waiter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    output, _ = waiter.communicate("\n")
    assert output == "held\n"
    assert waiter.returncode == 0


OUTSIDE = [
    "..", "../", "../x", "../../x", "a/..//../x", "a/../../x", "a/b/../../../x", "./../x", "././../x", "a/./../../x",
    "../root2/x", "../root/../x", "a/../../root2", "/", "//", "/etc/passwd", "//etc/passwd", "/./etc/passwd",
    "/proc/self/environ", "/dev/zero", "file:///etc/passwd", "file://x", "http://x/y", "https://x/y", "s3://b/k",
    "hf://x/y", "gs://b/../k", "\0", "a\0b", "a\0/../../x", "../\0", "x\0.png", "out", "out/x", "out/../x", "out/..",
    "a/../out/x", "./out/x", "deep/out/x", "deep/../out/x", "up/x", "passwd",
]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_that_lead_outside_are_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "root" / "deep").mkdir(parents=True)
    for link, target in (
        ("out", tmp_path),
        ("deep/out", "/"),
        ("up", ".."),
        ("passwd", "/etc/passwd"),
    ):
        (tmp_path / "root" / link).symlink_to(target)
    with pytest.raises(ValueError, match="path"):
        join_inside(tmp_path / "root", path)


@given(st.lists(st.sampled_from(["a", "b", ".", "..", "c d"]), max_size=6))
def test_a_joined_path_is_inside(parts: list[str]) -> None:
    try:
        joined = join_inside("/some/root", "/".join(parts))
    except ValueError:
        return
    assert joined.is_relative_to("/some/root")


def test_a_working_folder_that_is_gone_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "run.yaml").write_text("model: m\ndata: {train: t.jsonl}\n")
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["render", str(tmp_path / "run.yaml")]) == 3
    assert (
        "the folder that this was started in is gone; go to another one (cd)"
        in capsys.readouterr().err
    )


def test_a_working_folder_that_no_library_can_name_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latin-1 \udce9").mkdir()
    monkeypatch.chdir(tmp_path / "latin-1 \udce9")
    fault = fault_of(
        ValueError("Path …/adapter_model.safetensors is not valid UTF-8")
    )  # as safetensors has it
    assert (
        "the folder that this was started in has a name that is not UTF-8; go to another one (cd)"
        in str(fault)
    )
    assert fault_of(ValueError("another")) is None


def test_a_library_that_cannot_be_loaded_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch has it with TORCH_LOGS=bogus; what fails in a call of ours is another matter."""
    (tmp_path / "broken_library.py").write_text("raise ValueError('\\nLEVEL is no number')\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("broken_library")
    except ValueError as error:
        message = str(fault_of(error))
    assert message.startswith(
        "broken_library cannot be loaded: ValueError: LEVEL is no number; correct the environment"
    )
    assert fault_of(ValueError("of ours")) is None


def test_a_write_that_numpy_cut_short_is_a_full_disk(tmp_path: Path) -> None:
    with (
        open("/dev/full", "wb") as full,
        pytest.raises(EnvironmentFault, match=r"written .*bytes free\); free some space and run"),
        explained_writes(tmp_path),
    ):
        np.ones(100_000).tofile(full)


def test_a_disk_without_inodes_is_told_from_one_without_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "a"))
    with (
        pytest.raises(EnvironmentFault, match=r"bytes free\); free some space and run"),
        explained_writes(tmp_path),
    ):
        raise full
    real = os.statvfs(tmp_path)
    facts = {name: getattr(real, name) for name in dir(real) if name.startswith("f_")}
    empty = SimpleNamespace(**{**facts, "f_files": 1000, "f_favail": 0})
    monkeypatch.setattr(os, "statvfs", lambda path: empty)
    with (
        pytest.raises(EnvironmentFault, match=r"but no inodes: `df -i` shows them\); delete some"),
        explained_writes(tmp_path),
    ):
        raise full
    assert "delete some files" in str(fault_of(full))


def test_a_file_system_that_runs_out_of_inodes_is_told_as_such(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=4", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        with pytest.raises(EnvironmentFault, match="but no inodes: `df -i` shows them"):
            list(map(write_atomic, [disk / str(number) for number in range(9)], "x" * 9))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


WRITE = """
import sys
from kubetune.base.files import written_whole
with written_whole(sys.argv[1]) as file:
    file.write(b"x")
    print(file.name, flush=True)
    sys.stdin.read()
"""


def test_only_what_a_killed_process_was_writing_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_YOUNG_SECONDS", -1.0)
    with subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        half = Path(writer.stdout.readline().strip())
        remove_abandoned(tmp_path)
        assert half.is_file(), "somebody is writing it"
        writer.kill()
        writer.wait()
    (tmp_path / "b").write_text("whole")
    remove_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
