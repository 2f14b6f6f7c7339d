"""The reward process as a rank sees it: asked with a deadline, and killed with all its children.

isolation.py limits the worker in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubetune
from kubetune import errors
from kubetune.base import processes
from kubetune.config.schema.rewards import RewardConfig
from kubetune.scoring.rewards import isolation
from kubetune.scoring.rewards.printed import Printed

# Longest time that a reward process may take to import the files of its functions.
START_SECONDS = 120.0
_LARGEST_REPLY_BYTES = 64 * 2**20
# Beginning of the name of a process' folder; the pid of its rank follows.
_FOLDER = "kubetune-rewards-"


class Gone(Exception):
    """The reward process hangs, has ended, or wrote something that is no reply."""


class RewardProcess:
    """A process that judges answers by reward functions. Left by `close`."""

    def __init__(self, memory_bytes: int) -> None:
        """Begin the process, and wait until it is confined. Raise ConfigError if that fails."""
        # A folder of its own is all that it may leave something in. It lies in one that nobody else may enter, since
        # functions can give their files any mode.
        _remove_folders_of_the_dead()
        self._private = tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-")
        self.folder = os.path.join(self._private, "work")
        os.mkdir(self.folder)
        read_requests, self._requests = os.pipe()
        self.replies, write_replies = os.pipe()
        printed, write_printed = os.pipe()
        self._printed = Printed(printed)
        # -u: what functions print would stay in a buffer, which is lost as the process is killed in the end.
        command = [
            sys.executable, "-u", "-m", "kubetune.scoring.rewards.worker", str(read_requests), str(write_replies),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=_environment(self.folder),
            stdin=subprocess.DEVNULL,
            stdout=write_printed,
            stderr=write_printed,
            pass_fds=(read_requests, write_replies),
            start_new_session=True,  # so that one signal reaches all that functions have started
            preexec_fn=processes.die_with_parent,
        )
        # The child has these ends now; were they open here too, its end would never be seen.
        os.close(read_requests)
        os.close(write_replies)
        os.close(write_printed)
        reply = self._ask_at_start(memory_bytes, "confining the reward process")
        self.is_separate: bool = reply["is_separate"]  # it has a list of processes of its own
        # Bounds that the kernel refuses, of isolation.WITHOUT.
        self.refused: list[str] = reply["refused"]

    def load(self, rewards: Sequence[RewardConfig]) -> None:
        """Load the functions. Close the process and raise ConfigError if that fails."""
        reply = self._ask_at_start(list(rewards), "loading the reward functions")
        problems = reply.get("problems")
        if problems == []:
            return
        self.close()
        if not isinstance(problems, list):
            problems = ["the reward process wrote something that is no reply"]
        raise errors.ConfigError([f"rewards: {problem}" for problem in problems])

    def _ask_at_start(self, message: Any, what: str) -> dict[str, Any]:
        try:
            return self.ask(message, START_SECONDS, what)
        except Gone as gone:
            self.close()
            raise errors.ConfigError(f"rewards: {gone}") from None

    @property
    def pid(self) -> int:
        """The process' number."""
        return self._process.pid

    def close(self) -> None:
        """Kill the process with all that it has started, and remove its folder."""
        # Process 1 of the list: a function may have put it into another session, and with it the kernel kills all.
        for child in processes.children(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        # The whole session, with all that functions have started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._requests)
        os.close(self.replies)
        self._printed.close()
        _remove(self._private)

    def ask(self, message: Any, seconds: float, what: str) -> dict[str, Any]:
        """Return the reply to a message. Raise Gone after so many seconds, or when there can be none."""
        self._send(message)
        return self._receive(seconds, what)

    def _send(self, message: Any) -> None:
        content = pickle.dumps(message)
        # The length, then as many bytes; a pipe may take only a part at a time.
        content = len(content).to_bytes(8, "big") + content
        try:
            while content:
                content = content[os.write(self._requests, content) :]
        except OSError:
            raise Gone(f"the reward process has ended ({self._end()})") from None

    def _receive(self, seconds: float, what: str) -> dict[str, Any]:
        # One deadline for the length and for the content.
        deadline = time.monotonic() + seconds
        size = int.from_bytes(self._read(8, deadline, seconds, what), "big")
        if size > _LARGEST_REPLY_BYTES:
            raise Gone(f"{what}: the reward process wrote something that is no reply")
        content = self._read(size, deadline, seconds, what)
        # Text that was printed before the reply is in its pipe by now.
        self._printed.finish()
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            reply = None

        if not isinstance(reply, dict):
            raise Gone(f"{what}: the reward process wrote something that is no reply")
        return reply

    def _read(
        self,
        size: int,
        deadline: float,
        seconds: float,
        what: str,
    ) -> bytes:
        content = b""
        while len(content) < size:
            left = deadline - time.monotonic()
            pipes = [self.replies]
            if self._printed.is_open:
                pipes.append(self._printed.pipe)
            is_readable, _, _ = select.select(pipes, [], [], max(0.0, left))
            # A process that prints without end is stopped at the same moment.
            if not is_readable or left <= 0:
                raise Gone(f"{what}: took longer than {seconds:g} s and was stopped")
            if self.replies not in is_readable:
                self._printed.read()
                continue
            part = os.read(self.replies, size - len(content))
            if not part:
                raise Gone(f"{what}: ended the reward process ({self._end()})")
            content += part

        return content

    def _end(self) -> str:
        """Return how the process has ended, in words."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        if code == isolation.TOO_MANY_PROCESSES:
            return f"it had more than {isolation.MOST_PROCESSES} processes"
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _remove_folders_of_the_dead() -> None:
    """Remove what reward functions of ranks that were killed have left, if it is this user's."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdecimal() and not processes.is_alive(int(pid)):
            _remove(str(folder))


def _remove(folder: str) -> None:
    """Remove a folder with whatever functions have put there, as far as its modes allow."""
    # Not shutil.rmtree, which ends in a RecursionError where folders are nested a thousand deep.
    remove = ["rm", "-rf", "--", folder]
    subprocess.run(remove, check=False, stderr=subprocess.DEVNULL)
    if os.path.lexists(folder):
        # A folder without rights for its owner is not entered.
        subprocess.run(["chmod", "-R", "u+rwx", folder], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(remove, check=False, stderr=subprocess.DEVNULL)


def _environment(folder: str) -> dict[str, str]:
    """Return the environment of the reward process: nothing of the run's, and a folder to write to."""
    package = str(Path(kubetune.__file__).parents[1])
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": folder,
        "TMPDIR": folder,
        "PYTHONPATH": package,
        "OMP_NUM_THREADS": "1",
    }
