"""File systems without locks: a file stands in, which is refused to others, freed by death and taken by one only."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kubetune import errors
from kubetune.base import locks
from kubetune.base.locks import lockfile
from tests import toy
from tests.ranks import wait_until
from tests.refusing import is_possible, refusing

pytestmark = pytest.mark.skipif(not is_possible(), reason="needs seccomp")

HOLDER = """
import sys
from kubetune.base.locks import lockfile
lockfile.BEAT_SECONDS = 0.2
from kubetune.base.locks import lock
from kubetune.errors import EnvironmentFault
try:
    with lock(sys.argv[1], wait=sys.argv[2] == "wait"):
        print("held", flush=True)
        input()
except EnvironmentFault as fault:
    sys.exit(str(fault))
"""


def start(
    path: Path, how: str, reason: str = "ENOLCK", code: str = HOLDER
) -> subprocess.Popen[str]:
    command = refusing([f"flock={reason}"], [sys.executable, "-c", code, path, how])
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_lock_that_fails_is_told_by_its_path(tmp_path: Path) -> None:
    with start(tmp_path / "x.lock", "at once", "EIO") as holder:
        assert f"cannot write {tmp_path / 'x.lock'}: Input/output error" in holder.communicate()[1]
        assert holder.returncode == 1


@pytest.mark.parametrize("reason", ["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def test_another_file_stands_in_and_dies_with_its_holder(tmp_path: Path, reason: str) -> None:
    path = tmp_path / "x.lock"
    with start(path, "at once", reason) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with start(path, "at once", reason) as second:
            stderr = second.communicate()[1]
            assert second.returncode == 1
            assert f"x.lock.held is held by process {holder.pid} on " in stderr
        holder.kill()
        warned = holder.communicate()[1]
    assert "this file system keeps no locks (" in warned
    assert "do not stop" in warned
    with start(path, "at once", reason) as third:
        assert third.communicate("\n")[0] == "held\n"
        assert third.returncode == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.lock"]


def test_one_after_the_other_gets_it(tmp_path: Path) -> None:
    """What each of them does alone would go wrong if two did it at once."""
    alone = """
import os, sys
from kubetune.base.locks import lockfile
lockfile.BEAT_SECONDS = 0.02
from kubetune.base.locks import lock
for _ in range(5):
    with lock(sys.argv[1], wait=True):
        os.mkdir(sys.argv[1] + ".alone")
        os.rmdir(sys.argv[1] + ".alone")
"""
    with ExitStack() as stack:
        all_ = [
            stack.enter_context(start(tmp_path / "x.lock", "wait", code=alone)) for _ in range(4)
        ]
        for waiter in all_:
            stderr = waiter.communicate()[1]
            assert waiter.returncode == 0, stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.lock"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockfile, "BEAT_SECONDS", 0.02)
    # A hundred beats, which no load of a machine holds up.
    monkeypatch.setattr(lockfile, "STALE_SECONDS", 2.0)


@pytest.mark.parametrize(
    "text", ["process 7 on far\n7\nelsewhere\nabc\n000000000003\n", ""], ids=["dead", "unnamed"]
)
def test_what_a_holder_of_another_machine_left_is_taken_when_it_stands_still(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    file = tmp_path / "x.lock.held"
    file.write_text(text)
    with (
        caplog.at_level(logging.WARNING),
        lockfile.held(tmp_path / "x.lock", wait=False, reason="none"),
    ):
        assert "looking whether it lives" in caplog.text
        with (
            pytest.raises(errors.EnvironmentFault, match="is held by process"),
            lockfile.held(tmp_path / "x.lock", wait=False, reason="none"),
        ):
            pass
    assert not list(tmp_path.iterdir())


def test_what_nobody_finished_clearing_up_is_named(tmp_path: Path, quick: None) -> None:
    (tmp_path / "x.lock.held").write_text("process 7 on far\n7\nelsewhere\nabc\n000000000003\n")
    (tmp_path / "x.lock.held.abc").touch()
    with (
        pytest.raises(errors.EnvironmentFault, match=r"x\.lock\.held\.abc by another.*remove both"),
        lockfile.held(tmp_path / "x.lock", wait=True, reason="none"),
    ):
        pass


def test_who_has_lost_its_place_ends(tmp_path: Path) -> None:
    code = "from kubetune.base.locks import lockfile\nlockfile.BEAT_SECONDS = 0.02\n" + HOLDER
    with start(tmp_path / "x.lock", "at once", code=code) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        (tmp_path / "x.lock.held").write_text("process 7 on far\n7\nelsewhere\nabc\n000000000003\n")
        assert holder.wait(60) == errors.ENVIRONMENT
        assert "is lost to another process" in holder.communicate()[1]
    assert "far" in (tmp_path / "x.lock.held").read_text()


@pytest.mark.slow
def test_a_run_on_such_a_disk(toy_inputs: Path, tmp_path: Path) -> None:
    run_dir = toy.make_run(tmp_path / "run", toy.make_config(toy_inputs, {"max_steps": 2}))
    command = refusing(["flock=ENOLCK"], [sys.executable, "-P", "-m", "kubetune.agent", run_dir])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as first:
        wait_until(lambda: (run_dir / "logs" / "rank-0.log").exists() or first.poll() is not None)
        second = subprocess.run(command, capture_output=True, text=True)
        assert second.returncode == errors.ENVIRONMENT
        assert "is held by process" in second.stderr
        output = first.communicate()
        assert first.returncode == 0, output
    assert "keeps no locks" in output[1]
    assert not list(run_dir.rglob("*.held*"))
    with locks.lock(run_dir / "logs" / "node-0.lock", wait=False):
        pass
