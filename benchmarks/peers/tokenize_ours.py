"""kubetune's `prepare`, from the JSONL file to rows on disk."""

from __future__ import annotations

import tempfile
from typing import Any

from benchmarks.peers.job import Order, drive
from benchmarks.peers.tokenizing import timed
from kubetune.config.load import load_config
from kubetune.data.prepared.prepare import prepare


def measure(order: Order) -> dict[str, Any]:
    """Prepare the rows in a new cache."""
    with tempfile.TemporaryDirectory(prefix="prepared-") as cache:
        flags = {
            "model.path": order.model,
            "data.train": order.data,
            "data.max_length": order.max_length,
            "data.overlong": "truncate",
            "data.max_lost_share": 1.0,
            "data.num_proc": order.settings["num_proc"],
            "data.cache": cache,
        }
        config = load_config(None, flags=flags)
        prepared, seconds = timed(lambda: prepare(config))
        rows = prepared.train
        return seconds | {"rows": len(rows), "tokens": int(rows.lengths.sum())}


if __name__ == "__main__":
    drive(measure)
