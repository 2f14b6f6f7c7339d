"""GPUs of all pods of a run, as nvidia-smi in each of them tells."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kubetune.cluster.client import Cluster
from kubetune.cluster.runs import Target, on_all
from kubetune.errors import EnvironmentFault

_FIELDS = {
    "index": "index",
    "name": "name",
    "utilization_percent": "utilization.gpu",
    "memory_used_mib": "memory.used",
    "memory_total_mib": "memory.total",
    "temperature_celsius": "temperature.gpu",
    "power_watts": "power.draw",
}
_QUERY = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader,nounits"]


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one node, each a row by the names of _FIELDS; `problem` says why there are none."""

    node: int
    pod: str
    rows: list[dict[str, Any]]
    problem: str = ""


def query_gpus(cluster: Cluster, targets: Sequence[Target]) -> list[Gpus]:
    """Ask all pods at once."""

    def query(target: Target) -> Gpus:
        answer = io.BytesIO()
        try:
            code = cluster.exec(target.pod, target.container, _QUERY, stdout=answer, stderr=answer)
        except EnvironmentFault as error:
            return Gpus(target.node, target.pod, [], str(error))
        text = answer.getvalue().decode(errors="replace")
        if code != 0:
            return Gpus(target.node, target.pod, [], text.strip() or f"nvidia-smi ended with exit code {code}")
        return Gpus(target.node, target.pod, parse_gpus(text))

    return on_all(query, targets)


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Rows of nvidia-smi's CSV; what a GPU does not tell (`[N/A]`) is None."""
    return [
        dict(zip(_FIELDS, (_number(cell.strip()) for cell in row), strict=True))
        for row in csv.reader(io.StringIO(text))
        if row
    ]


def _number(cell: str) -> str | float | int | None:
    if cell.startswith("["):
        return None
    try:
        return float(cell) if "." in cell else int(cell)
    except ValueError:
        return cell
