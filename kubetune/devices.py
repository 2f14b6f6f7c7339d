"""Counts the GPUs of this machine without torch, which takes seconds to import. Says nothing about their memory."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs a process with this environment could use: those there, as CUDA_VISIBLE_DEVICES limits them.

    Device files are counted, since a container sees only its own; where there are none (WSL) nvidia-smi is asked.
    """
    there = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)) or _listed_by_smi()
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
        listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(1 for line in listed.splitlines() if line.startswith("GPU "))
