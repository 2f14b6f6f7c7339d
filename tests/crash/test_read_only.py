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
from kubetune.rundir import checkpoints
from kubetune.training import worker
from tests import toy
from tests.ranks import started, wait_all, wait_until

SIZE = 48 << 20


class Disk:
    """A file system in a file, and the switch by which its kernel code believes to have found an error."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.folder, self._image = folder, image
        self._mount()

    def _mount(self) -> None:
        """Mount by a loop device of its own, let go of with the mount; skip where this user may not."""
        options = ["-o", "loop,errors=remount-ro"]
        mounted = subprocess.run(
            ["mount", *options, str(self._image), str(self.folder)], capture_output=True
        )
        device = os.path.realpath(
            f"/sys/dev/block/{os.major(dev := self.folder.stat().st_dev)}:{os.minor(dev)}"
        )
        self._switch = Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error")
        if mounted.returncode or not self._switch.exists():
            self.unmount(check=False)
            pytest.skip("cannot mount ext4")

    def unmount(self, check: bool = True) -> None:
        subprocess.run(["umount", str(self.folder)], capture_output=True, check=check)

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
        """Do what an administrator does: unmount, check, mount again.

        A copy is checked: processes with a mount table of their own, begun meanwhile, may hold the first file's device.
        """
        self.unmount()
        self._image = shutil.copy(self._image, self._image.with_name("mended"))
        subprocess.run(
            ["e2fsck", "-fy", str(self._image)], capture_output=True
        )  # its status is 1 for what it mended
        self._mount()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Yield an ext4 disk of its own, where this user may have one."""
    image = tmp_path / "image"
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mkfs.ext4") is None or os.geteuid() != 0:
        pytest.skip("needs root and mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(SIZE)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    made = Disk(image, folder)
    yield made
    made.unmount(check=False)


slow = pytest.mark.slow
FAULT = {"KUBETUNE_FAULT": "signal 19:step:6"}


def fail_under_ranks(disk: Disk, run_dir: Path, world_size: int) -> list[int]:
    """Return the exit codes of ranks whose disk fails while one of them is in its sixth step."""
    with started(worker.main, world_size, [str(run_dir)], environ=FAULT) as ranks:
        toy.wait_until_stopped(ranks[0])
        disk.fail()
        toy.go_on(ranks[0])
        return wait_all(ranks)


def fail_under_agent(disk: Disk, run_dir: Path) -> int:
    """Return the exit code of an agent with such ranks, after printing what it prints."""
    command = [sys.executable, "-P", "-m", "kubetune.agent", str(run_dir)]
    with subprocess.Popen(
        command, env={**os.environ, **FAULT}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as agent:
        try:
            wait_until(lambda: toy.stopped_below(agent.pid) or agent.poll() is not None)
            (stopped,) = toy.stopped_below(agent.pid)
        except BaseException:
            agent.kill()  # else leaving this block would wait for it for ever; its rank dies with it
            raise
        disk.fail()
        os.kill(stopped, signal.SIGCONT)
        print(agent.communicate(timeout=100)[0].decode())
    return agent.returncode


@pytest.mark.parametrize(
    ("world_size", "training", "by_agent"),
    [
        (1, {}, False),
        pytest.param(1, {}, True, marks=slow),
        pytest.param(2, {}, True, marks=slow),
        pytest.param(2, {"async_save": True}, True, marks=slow),
        pytest.param(2, {"parallelism": "fsdp"}, True, marks=slow),
    ],
    ids=["one rank", "agent", "two ranks", "saved beside the loop", "sharded"],
)
def test_a_disk_that_turns_read_only_in_the_middle(
    disk: Disk,
    toy_inputs: Path,
    capfd: pytest.CaptureFixture[str],
    world_size: int,
    training: dict[str, object],
    by_agent: bool,
) -> None:
    sections = {"compute": {"processes": world_size}} if world_size > 1 else {}
    config = toy.make_config(toy_inputs, training, **sections)
    run_dir = toy.make_run(disk.folder / "run", config, world_size)
    if by_agent:
        codes = [fail_under_agent(disk, run_dir)]
    else:
        codes = fail_under_ranks(disk, run_dir, world_size)
    output = "".join(capfd.readouterr())
    assert set(codes) == {errors.ENVIRONMENT}, output
    # What a forked rank says goes where the first test's output went, and to a log on the disk that failed.
    assert "Read-only file system" in output or not by_agent
    for sign in ("Traceback", "bug in kubetune"):
        assert sign not in output, output
    saved = {checkpoints.folder_of(run_dir, 3)} | ({None} if "async_save" in training else set())
    assert checkpoints.find(run_dir) in saved
    disk.mend()
    assert toy.train(run_dir, world_size) == [errors.OK] * world_size, toy.log_of(run_dir)
    assert len(toy.losses(run_dir)) == 2 * toy.STEPS_PER_EPOCH
