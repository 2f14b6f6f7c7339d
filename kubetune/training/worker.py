"""One rank of a run: `python -m kubetune.worker RUN_DIR`, or by hand under torchrun with a config file or flags.

    torchrun --nnodes 2 --nproc-per-node 4 … -m kubetune.worker run.yaml output=/shared/run

Sets up what must come before torch is imported, then trains. Ends with an exit code of errors.py, which is also
written to `logs/rank-N.exit.json`, because torchrun itself answers 1 whatever its children said.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kubetune import errors
from kubetune.base import allocator, collector, files, logs, processes
from kubetune.config.naming import RESOLVED
from kubetune.config.schema import Config
from kubetune.plan.plan import make_plan
from kubetune.rundir import checkpoints, exit_status, heartbeat, metrics
from kubetune.supervisor import place
from kubetune.training.start.libraries import import_libraries
from kubetune.training.start.preparation import (
    Preparation,
    log_as_set,
    planned_tokens,
    sizes,
    width_of,
)
from kubetune.training.stop import StopRequest

if TYPE_CHECKING:
    from kubetune.rundir.checkpoints import State


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns its exit code."""
    processes.die_with_parent()
    stop = StopRequest().install()
    rank = int(os.environ.get("RANK", "0"))
    code, reason, step, run_dir, kind = errors.OK, exit_status.DONE, None, None, None
    try:
        config, found = open_run(sys.argv[1:] if argv is None else list(argv), rank)
        with hold(found, rank):
            run_dir = found
            state, remark = work(config, run_dir, stop)
            step, reason = (
                state.step,
                f"{exit_status.DONE}, but {remark}" if remark else exit_status.DONE,
            )
    except errors.Preempted as stopped:
        # Who is stopped before the loop does not know how far an earlier start has come.
        step = stopped.step or (checkpoints.newest_step(run_dir) if run_dir is not None else 0)
        code, reason, kind = stopped.exit_code, str(type(stopped)(step)), stopped.kind
        logs.STEP.info("%s", reason)
    except errors.KubetuneError as error:
        code, reason = (
            error.exit_code,
            str(error) if run_dir is None else exit_status.reason_of(error),
        )
        kind = type(error).__name__
        logs.ERROR.error("%s", reason)
    except Exception as error:
        if fault := files.fault_of(error):
            code, reason = fault.exit_code, str(fault)
            logs.ERROR.error("%s", reason)
        else:
            code, reason = errors.BUG, f"{type(error).__name__}: {error}"
            logs.family_logger("ERROR").critical("this is a bug in kubetune", exc_info=error)
    if run_dir is not None:
        with suppress(errors.EnvironmentFault):  # a full disk must not hide the exit code it caused
            exit_status.write_rank_exit_status(
                run_dir, rank, exit_status.ExitStatus(code, reason, step, kind)
            )
    return code


def hold(run_dir: Path, rank: int) -> AbstractContextManager[None]:
    """Keep a second writer out where no agent does; raises EnvironmentFault naming the first."""
    return (
        nullcontext()
        if rank != 0 or processes.AGENT_PID in os.environ
        else place.hold(run_dir, node=0)
    )


def open_run(argv: list[str], rank: int) -> tuple[Config, Path]:
    """The config and the run directory: one that a launcher made, or a new one from a file or flags.

    Raises ConfigError for what is wrong with them.
    """
    from kubetune.config.load import load_resolved
    from kubetune.supervisor.command_line import add_run_arguments, config_from_args, parse

    if len(argv) == 1 and (Path(argv[0]) / RESOLVED).is_file():
        run_dir = Path(argv[0])
        return log_as_set(load_resolved(run_dir / RESOLVED), run_dir, rank), run_dir
    from kubetune.supervisor.local import create_run_dir, dated

    logs.configure("INFO", rank=rank)  # for what reading the config has to say
    parser = argparse.ArgumentParser(prog="kubetune.worker", description="One rank of a run.")
    add_run_arguments(parser)
    config = config_from_args(parse(parser, argv), os.environ)
    if config.output is None:
        raise errors.ConfigError(
            "under torchrun every rank must know the run directory: set output=DIR"
        )
    run_dir = Path(config.output)
    config = dated(config, run_dir)
    if rank == 0:
        create_run_dir(config, run_dir)
    return log_as_set(config, run_dir, rank), run_dir


def work(config: Config, run_dir: Path, stop: StopRequest) -> tuple[State, str]:
    """Prepare, join the others, train, report; the state at the end and, on rank 0, what is to be said of it."""
    allocator.keep_memory(classifies=config.classifies)
    processes.try_threads()
    # Before any process group: ranks that wait here wait for a file lock, not for a collective that times out.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    with Preparation(config, run_dir) as preparation:
        import_libraries()
        from kubetune.data.prepared.identity import Check
        from kubetune.data.prepared.statistics import record
        from kubetune.distributed import process_group
        from kubetune.plan import actuals
        from kubetune.scoring import kept_questions
        from kubetune.tasks import task_of
        from kubetune.training.judgement import conclude
        from kubetune.training.start import choices
        from kubetune.training.start.facts import gpu_name, log_start
        from kubetune.training.train import train

        with collector.paused():
            task = task_of(config)
            if config.lora is not None:
                import peft  # noqa: F401
        data, config = preparation.result()
    # On one rank alone; it reads the base while that is being loaded, and is waited for where weights meet.
    base = Check(config, run_dir) if os.environ.get("RANK", "0") == "0" else None
    if not alone:
        stop.leave_to_kernel()
    logs.STEP.info("joining the other ranks")
    # Ranks that wait have the more patience, so that the one that hangs is the one that says so.
    patience = config.training.timeout_seconds
    with ExitStack() as stack:
        stack.enter_context(heartbeat.watch(run_dir, int(os.environ.get("RANK", "0")), patience))
        heartbeat.beat("joining")
        world = stack.enter_context(
            process_group.join(timeout_seconds=patience + heartbeat.WAITING_SECONDS)
        )
        heartbeat.beat("starting")
        device: Literal["cuda", "cpu"] = "cuda" if world.device.type == "cuda" else "cpu"
        plan = make_plan(config, **sizes(data), world_size=world.size, device=device)
        config = choices.decide(
            config, plan, run_dir, world, planned_tokens(plan, data), width_of(data)
        )
        log_start(plan, world, data)
        if world.is_main:
            for line in actuals.outlook(config, plan, planned_tokens(plan, data), gpu_name(world)):
                logs.STEP.info("%s", line)
            files.write_atomic(run_dir / metrics.PLAN, plan.to_json(), within=run_dir)
            record(run_dir, config, data)
            kept_questions.keep(run_dir, config, data.eval)
        state, remark = train(config, plan, run_dir, data, task, world, stop, base)
        heartbeat.beat("report")
        conclude(config, run_dir, state, world)
    return state, remark
