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
    every, began = seconds or SECONDS, time.monotonic()

    def remind(ended: threading.Event) -> None:
        while not ended.wait(every):
            taken = time.monotonic() - began
            say(f"{taken / 60:.0f} min" if taken >= 60 else f"{taken:.0f} s")

    with beside(remind, "reminders"):
        yield


@contextmanager
def beside(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """While the block runs, so does `work(ended)` in a thread; set `ended`, which it minds, ends it with the block."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
