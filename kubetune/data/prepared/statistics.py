"""What prepared data look like in numbers: for data.json in the run directory, and for pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kubetune.data.prepared.histogram import bars

if TYPE_CHECKING:
    from kubetune.data.prepared.prepare import Prepared


def describe(prepared: Prepared) -> dict[str, Any]:
    """`fingerprint` and, for each split, its counts and `lengths`: `[shortest, longest, rows]` of each bar."""
    rows = {"train": prepared.train, "eval": prepared.eval}
    splits = {
        split: {**stats, "lengths": bars(np.asarray(found.lengths).tolist())}
        for split, stats in prepared.stats.items()
        if (found := rows[split]) is not None
    }
    return {"fingerprint": prepared.fingerprint, "splits": splits}
