"""`kubetune`, and `python -m kubetune`: listens to signals before anything is imported, and until the very end.

Imports take most of the first second, in which Ctrl-C would show a traceback out of one of them, and the first process
of a container would not be stopped at all. After the end the exit code is known, and no signal may change it.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType

_STOPPED = 143  # of errors.py: nothing was begun, start me again
_INTERRUPTED = 130


def main() -> int:
    """Run one verb. Return its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # `nohup` ignores signals on purpose, and so do shells for what runs in the background.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)
    open_missing_streams()
    from kubetune.cli import drop_unwritten
    from kubetune.cli import main as run

    try:
        return run()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # Of `--help`, say, which a reader (`| head`) need not read to its end.
        drop_unwritten(sys.stdout, BrokenPipeError)


def _leave(number: int, frame: FrameType | None) -> None:
    # `train` was only asked to stop, so its code says that it may be started again.
    if number == signal.SIGINT and sys.argv[1:2] != ["train"]:
        os._exit(_INTERRUPTED)
    os._exit(_STOPPED)


def open_missing_streams() -> None:
    """Open standard streams that the caller has closed, and let stdout take characters outside of its encoding.

    Otherwise the next file that is opened would get the number of a closed stream, and what is printed would go into it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # the locale may not be UTF-8


if __name__ == "__main__":
    sys.exit(main())
