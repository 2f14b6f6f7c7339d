"""A process that does one thing before a container of a pod begins: its exit code is one of errors.py."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from kubetune import errors
from kubetune.base import faults


def _leave(number: int, frame: object) -> None:
    sys.exit(errors.PREEMPTED)


def exit_code_of(work: Callable[[], None]) -> int:
    """Do the work, and return the exit code; a fault that is known is printed without a traceback."""
    # The first process of a container ignores signals that it does not handle.
    signal.signal(signal.SIGTERM, _leave)
    try:
        work()
    except Exception as error:
        fault = faults.known(error)
        if fault is None:
            raise
        print(f"kubetune: {fault}", file=sys.stderr)
        return fault.exit_code
    return errors.OK
