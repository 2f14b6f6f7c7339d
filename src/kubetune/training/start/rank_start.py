"""What one rank of a run has when its data are prepared and the other ranks are there, before it loads the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kubetune.config.schema import Config, RewardConfig, TrainingConfig
from kubetune.data.prepared.identity import Check
from kubetune.data.prepared.prepare import Prepared
from kubetune.distributed.process_group import World
from kubetune.models.model_spec import ModelSpec
from kubetune.plan.plan import Plan
from kubetune.tasks.task import Task
from kubetune.training.stop import StopRequest


@dataclass(frozen=True)
class RankStart:
    """One rank at the start of a run. The parts that the loop works with are built from it."""

    config: Config  # with `auto` decided, for what computes with all of it; others read the sections below
    model: ModelSpec
    training: TrainingConfig
    rewards: Sequence[RewardConfig]
    plan: Plan
    run_dir: Path
    data: Prepared
    task: Task
    world: World
    stop: StopRequest
    base: Check | None  # on rank 0: the check of the files that the run is made from
