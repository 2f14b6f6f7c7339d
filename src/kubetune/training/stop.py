"""Requests to stop, by SIGTERM or Ctrl-C.

Imports no torch: the signal handler has to be in place before the slow imports begin.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from kubetune import errors
from kubetune.kernels.compiling import leave_compiler
from kubetune.rundir.checkpoints import State


class StopRequest:
    """SIGTERM or Ctrl-C, remembered until the loop reaches the end of a step.

        install ──────────── leave_to_kernel ──────────── defer ──────────────────────
        raises Preempted     the kernel ends the process  sets `requested`, for the loop

    Before the loop there is nothing to save, so a request ends the process at once.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False  # the loop looks at `requested`
        self._installed = False

    def install(self) -> StopRequest:
        """Catch the signals from now on. Outside of the main thread, where Python forbids it, do nothing."""
        if threading.current_thread() is threading.main_thread():
            self._installed = True
            self._set(self._on_signal)
        return self

    def leave_to_kernel(self) -> None:
        """Let the kernel end this process until `defer`: Python runs no handler while C++ waits for other ranks."""
        if self._installed:
            self._set(signal.SIG_DFL)

    def _set(self, handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)

    def defer(self) -> None:
        """Only set `requested` from now on, for the loop to look at. Raise Preempted if a request came before."""
        self._deferred = True
        if self._installed:
            self._set(self._on_signal)  # after `leave_to_kernel` it was not in place
        if self.requested:
            raise errors.Preempted(0)

    # Python runs a handler between two instructions of the main thread, so it must not do much.
    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # First the note, so that nothing below can lose the request.
        self.requested = True
        if not self._deferred:
            raise errors.Preempted(0)
        leave_compiler()  # a compilation may take minutes


def is_pause_due(
    pause: int | None,
    state: State,
    *,
    evaluates: bool,
) -> bool:
    """True if the run has reached `training.pause_at_step`; if it evaluates, at the next step that was evaluated."""
    if pause is None or state.step < pause:
        return False

    # A pause at step 100 of a run that evaluates every 30 steps comes at 120, with its evaluation.
    return not evaluates or state.evaluated_step == state.step
