"""A disk that turns read-only under a run, as ext4 does by itself when it finds an error: a real one, in a file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.base.processes import children
from kubetune.rundir import checkpoints
from tests import toy
from tests.ranks import wait_until

SIZE = 48 << 20


class Disk:
    """A file system on a loop device, and the switch by which its kernel code believes to have found an error."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self._device = folder, device
        self._switch = Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error")

    @property
    def can_fail(self) -> bool:
        return self._switch.exists()

    def fail(self) -> None:
        self._switch.write_text("1")
        wait_until(lambda: os.statvfs(self.folder).f_flag & os.ST_RDONLY or self._refuses())

    def _refuses(self) -> bool:
        try:
            (self.folder / "probe").touch()
        except OSError:
            return True
        return False

    def mend(self) -> None:
        """What an administrator does: unmount, check, mount again."""
        subprocess.run(["umount", str(self.folder)], check=True)
        check = ["e2fsck", "-fy", self._device]
        wait_until(lambda: subprocess.run(check, capture_output=True).returncode <= 1)  # more: the device is still held
        subprocess.run(["mount", "-o", "errors=remount-ro", self._device, str(self.folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """An ext4 disk of its own, where this user may have one."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mkfs.ext4") is None or os.geteuid() != 0:
        pytest.skip("needs root and mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(SIZE)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    found = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True)
    device = found.stdout.strip()
    if found.returncode:
        pytest.skip("needs loop devices")
    mounted = subprocess.run(["mount", "-o", "errors=remount-ro", device, str(folder)], capture_output=True)
    try:
        made = Disk(folder, device)
        if mounted.returncode or not made.can_fail:
            pytest.skip("cannot mount ext4")
        yield made
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True)
        subprocess.run(["losetup", "--detach", device], check=True)


@pytest.mark.parametrize(
    ("world_size", "training"),
    [
        (1, {}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, {"async_save": True}, marks=pytest.mark.slow),
        pytest.param(2, {"parallelism": "fsdp"}, marks=pytest.mark.slow),
    ],
    ids=["one rank", "two ranks", "saved beside the loop", "sharded"],
)
def test_a_disk_that_turns_read_only_in_the_middle(
    disk: Disk, toy_inputs: Path, tmp_path: Path, world_size: int, training: dict[str, object]
) -> None:
    sections = {"compute": {"processes": world_size}} if world_size > 1 else {}
    config = toy.make_config(toy_inputs, training, **sections)
    run_dir = toy.make_run(disk.folder / "run", config, world_size)
    environ = {**os.environ, "KUBETUNE_FAULT": "signal 19:step:6"}
    command = [sys.executable, "-P", "-m", "kubetune.agent", str(run_dir)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as agent:
        stopped: list[int] = []
        try:
            wait_until(lambda: stopped.extend(stopped_below(agent.pid)) or stopped or agent.poll() is not None)
            assert len(stopped) == 1
        except BaseException:
            agent.kill()  # else leaving this block would wait for it for ever; its rank dies with it
            raise
        disk.fail()
        os.kill(stopped[0], signal.SIGCONT)
        told = agent.communicate(timeout=100)[0]
    assert agent.returncode == errors.ENVIRONMENT, told
    assert "Read-only file system" in told
    for sign in ("Traceback", "bug in kubetune"):
        assert sign not in told, told
    saved = {checkpoints.folder_of(run_dir, 3)} | ({None} if "async_save" in training else set())
    assert checkpoints.find(run_dir) in saved
    disk.mend()
    assert toy.train(run_dir, world_size) == [errors.OK] * world_size, (run_dir / "logs" / "rank-0.log").read_text()
    assert len(toy.losses(run_dir)) == 2 * toy.STEPS_PER_EPOCH


def stopped_below(pid: int) -> list[int]:
    """Processes below this one that SIGSTOP holds."""
    found, pending = [], children(pid)
    while pending:
        child = pending.pop()
        if toy.is_stopped(child):
            found.append(child)
        pending += children(child)
    return found
