"""A sign of life on a terminal while something takes seconds, such as loading a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy(text: str) -> Iterator[None]:
    """Show what is being done and for how long, on standard error where that is a terminal, until it is done."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # Standard output stays as it is: what is printed meanwhile may go into a file.
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with progress:
        progress.add_task(text, total=None)
        yield
