"""A sign of life on a terminal while something takes seconds: what is done, how far it is, and for how long."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def tell(text: str) -> None:
    """Print a step that begins now."""
    print(f"… {text}", flush=True)


class Busy:
    """What a terminal shows meanwhile. Without a terminal nothing is shown but the steps of `tell`."""

    def __init__(self, progress: Progress | None, text: str) -> None:
        self._progress = progress
        self._text = text
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
        if self._progress is None:
            return
        if text != self._text:
            # Each step has a clock of its own.
            self._text = text
            self._progress.reset(self._task, description=text)
        count = ""
        if total is not None:
            count = f"{done:,}/{total:,}"
        elif done:
            count = f"{done:,}"
        self._progress.update(self._task, total=total, completed=done, count=count)


@contextmanager
def busy(text: str) -> Iterator[Busy]:
    """Show what is being done and for how long, on standard error where that is a terminal, until it is done."""
    if not sys.stderr.isatty():
        yield Busy(None, text)
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
