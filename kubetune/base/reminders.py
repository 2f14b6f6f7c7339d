"""A word every so often while something is waited for that may take long: silence looks like a hang. Ends nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 60.0
"""Time between two words of who works, or waits for who does."""

PATIENT_SECONDS = 600.0
"""The same for who only started the one that works, which speaks for itself as long as it is not stopped."""

OF_PREPARING = "the data have been in preparation for %s; where that tells nothing, look whether its process is stopped"


@contextmanager
def reminding(say: Callable[[str], object], seconds: float | None = None) -> Iterator[None]:
    """While the block runs, call `say("3 min")` every `seconds` with the time that it has taken."""
    every, done, began = seconds or SECONDS, threading.Event(), time.monotonic()

    def remind() -> None:
        while not done.wait(every):
            taken = time.monotonic() - began
            say(f"{taken / 60:.0f} min" if taken >= 60 else f"{taken:.0f} s")

    thread = threading.Thread(target=remind, name="reminders", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
