"""Run a process, and pass requests to stop on to it.

Standard library only, because the handlers must be in place within milliseconds of a container's start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Self

from kubetune.base import processes
from kubetune.errors import PREEMPTED

# Environment variable of pods that Kubernetes starts again however they end (StatefulSet).
STAY = "KUBETUNE_STAY"

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that it can clean up. The exit code is then 143."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(PREEMPTED)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread have signal handlers
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Relay:
    """Passes the first SIGTERM, Ctrl-C or SIGHUP on as one SIGTERM: save and leave.

    A second Ctrl-C, or `grace_seconds` without an end, becomes SIGKILL. A context manager: leaving it puts the former
    signal handlers back. Processes run one after the other, each with everything below it.
    """

    def __init__(self, grace_seconds: float = 60) -> None:
        self.grace_seconds = grace_seconds
        # Why the run stops, in words. None while nobody has asked.
        self.stopping: str | None = None
        self._interrupts = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._has_workers_below = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python lets only the main thread have signal handlers; elsewhere signals are the caller's business.
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                # nohup ignores SIGHUP, for a run that must outlive its terminal. That stays so.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._on_stop)
            self._handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_expiry)
            # The agent blocks these signals until there are handlers.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def run(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        has_workers_below: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> int:
        """Run `command` to its end. Return its status as subprocess does: -N if signal N killed it.

        `has_workers_below`: only the command's children have something to save. While it has none, a stop kills it at
        once: torchrun does not even look at signals while it waits for other nodes.
        """
        others = processes.children(os.getpid())
        processes.adopt_orphans()
        if self.stopping:
            return -signal.SIGTERM
        self._has_workers_below = has_workers_below
        self._child = _start(command, environ, pass_fds)
        # The request may have come while the process was being started, and has then not reached it.
        if self.stopping and self._child.poll() is None:
            self._kill()
        status = self._child.wait()
        self._child = None
        if self._handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)
        processes.kill_children(others)
        return status

    def kill(self) -> None:
        """Kill the process that runs now, and with it everything below it. Any thread may call this."""
        self._kill()

    def wait_for_stop(self) -> None:
        """Wait until somebody asks this process to stop. Return at once if that has happened."""
        # Blocked first: a signal between the look and the wait would be missed.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            if self.stopping is None:
                signal.sigwait(STOP_SIGNALS)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self.stopping is None:
            self.stopping = f"asked to stop by {signal.Signals(number).name}"
            signal.setitimer(signal.ITIMER_REAL, self.grace_seconds)
            self._ask()
        elif self._interrupts > 1:
            self.stopping = "stopped at once by a second Ctrl-C"
            self._kill()

    def _on_expiry(self, number: int, frame: FrameType | None) -> None:
        self.stopping = (
            f"killed: it was asked to stop and had not done so after {self.grace_seconds:g} s"
        )
        self._kill()

    def _ask(self) -> None:
        if self._child is None:
            return
        can_see_children = sys.platform == "linux"
        if self._has_workers_below and can_see_children and not processes.children(self._child.pid):
            self._kill()
            return
        again = " Ctrl-C once more leaves at once." if self._interrupts else ""
        _print(f"stopping: one checkpoint is saved first.{again}")
        self._send(signal.SIGTERM)

    def _kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        # Not Popen.send_signal: it would wait for a lock that wait() holds, which this handler has interrupted.
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)


def _start(
    command: Sequence[str], environ: Mapping[str, str], pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    # In its own session, so that Ctrl-C in a terminal reaches this process only, which then passes it on once.
    return subprocess.Popen(
        list(command),
        env=processes.shielded({**environ, processes.AGENT_PID: str(os.getpid())}),
        start_new_session=True,
        pass_fds=pass_fds,
        preexec_fn=processes.die_with_parent,
    )


def _print(text: str) -> None:
    # Not `print`: the signal handler may have interrupted another print, which must not be entered twice.
    with contextlib.suppress(OSError):
        os.write(2, f"\nkubetune: {text}\n".encode())
