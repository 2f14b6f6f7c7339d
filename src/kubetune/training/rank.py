"""What one rank does between joining the others and its end."""

from __future__ import annotations

import os
from pathlib import Path

from kubetune.base import logs
from kubetune.config.schema import Config
from kubetune.data.prepared.identity import Check
from kubetune.data.prepared.prepare import Prepared
from kubetune.distributed.process_group import World
from kubetune.models.model_spec import ModelSpec
from kubetune.rundir import heartbeat
from kubetune.rundir.checkpoints import State
from kubetune.supervisor.rank_environment import RANKS
from kubetune.tasks.task import Task
from kubetune.training.judgement import conclude
from kubetune.training.start.outlook import record_plan
from kubetune.training.start.planning import plan_run
from kubetune.training.start.rank_start import RankStart
from kubetune.training.stop import StopRequest
from kubetune.training.train import end_alone, train


def train_rank(
    config: Config,
    run_dir: Path,
    data: Prepared,
    task: Task,
    world: World,
    stop: StopRequest,
    base: Check | None,
) -> tuple[State, str]:
    """Plan the run, record plan and data in its directory, train, judge.

    Return the last state and, on rank 0, a remark on the run, mostly empty.
    """
    heartbeat.beat("starting")
    config, plan = plan_run(config, run_dir, data, world)
    start = RankStart(
        config,
        ModelSpec.of(config),
        config.training,
        config.rewards,
        plan,
        run_dir,
        data,
        task,
        world,
        stop,
        base,
    )
    if world.is_main:
        record_plan(start)
    if RANKS in os.environ:
        state, remark = end_alone(start)
    else:
        state, remark = train(start)
    heartbeat.beat("report")
    try:
        conclude(config.evaluation, run_dir, state, world)
    finally:
        # The last line, so that nobody takes those above for a success.
        if remark:
            logs.RESULT.warning("%s", remark)
    return state, remark
