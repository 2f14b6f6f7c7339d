"""Weights that are no views of the optimizer's buffers: copied from them after each update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kubetune.distributed import process_group
from kubetune.training.optimizer.occurring_rows import OccurringRows

# One call for all: thousands of small copies take longer. None if this version of torch has it no more.
COPY_ALL: Any = getattr(torch, "_foreach_copy_", None)


class WeightCopies:
    """Parameters and other copies, each with the numbers of the buffers that it must equal."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (copy, what it must equal)

    def add(self, copy: Tensor, value: Tensor) -> None:
        """Keep a copy, of any dtype, equal to a value from the next refresh on."""
        self._pairs.append((copy, value))

    def clear(self) -> None:
        """Forget all copies."""
        self._pairs.clear()

    def refresh(self, tables: Sequence[OccurringRows]) -> None:
        """Copy new weights: only the rows of these tables that occurred, and everything else in one call."""
        for rows in tables:
            rows.refresh()
        refreshed = {id(rows.weight) for rows in tables}

        copies = []
        values = []
        for copy, value in self._pairs:
            if id(copy) not in refreshed:
                copies.append(process_group.local(copy))
                values.append(value)

        if COPY_ALL is not None and copies:
            COPY_ALL(copies, values)
            return
        for copy, value in zip(copies, values, strict=True):
            copy.copy_(value)
