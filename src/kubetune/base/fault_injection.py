"""Points at which a test can break a run for real. They do nothing unless an environment variable names one.

    KUBETUNE_FAULT="signal 9:commit.sealed:2:1"      rank 1 kills itself the second time it reaches that point

The form is ACTION:POINT[:NTH[:RANK]]; NTH is 1 and RANK is 0 if they are left out. Points are the calls of `reach` and
of `heartbeat.beat`. The actions:

    signal N    kill this process with signal N
    error N     raise OSError with this errno
    exit N      end at once, without clean-up
    hang        wait for ever
    freeze      wait for ever while holding the interpreter's lock, so that no other thread runs
    fill        take memory until the kernel ends the process (set a limit first)

Do not use it for errors that the code can raise by itself.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter

FAULT = "KUBETUNE_FAULT"

_seen: Counter[str] = Counter()


def reach(point: str) -> None:
    """Do what KUBETUNE_FAULT says for this point: usually nothing."""
    if FAULT in os.environ:
        _act(point, os.environ[FAULT])


def _act(point: str, fault: str) -> None:
    action, where, *rest = fault.split(":")
    nth, rank = (*rest, *("1", "0")[len(rest) :])
    # Only the NTH visit of this point, and only on this rank.
    _seen[point] += 1
    if (point, _seen[point], os.environ.get("RANK", "0")) != (where, int(nth), rank):
        return
    kind, _, number = action.partition(" ")
    if kind == "signal":
        os.kill(os.getpid(), int(number))
    elif kind == "exit":
        os._exit(int(number))
    elif kind == "error":
        raise OSError(int(number), os.strerror(int(number)))
    elif kind == "fill":
        held: list[bytes] = []
        while True:
            # 16 MiB at a time, kept so that they are not freed.
            held.append(b"x" * (1 << 24))
    elif kind == "freeze":
        # PyDLL holds the interpreter's lock during the call; CDLL would release it.
        ctypes.PyDLL(None).sleep(3600)
    else:
        threading.Event().wait()
