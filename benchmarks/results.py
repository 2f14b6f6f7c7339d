"""The results file. It is written anew after every measurement, so that an interrupted benchmark goes on where it stopped.

It names the machine by its processor and size only: no host names, users or folders.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kubetune.base.files import write_atomic
from kubetune.rundir.machine import slug

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "results"


@dataclass
class Results:
    """One file of measurements of one machine and one state of the code."""

    path: Path
    data: dict[str, Any]

    @property
    def measurements(self) -> list[dict[str, Any]]:
        """Return the measurements, in the order in which they were made."""
        return self.data["measurements"]  # type: ignore[no-any-return]

    def find(self, suite: str, key: dict[str, Any]) -> dict[str, Any] | None:
        """Return the measurement with this key, None if it was not made."""
        facts = {"suite": suite, **key}
        for measurement in self.measurements:
            if all(measurement.get(name) == value for name, value in facts.items()):
                return measurement
        return None

    def add(self, suite: str, key: dict[str, Any], numbers: dict[str, Any]) -> None:
        """Append a measurement and write the file."""
        self.measurements.append({"suite": suite, **key, **numbers})
        write_atomic(self.path, json.dumps(self.data, indent=1) + "\n")


def open_results(*, quick: bool, fresh: bool, subject: str = "") -> Results:
    """Return the newest file of this machine and this code, to go on with, else a new one; `fresh` begins anew.

    `subject`: what has a file of its own, to be measured anew without the rest.
    Raise SystemExit if that would overwrite what was measured today with other code.
    """
    machine = describe_machine()
    source = source_digest()
    ending = f"-{slug(machine)}"
    if subject:
        ending += f"-{subject}"
    if quick:
        ending += "-quick"
    path = FOLDER / f"{datetime.now(UTC):%Y-%m-%d}{ending}.json"
    if not fresh:
        for earlier in sorted(FOLDER.glob(f"????-??-??{ending}.json"), reverse=True):
            results = read_results(earlier)
            if results.data["source"] == source:
                return results
        if path.exists():
            raise SystemExit(
                f"benchmarks/results/{path.name} was measured with other code of kubetune; "
                "add --fresh to replace it, or move it away. Nothing was written."
            )
    # It is not written before there is a measurement.
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return Results(
        path, {"started": started, "machine": machine, "source": source, "measurements": []}
    )


def read_results(path: Path) -> Results:
    """Return the results of a file."""
    return Results(path, json.loads(path.read_text()))


def source_digest() -> str:
    """Return the SHA-256 of the package's Python files: numbers of different code must not be mixed."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "src" / "kubetune").rglob("*.py")):
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def describe_machine() -> dict[str, Any]:
    """Return processor, cores available to us, memory, instructions that matter, and the GPU if there is one."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = set(re.findall(r"\b(?:avx2|avx512f|avx512_bf16|amx_bf16)\b", info))
    return {
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "instructions": sorted(flags),
        "gpu": _gpu(),
    }


def _gpu() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    names = done.stdout.splitlines()
    return names[0].strip() if names else None
