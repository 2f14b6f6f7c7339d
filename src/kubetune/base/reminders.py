"""Reminders while something is waited for that may take long: silence looks like a hang. They end nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Time between two reminders of a process that works, or waits for one that does.
SECONDS = 60.0

# Between two reminders of a parent process: its child reminds by itself unless it is suspended.
PATIENT_SECONDS = 600.0

# Before the first sign of a command: with the start of Python before it, less than two seconds.
SIGN_SECONDS = 1.5

OF_PREPARING = "the data have been in preparation for %s; if that tells nothing, look whether its process is stopped"


@contextmanager
def reminding(say: Callable[[str], object], seconds: float | None = None) -> Iterator[None]:
    """While the block runs, call `say("3 min")` every `seconds` with the time that it has taken."""
    pause = seconds or SECONDS
    began = time.monotonic()

    def remind(ended: threading.Event) -> None:
        while not ended.wait(pause):
            taken = time.monotonic() - began
            if taken >= 60:
                say(f"{taken / 60:.0f} min")
            else:
                say(f"{taken:.0f} s")

    with beside(remind, "reminders"):
        yield


@contextmanager
def beside(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run `work(ended)` in a thread while the block runs. `ended` is set at its end, and `work` returns then."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
