"""Count and look at the GPUs of this machine without torch, which takes seconds to import."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Our name → nvidia-smi's name of each value that it is asked for.
GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "utilization_percent": "utilization.gpu",
    "memory_used_mib": "memory.used",
    "memory_total_mib": "memory.total",
    "temperature_celsius": "temperature.gpu",
    "power_watts": "power.draw",
}
GPU_QUERY = [
    "nvidia-smi",
    f"--query-gpu={','.join(GPU_FIELDS.values())}",
    "--format=csv,noheader,nounits",
]


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return how many NVIDIA GPUs a process with this environment could use.

    Device files are counted, since a container sees only its own. If there are none (WSL), nvidia-smi is asked.
    """
    files = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    count = len(files) or _listed_by_smi()
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return count
    usable = 0
    for name in chosen.split(","):
        # CUDA stops at the first name that it cannot use; "" and "-1" are the usual ones.
        if name.strip() in ("", "-1"):
            break
        usable += 1
    return min(count, usable)


def _listed_by_smi() -> int:
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        listing = subprocess.run(
            [command, "-L"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    # GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-…); slices of it follow, indented.
    count = 0
    for line in listing.stdout.splitlines():
        if line.startswith("GPU "):
            count += 1
    return count


def gpu_use() -> list[dict[str, Any]]:
    """Return what nvidia-smi tells about each GPU now, under the names of GPU_FIELDS. Empty without nvidia-smi."""
    if shutil.which(GPU_QUERY[0]) is None:
        return []
    try:
        query = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(query.stdout)


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Return the rows of nvidia-smi's CSV. What a GPU does not tell (`[N/A]`) is None."""
    gpus = []
    for row in csv.reader(io.StringIO(text)):
        # Other lines are messages, such as "No devices were found".
        if len(row) == len(GPU_FIELDS):
            values = [_number(cell.strip()) for cell in row]
            gpus.append(dict(zip(GPU_FIELDS, values, strict=True)))
    return gpus


def _number(cell: str) -> str | float | int | None:
    if cell.startswith("["):
        return None
    try:
        if "." in cell:
            return float(cell)
        return int(cell)
    except ValueError:
        return cell
