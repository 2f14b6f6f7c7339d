"""Signs of life while a run starts: its ranks import libraries, load a model and measure it, and say nothing for seconds.

On a terminal one short line is drawn over and over until the progress bar takes its place, in a pipe there is a line at
least every two seconds until the first step is made.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kubetune.base import files, reminders
from kubetune.base.humanize import visible
from kubetune.base.terminal import is_brief
from kubetune.config.naming import RESOLVED
from kubetune.rundir import heartbeat, metrics, waits
from kubetune.supervisor.place import Place

# Silence after which something is said.
_SILENT_SECONDS: Final = 1.5
_POLL_SECONDS: Final = 0.25
# Phases of a rank before it draws its progress bar (rundir/heartbeat), and what they are called.
_BEFORE_THE_BAR: Final = {
    "joining": "joining",
    "rendezvous": "joining the other ranks",
    "starting": "starting",
    "loading": "loading",
    "reference": "running the reference model",
    "teacher": "asking the teacher",
    "compiling": "compiling",
    "resuming": "reading the checkpoint",
    "preflight of a save": "trying to save",
    "preflight of a batch": "trying a batch",
    "evaluation": "evaluating",
}
# The same of phases in the first step.
_IN_A_STEP: Final = {"generation": "drawing answers", "reward": "judging answers"}
# The rank's next line begins in the column where this one does, and must cover it: "2026-11-28 20:40:30 [STEP] …".
_COLUMNS: Final = 26
_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@contextmanager
def shown(run_dir: Path, place: Place) -> Iterator[None]:
    """Show signs of life of this node on standard output while the block runs, until the first step."""
    sign: _Drawn | _Printed = _Printed()
    if sys.stdout.isatty():
        sign = _Drawn(is_alone=is_brief(_level(run_dir)))
    # What earlier starts have logged and measured is passed over.
    logged = _size(_log_of(run_dir, place))
    measured = _size(run_dir / metrics.METRICS)

    def watch(ended: threading.Event) -> None:
        _watch(run_dir, place, sign, logged, measured, ended)

    with reminders.beside(watch, "signs of life"):
        yield


class _Drawn:
    """One line of a terminal, which the next line of anybody covers."""

    yields_to_bar = True

    def __init__(self, *, is_alone: bool = False) -> None:
        """`is_alone`: no log lines come between, so it stays and has the whole width."""
        self.is_alone = is_alone
        self._number = 0
        self._drawn = 0  # columns of what was drawn last
        self._columns = _COLUMNS
        if is_alone:
            self._columns = shutil.get_terminal_size().columns - 1

    def say(self, doing: str, seconds: float) -> None:
        """Draw the line anew."""
        self._number += 1
        frame = _FRAMES[self._number % len(_FRAMES)]
        text = f" {seconds:.0f} s"
        doing = visible(doing)[: self._columns - 2 - len(text)]
        text = f"{frame} {doing}{text}"
        # Spaces cover the end of a longer one.
        self._write(f"{text:<{self._drawn}}")
        self._drawn = len(text)

    def end(self) -> None:
        """Leave nothing of it."""
        if self._number:
            self._number = 0
            self._write(" " * self._drawn if self.is_alone else " " * self._columns)

    def _write(self, text: str) -> None:
        # The cursor goes back to the first column, where the rank's next line begins.
        sys.stdout.write(f"\r{text}\r")
        sys.stdout.flush()


class _Printed:
    """Lines of a pipe or a file, which has no bar."""

    yields_to_bar = False
    is_alone = False

    def __init__(self) -> None:
        self._next = 0.0  # seconds of silence at which the next line is due

    def say(self, doing: str, seconds: float) -> None:
        """Print a line, where one is due."""
        if seconds >= self._next:
            self._next = seconds + reminders.SIGN_SECONDS
            print(f"kubetune: still {doing}, {seconds:.0f} s", flush=True)

    def end(self) -> None:
        """Begin anew with the next silence."""
        self._next = 0.0


def _watch(
    run_dir: Path,
    place: Place,
    sign: _Drawn | _Printed,
    logged: int,
    measured: int,
    ended: threading.Event,
) -> None:
    """Say what the first rank of this node does whenever its log is silent, until a step is made or the block ends.

    In a pipe, which has no bar, evaluations after the first step have their signs too.

    `logged`, `measured`: the bytes of its log and of the run's metrics at the beginning.
    """
    began = time.time()
    log = _log_of(run_dir, place)
    size = logged
    since = time.monotonic()
    has_begun = False
    while not ended.wait(_POLL_SECONDS):
        phase = _phase(run_dir, place, began)
        has_begun = has_begun or _size(run_dir / metrics.METRICS) != measured
        if has_begun and sign.yields_to_bar:
            break
        if sign.yields_to_bar and phase not in ("", *_BEFORE_THE_BAR):
            break
        now = time.monotonic()
        if _size(log) != size:
            # What was drawn is covered by the line that has come.
            size = _size(log)
            if not sign.is_alone:
                since = now
                sign.end()
        elif has_begun and phase != "evaluation":
            # Steps have lines of their own, as far apart as the user wants them.
            since = now
            sign.end()
        elif now - since >= _SILENT_SECONDS:
            doing = waits.doing(run_dir, place.node) or _doing(log, logged, phase)
            sign.say(doing, now - since)
    sign.end()


def _level(run_dir: Path) -> str:
    """Return the run's `logging.level`."""
    path = run_dir / RESOLVED
    if not path.is_file():
        return "INFO"
    return str(files.read_object(path).get("logging", {}).get("level", "INFO"))


def _phase(run_dir: Path, place: Place, began: float) -> str:
    """Return the phase of the first rank of this node, empty before it has one in this start."""
    beat = heartbeat.read_beat(run_dir, place.ranks[0])
    if beat is None or float(beat["time"]) < began:
        return ""
    return str(beat["phase"])


def _doing(log: Path, before: int, phase: str) -> str:
    """Return what the rank does: its phase, or the last step that it has logged after `before`, a number of bytes."""
    if phase:
        return _BEFORE_THE_BAR.get(phase) or _IN_A_STEP.get(phase, "in a step")
    doing = "starting"
    try:
        content = log.read_bytes()[before:]
    except OSError:
        return doing
    for line in content.decode("utf-8", errors="replace").splitlines():
        _, tag, step = line.partition("[STEP] ")
        if tag:
            doing = step
    return doing


def _log_of(run_dir: Path, place: Place) -> Path:
    """Return the log of the first rank of this node."""
    return run_dir / "logs" / f"rank-{place.ranks[0]}.log"


def _size(path: Path) -> int:
    """Return the bytes of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
