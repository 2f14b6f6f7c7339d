"""The GPUs of this machine, counted and looked at without torch, which takes seconds to import."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "utilization_percent": "utilization.gpu",
    "memory_used_mib": "memory.used",
    "memory_total_mib": "memory.total",
    "temperature_celsius": "temperature.gpu",
    "power_watts": "power.draw",
}
"""Our names for what nvidia-smi is asked."""
GPU_QUERY = [
    "nvidia-smi",
    f"--query-gpu={','.join(GPU_FIELDS.values())}",
    "--format=csv,noheader,nounits",
]


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs a process with this environment could use: those there, as CUDA_VISIBLE_DEVICES limits them.

    Device files are counted, since a container sees only its own; where there are none (WSL) nvidia-smi is asked.
    """
    there = (
        sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
        or _listed_by_smi()
    )
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return there
    names = [name.strip() for name in chosen.split(",")]
    # CUDA ignores everything from the first name on that it cannot use; "" and "-1" are the usual ones.
    usable = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return min(there, usable)


def _listed_by_smi() -> int:
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        listed = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(1 for line in listed.splitlines() if line.startswith("GPU "))


def gpu_use() -> list[dict[str, Any]]:
    """The GPUs of this machine as nvidia-smi sees them now, by the names of GPU_FIELDS; none where there is no such."""
    if shutil.which(GPU_QUERY[0]) is None:
        return []
    try:
        said = subprocess.run(
            GPU_QUERY, capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(said)


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Rows of nvidia-smi's CSV, none for other words of its; what a GPU does not tell (`[N/A]`) is None."""
    return [
        dict(zip(GPU_FIELDS, (_number(cell.strip()) for cell in row), strict=True))
        for row in csv.reader(io.StringIO(text))
        if len(row) == len(GPU_FIELDS)
    ]


def _number(cell: str) -> str | float | int | None:
    if cell.startswith("["):
        return None
    try:
        return float(cell) if "." in cell else int(cell)
    except ValueError:
        return cell
