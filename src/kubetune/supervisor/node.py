"""This node's part of one start of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kubetune.base.signals import Relay
from kubetune.supervisor.place import Place


@dataclass(frozen=True)
class Node:
    """Which node this is, and how its processes are run."""

    run_dir: Path
    place: Place
    relay: Relay
    prepare: str  # module that prepares the data before any rank starts
    worker: str  # module that is each rank
