"""Run a command of `kubetune dev` in the background of its pod: its log, its process and its exit code are files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from kubetune.base import files
from kubetune.base.processes import is_alive
from kubetune.base.signals import STAY
from kubetune.errors import ENVIRONMENT, OK

_WATCHER = "watcher"
_FOLLOW_SECONDS = 0.2


def start(folder: Path, *command: str) -> None:
    """Start a command that outlives this one; its output goes to `log` and, at its end, its exit code to `exit`.

    `watcher` is the process that waits for it: while that lives, the exit code is still to come.
    """
    for name in ("exit", "pid", _WATCHER):
        (folder / name).unlink(missing_ok=True)
    log = (folder / "log").open("wb", buffering=0)
    if watcher := os.fork():
        files.write_atomic(folder / _WATCHER, str(watcher))
        return
    # From here on in the background: of a session of its own, holding nothing of the one that asked.
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    environ = dict(os.environ)
    environ.pop(STAY, None)
    # The user's code comes before the kubetune of the image.
    paths = (str(folder / "tree"), environ.get("PYTHONPATH"))
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    process = subprocess.Popen(command, env=environ, cwd=folder / "tree")
    files.write_atomic(folder / "pid", str(process.pid))
    files.write_atomic(folder / "exit", str(process.wait()))
    os._exit(0)


def follow(folder: Path, offset: int) -> int:
    """Pass on what the command of `start` prints, from a byte on, until it ends; return its exit code."""
    with (folder / "log").open("rb") as log:
        log.seek(offset)
        while True:
            # Asked before reading: what is written after the read is seen in the next round.
            has_ended = not is_running(folder)
            sys.stdout.buffer.write(log.read())
            sys.stdout.flush()
            if has_ended:
                return _exit_code(folder)
            time.sleep(_FOLLOW_SECONDS)


def stop(folder: Path) -> int:
    """Ask the command of `start` to save and end, and wait until it has; return its exit code.

    Print `ended` if one ran until then.
    """
    is_asked = False
    if is_running(folder):
        print("ended", flush=True)
    while is_running(folder):
        # Its watcher may live before it does.
        if not is_asked and (folder / "pid").exists():
            with suppress(ProcessLookupError):
                os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
            is_asked = True
        time.sleep(_FOLLOW_SECONDS)
    return _exit_code(folder)


def is_running(folder: Path) -> bool:
    """True if the command of `start` has not ended: its exit code is not there, and somebody waits for it."""
    watcher = folder / _WATCHER
    if not watcher.exists() or (folder / "exit").exists():
        return False
    return is_alive(int(watcher.read_text()))


def _exit_code(folder: Path) -> int:
    """Return the exit code of the last command; 0 where there was none."""
    path = folder / "exit"
    if path.exists():
        code = int(path.read_text())
        # Python says -15 for a command that SIGTERM has killed, a shell 143.
        return code if code >= 0 else 128 - code
    # Nobody is left who could write the exit code.
    if (folder / _WATCHER).exists():
        return ENVIRONMENT
    return OK
