"""A question to all pods at once, and Ctrl-C while it waits for their answers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from kubetune.k8s.cluster.asking_pods import on_all


def test_an_interrupt_that_another_thread_was_handed_ends_the_wait() -> None:
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    has_ended = threading.Event()
    seen = list[bool]()
    answered = threading.Event()

    # The main thread must sleep in its wait when the signal comes: it waits on a condition, and the kernel has it asleep.
    main = threading.main_thread()
    stat = Path(f"/proc/self/task/{os.getpid()}/stat")

    def ask(_: int) -> None:
        while (
            sys._current_frames()[main.ident or 0].f_code is not threading.Condition.wait.__code__
        ):
            time.sleep(0.01)
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        # The kernel may hand a signal of the process to any thread.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        seen.append(has_ended.wait(60))
        answered.set()

    try:
        with pytest.raises(KeyboardInterrupt):
            on_all(ask, [0])
    finally:
        has_ended.set()
        signal.signal(signal.SIGINT, usual)
    assert answered.wait(60)
    assert seen == [True], "the wait went on until there was an answer"


def test_answers_come_in_the_order_of_the_pods() -> None:
    assert on_all(lambda n: n * n, [3, 1, 2]) == [9, 1, 4]
