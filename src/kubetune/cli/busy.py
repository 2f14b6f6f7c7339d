"""Signs of life while something takes seconds: what is done, how far it is, and for how long.

A terminal shows one line with a bar, a pipe gets a line at least every two seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kubetune.base import reminders

if TYPE_CHECKING:
    from rich.progress import Progress


def tell(text: str) -> None:
    """Print a step that begins now."""
    print(f"… {text}", flush=True)


class Busy:
    """What is shown meanwhile."""

    def __init__(self, progress: Progress | None, text: str) -> None:
        self._progress = progress
        self._text = text
        self._count = ""
        if progress is not None:
            self._task = progress.add_task(text, total=None, count="")

    def tell(self, text: str) -> None:
        """Print a step that begins now, and show it as what is being done."""
        tell(text)
        self._show(text, None, 0)

    def count(self, text: str, total: int | None, done: int) -> None:
        """Show how many of `total` are done; None where nobody knows how many there are."""
        self._show(text, total, done)

    def _show(self, text: str, total: int | None, done: int) -> None:
        count = ""
        if total is not None:
            count = f"{done:,}/{total:,}"
        elif done:
            count = f"{done:,}"
        self._count = count
        is_new = text != self._text
        self._text = text
        if self._progress is None:
            return
        if is_new:
            # Each step has a clock of its own.
            self._progress.reset(self._task, description=text)
        self._progress.update(self._task, total=total, completed=done, count=count)

    def print_signs(self, ended: threading.Event) -> None:
        """Print a line every so often until the work has ended."""
        began = time.monotonic()
        while not ended.wait(reminders.SIGN_SECONDS):
            seconds = time.monotonic() - began
            count = f" {self._count}" if self._count else ""
            print(f"… {self._text}{count}, {seconds:.0f} s", file=sys.stderr, flush=True)


@contextmanager
def busy(text: str) -> Iterator[Busy]:
    """Show what is being done and for how long, on standard error, until it is done."""
    if not sys.stderr.isatty():
        work = Busy(None, text)
        with reminders.beside(work.print_signs, "signs of life"):
            yield work
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # What is printed meanwhile appears above. A file or a pipe gets it as it is.
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
    with progress:
        yield Busy(progress, text)
