"""The progress bar of rank 0 on a terminal: steps, loss, learning rate, tokens/s and the time left.

Log lines written meanwhile appear above the bar. Where there is no terminal, `[TRAIN]` lines do the job (logs.py).
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


def is_wanted(rank: int) -> bool:
    """A bar is drawn by rank 0 alone, and only on a terminal that can move its cursor."""
    # Not `is_terminal`: FORCE_COLOR, which notebooks set, makes a pipe one, in which a bar is one endless line.
    return rank == 0 and sys.stdout.isatty() and not Console(file=sys.stdout).is_dumb_terminal


class Progress:
    """A bar from `start` to `total` steps; with `enabled=False` nothing is shown.

    >>> with Progress(300, start=120, enabled=is_wanted(rank)) as bar:
    ...     bar.update(121, loss=1.93, learning_rate=1.9e-4, tokens_per_second=5200)
    """

    def __init__(
        self, total: int, start: int = 0, enabled: bool = True, *, label: str = "train"
    ) -> None:
        self._bar = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=Console(file=sys.stdout),
            refresh_per_second=4,
            disable=not enabled,
        )
        self._task = self._bar.add_task(label, total=total, completed=start, numbers="")

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        learning_rate: float | None = None,
        tokens_per_second: float | None = None,
    ) -> None:
        """Move to `step` completed steps and show the numbers given."""
        numbers = [
            f"loss {loss:.4f}" if loss is not None else "",
            f"lr {learning_rate:.2e}" if learning_rate is not None else "",
            f"{tokens_per_second:,.0f} tokens/s" if tokens_per_second is not None else "",
        ]
        self._bar.update(self._task, completed=step, numbers=" · ".join(filter(None, numbers)))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
