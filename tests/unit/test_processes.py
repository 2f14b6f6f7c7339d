"""No process outlives the one that started it: real processes, really killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kubetune.base import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")

CHILD = "import signal; from kubetune.base.processes import *; die_with_parent(); print(1, flush=True); signal.pause()"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def run_python(program: str, **variables: str) -> subprocess.Popen[str]:
    environ = {**os.environ, **variables}
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environ
    )


def read_pid(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def ends(pidfd: int, seconds: float = 10) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def test_a_child_dies_with_its_parent() -> None:
    with run_python(PARENT) as parent:
        child = os.pidfd_open(read_pid(parent))
        assert not ends(child, seconds=0)
        parent.kill()
    assert ends(child)
    os.close(child)


def test_a_child_whose_agent_is_gone_ends_at_once() -> None:
    with run_python("pass") as agent:
        pass
    with run_python(CHILD, **{processes.AGENT_PID: str(agent.pid)}) as child:
        assert child.wait(60) == -signal.SIGKILL


def test_orphans_are_adopted_and_killed() -> None:
    # The child starts a grandchild and dies; the grandchild, which asked for no death signal, must still be found.
    program = """
import os, signal, subprocess, sys
from kubetune.base.processes import adopt_orphans, children, kill_children
adopt_orphans()
starter = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
print(subprocess.run([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True).stdout.strip(), flush=True)
sys.stdin.readline()
kill_children()
print(children(os.getpid()), flush=True)
"""
    adopter = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    orphan = read_pid(adopter)
    assert processes.is_alive(orphan)
    assert processes.children(adopter.pid) == [orphan]
    out, _ = adopter.communicate("\n", timeout=60)
    assert out == "[]\n"
    assert not processes.is_alive(orphan)


def test_a_process_that_was_not_waited_for_is_not_alive() -> None:
    ended = run_python("pass")
    pidfd = os.pidfd_open(ended.pid)
    assert ends(pidfd)
    assert not processes.is_alive(ended.pid)
    os.close(pidfd)
    with ended:
        pass


def test_this_process_is_alive() -> None:
    assert processes.is_alive(os.getpid())


@pytest.mark.parametrize("asked", ["2,1", " 3 ", "many", ""])
def test_a_number_of_threads_that_openmp_takes_or_ignores_is_tried(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    processes.try_threads()


def test_a_process_that_ends_while_it_is_looked_at_is_not_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = run_python("import signal; signal.pause()")

    def read_late(path: Path) -> str:
        with path.open() as file:
            child.kill()
            child.wait()
            return file.read()

    monkeypatch.setattr(Path, "read_text", read_late)
    assert not processes.is_alive(child.pid)
    assert child.stdout is not None
    child.stdout.close()
