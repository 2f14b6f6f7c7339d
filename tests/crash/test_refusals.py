"""What the kernel refuses to the processes of a run, wherever it strikes, ends with 3 and with what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.rundir import exit_status
from tests import toy
from tests.refusing import is_possible, refusing

pytestmark = pytest.mark.skipif(not is_possible(), reason="needs seccomp")

slow = pytest.mark.slow
NO_CLONE3 = (
    "clone3=ENOSYS"  # then the C library falls back to `clone`, whose flags can be looked at
)


def agent(run_dir: Path) -> list[object]:
    return [sys.executable, "-P", "-m", "kubetune.agent", run_dir]


def limited(limit: str, command: Sequence[object]) -> list[str]:
    return ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *map(str, command)]


REFUSED = {
    "no processes": ([NO_CLONE3, "clone=EAGAIN"], "", "no more processes or threads"),
    "no memory for processes": ([NO_CLONE3, "clone=ENOMEM"], "", "memory"),
    "no threads": ([NO_CLONE3, "clone&0x10000=EAGAIN"], "", "no more processes or threads"),
    "little address space": ([], "-v 700000", "ulimit -v allows 716,800,000 bytes"),
    "hardly any address space": ([], "-v 300000", "allow more"),
    "few files": ([], "-n 12", "ulimit -n"),
    "no folders": (["mkdir=ENOSPC"], "", "free some space"),
    "no names": (["rename=EIO"], "", "Input/output error"),
    "no flushing": (["fsync=EIO"], "", "Input/output error"),
    "no links": (["symlink=EROFS"], "", "Read-only file system"),
    "no new files": (["openat&0x40=EROFS"], "", "Read-only file system"),
    "quota": (["openat&0x40=EDQUOT"], "", "Disk quota exceeded"),
}
QUICK = {
    ("no processes", 1),
    ("no new files", 1),
    ("no threads", 2),
}


@pytest.mark.parametrize(
    ("refused", "world_size"),
    [
        pytest.param(name, size, marks=() if (name, size) in QUICK else slow)
        for name in REFUSED
        for size in (1, 2)
        if (name, size) != ("few files", 2)  # torch tries to connect until its patience ends
    ],
)
def test_what_is_refused(toy_inputs: Path, tmp_path: Path, refused: str, world_size: int) -> None:
    rules, limit, words = REFUSED[refused]
    config = toy.make_config(toy_inputs, {"max_steps": 1}, data={"cache": str(tmp_path / "cache")})
    run_dir = toy.make_run(tmp_path / "run", config, world_size)
    command = limited(limit, agent(run_dir)) if limit else agent(run_dir)
    done = subprocess.run(refusing(rules, command), capture_output=True, text=True, timeout=100)
    output = done.stdout + done.stderr
    assert done.returncode == errors.ENVIRONMENT, output
    assert words.lower() in output.lower()
    for sign in ("Traceback", "bug in kubetune"):
        assert sign not in output, output
    if (run_dir / exit_status.EXIT).exists():
        assert exit_status.read_exit_status(run_dir).code == errors.ENVIRONMENT  # type: ignore[union-attr]
