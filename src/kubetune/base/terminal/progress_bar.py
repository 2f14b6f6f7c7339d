"""The progress bar of rank 0 on a terminal: steps, loss, what tells how the task goes, speed and the time left.

Lines appear above the bar. Without a terminal, `[TRAIN]` lines show the same numbers (logs.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

from kubetune.base.terminal import moves_cursor


def is_wanted(rank: int) -> bool:
    """True if this rank draws a bar: only rank 0 does, and only on a terminal that can move its cursor."""
    return rank == 0 and moves_cursor()


class Progress:
    """A bar from `start` to `total` steps. With `enabled=False` nothing is shown.

    >>> with Progress(300, start=120, enabled=is_wanted(rank)) as bar:
    ...     bar.update(121, loss=1.93, learning_rate=1.9e-4, tokens_per_second=5200)
    """

    def __init__(self, total: int, start: int = 0, enabled: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=Console(file=sys.stdout),
            refresh_per_second=4,
            # What follows it, such as the verdict, stands right below the table.
            transient=True,
            disable=not enabled,
        )
        self._task = self._bar.add_task("train", total=total, completed=start, numbers="")

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        measures: Mapping[str, float] = MappingProxyType({}),
        learning_rate: float | None = None,
        tokens_per_second: float | None = None,
    ) -> None:
        """Move to `step` completed steps, and show the numbers that are not None. `measures`: of the task, by name.

        Those come first: where the terminal is narrow, the end is cut off.
        """
        numbers: list[str] = []
        for name, value in measures.items():
            # The spread is shown with its reward, which a step has not where no reward judged any of its answers.
            if name.endswith("_std"):
                continue
            text = f"{name} {value:.2f}"
            if f"{name}_std" in measures:
                text += f" ± {measures[f'{name}_std']:.2f}"
            numbers.append(text)
        if loss is not None:
            numbers.append(f"loss {loss:.4f}")
        if learning_rate is not None:
            numbers.append(f"lr {learning_rate:.2e}")
        if tokens_per_second is not None:
            numbers.append(f"{tokens_per_second:,.0f} tokens/s")
        self._bar.update(self._task, completed=step, numbers=" · ".join(numbers))

    @property
    def numbers(self) -> str:
        """What it shows beside the steps."""
        return str(self._bar.tasks[0].fields["numbers"])

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
