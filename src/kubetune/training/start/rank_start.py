"""What one rank of a run has when its data are prepared and the other ranks are there, before it loads the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kubetune.config.schema import Config
from kubetune.data.prepared.identity import Check
from kubetune.data.prepared.prepare import Prepared
from kubetune.distributed.process_group import World
from kubetune.plan.plan import Plan
from kubetune.tasks.task import Task
from kubetune.training.stop import StopRequest


@dataclass(frozen=True)
class RankStart:
    """One rank at the start of a run. The parts that the loop works with are built from it."""

    config: Config  # with `auto` decided
    plan: Plan
    run_dir: Path
    data: Prepared
    task: Task
    world: World
    stop: StopRequest
    base: Check | None  # on rank 0: the check of the files that the run is made from
