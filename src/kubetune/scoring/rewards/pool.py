"""The reward process as a rank sees it: asked with a deadline, killed with all its children, and begun again.

A function that raises, hangs, runs out of memory or ends its process gives no reward for the group at hand; the run
continues, or ends, as `grpo.on_reward_error` says. isolation.py limits a worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubetune
from kubetune import errors
from kubetune.base import processes
from kubetune.config.schema.grpo import GrpoConfig
from kubetune.config.schema.rewards import RewardConfig
from kubetune.rundir import heartbeat
from kubetune.scoring.rewards import isolation
from kubetune.scoring.rewards.printed import Printed
from kubetune.scoring.rewards.request import Judgement, Request

if TYPE_CHECKING:
    from kubetune.scoring.rewards.models import ModelJudge

# Longest time that a reward process may take to import the files of its functions.
START_SECONDS = 120.0
_LARGEST_REPLY_BYTES = 64 * 2**20
# Beginning of the name of a process' folder; the pid of its rank follows.
_FOLDER = "kubetune-rewards-"


class _Gone(Exception):
    """The reward process hangs, has ended, or wrote something that is no reply."""


class RewardPool:
    """All rewards of a rank: functions of its reward process, and models that the rank holds. Left by `close`."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        settings: GrpoConfig,
        models: Mapping[int, ModelJudge] | None = None,
    ) -> None:
        """Begin the process. Raise ConfigError if a file or function of the config cannot be loaded.

        `models`: by the number of the reward.
        """
        self._rewards = [with_absolute_file(reward) for reward in rewards]
        self._settings = settings
        self.models = models or {}
        self._process: subprocess.Popen[bytes] | None = None
        self.is_separate = False  # it has a list of processes of its own
        self.refused: list[str] = []  # bounds that the kernel refuses, of isolation.WITHOUT
        self._printed: Printed | None = None
        self._folder = ""
        self._requests = -1  # the pipe to the process
        self._replies = -1  # the pipe from it
        if len(self.models) < len(self._rewards):
            self._start()

    def judge(self, request: Request) -> list[Judgement]:
        """Return what each reward says of the answers, in the order of the config."""
        judgements = []
        for number, reward in enumerate(self._rewards):
            model = self.models.get(number)
            judgement = self._judge(number, request) if model is None else model.judge(request)
            if judgement.error and self._settings.on_reward_error == "stop":
                raise errors.ConfigError(
                    f"reward {reward.title}: {judgement.error}\ngrpo.on_reward_error is stop, so the run ends"
                )
            judgements.append(judgement)
        return judgements

    def close(self) -> None:
        """Kill the process with all that it has started, and remove its folder."""
        if self._process is None:
            return
        # Process 1 of the list: a function may have put it into another session, and with it the kernel kills all.
        for child in processes.children(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        # The whole session, with all that functions have started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        os.close(self._requests)
        os.close(self._replies)
        if self._printed is not None:
            self._printed.close()
            self._printed = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _judge(self, number: int, request: Request) -> Judgement:
        reward = self._rewards[number]
        heartbeat.beat("reward")
        error = ""
        reply: Any = None
        try:
            if self._process is None:
                self._start()
            self._send((number, request))
            reply = self._receive(self._settings.reward_timeout_seconds, f"reward {reward.title}")
        except _Gone as gone:
            # The next request begins another process.
            self.close()
            error = str(gone)

        return _judgement_of(reply, len(request.texts), error)

    def _start(self) -> None:
        """Begin the process, and wait until it has loaded its functions."""
        if self.has_code:
            # Functions of the same user could read the environment of this process, with its tokens.
            processes.hide_memory()
        # A folder of its own is all that it may leave something in.
        _remove_folders_of_the_dead()
        self._folder = tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-")
        read_requests, self._requests = os.pipe()
        self._replies, write_replies = os.pipe()
        printed, write_printed = os.pipe()
        self._printed = Printed(printed)
        # -u: what functions print would stay in a buffer, which is lost as the process is killed in the end.
        command = [
            sys.executable, "-u", "-m", "kubetune.scoring.rewards.worker", str(read_requests), str(write_replies),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=_environment(self._folder),
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
        try:
            memory_bytes = int(self._settings.reward_memory_gib * 2**30)
            self._send((self._rewards, memory_bytes))
            reply = self._receive(START_SECONDS, "loading the reward functions")
        except _Gone as gone:
            self.close()
            raise errors.ConfigError(f"rewards: {gone}") from None

        if reply.get("problems"):
            self.close()
            raise errors.ConfigError([f"rewards: {problem}" for problem in reply["problems"]])
        self.is_separate = bool(reply.get("is_separate"))
        self.refused = [name for name in isolation.WITHOUT if name in reply.get("refused", ())]
        if self.refused and self.has_code and self._settings.require_reward_isolation:
            self.close()
            raise errors.EnvironmentFault(
                f"grpo.require_reward_isolation: the kernel of this machine refuses {isolation.consequences(self.refused)}"
                ". Run it where the kernel allows that, or leave the key out. Nothing was trained."
            )

    @property
    def has_code(self) -> bool:
        """True if functions of the user's are among the rewards."""
        return any(reward.is_code for reward in self._rewards)

    def _send(self, message: Any) -> None:
        content = pickle.dumps(message)
        # The length, then as many bytes; a pipe may take only a part at a time.
        content = len(content).to_bytes(8, "big") + content
        try:
            while content:
                content = content[os.write(self._requests, content) :]
        except OSError:
            raise _Gone(f"the reward process has ended ({self._end()})") from None

    def _receive(self, seconds: float, what: str) -> Any:
        """Return the next reply. Raise _Gone after so many seconds, or when there can be none."""
        # One deadline for the length and for the content.
        deadline = time.monotonic() + seconds
        size = int.from_bytes(self._read(8, deadline, seconds, what), "big")
        if size > _LARGEST_REPLY_BYTES:
            raise _Gone(f"{what}: the reward process wrote something that is no reply")
        content = self._read(size, deadline, seconds, what)
        # Text that was printed before the reply is in its pipe by now.
        if self._printed is not None:
            self._printed.finish()
        try:
            reply = json.loads(content)
        except ValueError:
            reply = None

        if not isinstance(reply, dict):
            raise _Gone(f"{what}: the reward process wrote something that is no reply")
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
            pipes = [self._replies]
            if self._printed is not None and self._printed.is_open:
                pipes.append(self._printed.pipe)
            is_readable, _, _ = select.select(pipes, [], [], max(0.0, left))
            # A process that prints without end is stopped at the same moment.
            if not is_readable or left <= 0:
                raise _Gone(f"{what}: took longer than {seconds:g} s and was stopped")
            if self._replies not in is_readable:
                assert self._printed is not None
                self._printed.read()
                continue
            part = os.read(self._replies, size - len(content))
            if not part:
                raise _Gone(f"{what}: ended the reward process ({self._end()})")
            content += part

        return content

    def _end(self) -> str:
        """Return how the process has ended, in words."""
        if self._process is None:
            return "it was not started"
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
            shutil.rmtree(folder, ignore_errors=True)


def _judgement_of(reply: Any, number: int, error: str) -> Judgement:
    """Return the judgement in a reply; without one no answer has a reward."""
    nothing: list[float | None] = [None] * number
    if reply is None:
        return Judgement(nothing, error)

    rewards = reply.get("rewards")
    if not isinstance(rewards, list) or len(rewards) != number:
        return Judgement(nothing, "the reward process wrote something that is no reply")
    # The process has run code of others: nothing that it writes is taken for granted.
    checked: list[float | None] = []
    for reward in rewards:
        is_number = isinstance(reward, (int, float)) and abs(reward) < float("inf")
        checked.append(float(reward) if is_number else None)
    return Judgement(checked, str(reply.get("error", "")), dict(reply.get("metrics", {})))


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


def with_absolute_file(reward: RewardConfig) -> RewardConfig:
    """Return a reward with the place of its file. Raise ConfigError unless that is a file."""
    if reward.file is None:
        return reward
    path = Path(reward.file).expanduser().absolute()
    if not path.is_file():
        raise errors.ConfigError(f"rewards: {path} is no file. Nothing was written.")
    return reward.model_copy(update={"file": str(path)})
