"""How a run is doing at this moment, read from its run directory and its machine: what `kubetune watch` shows.

The same on a laptop and, by in_pod.py, in a pod; asks no API server.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from kubetune.base.gpus import gpu_use
from kubetune.cluster.in_pod import progress
from kubetune.rundir import heartbeat, metrics

# What scrolls; in a cluster it comes over the network every few seconds.
_LOG_LINES = 300
_LOG_BYTES = 32 * 1024
_POINTS = 320


def take_vitals(run_dir: Path, log_rank: int = 0) -> dict[str, Any]:
    """`progress` with recent losses and speeds, ranks, GPUs of this node and the last lines of one rank's log.

    `ranks` tell how many seconds ago each said where it is, by the clock of this machine.
    """
    steps = [line for line in metrics.last_lines(run_dir / metrics.METRICS) if "loss" in line][-_POINTS:]
    timings = metrics.last_lines(run_dir / metrics.TIMINGS)[-_POINTS:]
    now = time.time()
    ranks = [
        {
            "rank": beat["rank"],
            "phase": beat["phase"],
            "waiting": beat["waiting"],
            "step": beat["step"],
            "phase_seconds": max(0.0, beat["time"] - beat["since"]),
            "silent_seconds": max(0.0, now - beat["time"]),
        }
        for beat in heartbeat.read_beats(run_dir)
    ]
    start: dict[str, Any] = {}
    for event in metrics.read_events(run_dir):
        if event["event"] in ("start", "resume"):
            start = event
    return {
        "progress": progress(run_dir),
        "losses": [line["loss"] for line in steps],
        "loss_steps": [steps[0]["step"], steps[-1]["step"]] if steps else None,
        "speeds": [line["tokens_per_second"] for line in timings if "tokens_per_second" in line],
        "rank_seconds": timings[-1].get("rank_seconds") or [] if timings else [],
        "peak_memory_bytes": timings[-1].get("peak_memory_bytes") if timings else None,
        "flops_per_token": start.get("flops_per_token"),
        "peak_tflops": start.get("peak_tflops"),
        "ranks": ranks,
        "gpus": gpu_use(),
        "log": last_lines(run_dir / "logs" / f"rank-{log_rank}.log"),
        "log_rank": log_rank,
        "log_ranks": sorted(
            int(number)
            for path in (run_dir / "logs").glob("rank-*.log")
            if (number := path.stem.removeprefix("rank-")).isdecimal()
        ),
    }


def last_lines(path: Path, count: int = _LOG_LINES) -> list[str]:
    """The last whole lines of a text file; none when it is not there."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[1 if size > _LOG_BYTES else 0 :][-count:]
