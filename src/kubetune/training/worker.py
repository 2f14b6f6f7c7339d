"""One rank of a run: `python -m kubetune.worker RUN_DIR`, or by hand under torchrun with a config file or flags.

    torchrun --nnodes 2 --nproc-per-node 4 … -m kubetune.worker run.yaml output=/shared/run

It sets up what must come before torch is imported, then trains. The exit code is one of errors.py, and is also written
to `logs/rank-N.exit.json`, because torchrun itself ends with 1 whatever code its children had.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kubetune import errors
from kubetune.base import collector, cpu, files, logs, processes
from kubetune.config.naming import RESOLVED
from kubetune.config.schema import Config
from kubetune.plan.plan import make_plan
from kubetune.rundir import checkpoints, exit_status, heartbeat, metrics
from kubetune.rundir.exit_status import ExitStatus
from kubetune.supervisor import place
from kubetune.supervisor.rank_environment import RANKS
from kubetune.training.start.libraries import import_libraries
from kubetune.training.start.preparation import (
    Preparation,
    log_to_run,
    planned_tokens,
    sizes,
    width_of,
)
from kubetune.training.stop import StopRequest

if TYPE_CHECKING:
    from kubetune.data.prepared.identity import Check
    from kubetune.data.prepared.prepare import Prepared
    from kubetune.distributed.process_group import World
    from kubetune.rundir.checkpoints import State
    from kubetune.tasks.task import Task


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank. Return its exit code."""
    # First of all, because a signal may come during the slow imports.
    processes.die_with_parent()
    stop = StopRequest().install()
    rank = int(os.environ.get("RANK", "0"))
    run_dir: Path | None = None
    try:
        arguments = sys.argv[1:] if argv is None else list(argv)
        config, folder = open_run(arguments, rank)
        with hold(folder, rank):
            # From here on this rank may write to it, also how it ended.
            run_dir = folder
            # In a process of its own, which nobody needs after its end.
            end = None
            if argv is None:
                end = partial(_end_at_once, folder, rank)
            state, remark = work(config, run_dir, stop, end)
            status = ExitStatus(errors.OK, exit_status.DONE, state.step)
            if remark:
                status = replace(status, reason=f"{exit_status.DONE}, but {remark}")
    except Exception as error:
        status = _status_of(error, run_dir)

    if run_dir is not None:
        with suppress(errors.EnvironmentFault):  # a full disk must not hide the exit code it caused
            exit_status.write_rank_exit_status(run_dir, rank, status)
    return status.code


def _end_at_once(run_dir: Path, rank: int, error: BaseException) -> None:
    """Say what ended the rank, and end it from a thread: its main thread imports torch, for seconds."""
    assert isinstance(error, Exception)
    status = _status_of(error, run_dir)
    with suppress(errors.EnvironmentFault):
        exit_status.write_rank_exit_status(run_dir, rank, status)
    processes.kill_children()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status.code)


def _status_of(error: Exception, run_dir: Path | None) -> ExitStatus:
    """Log what ended the rank, and return its exit status. `run_dir`: None if nothing may be written there."""
    if isinstance(error, errors.Preempted):
        step = error.step
        if not step and run_dir is not None:
            # A rank that is stopped before the loop does not know how far an earlier start came.
            step = checkpoints.newest_step(run_dir)
        reason = str(type(error)(step))
        logs.STEP.info("%s", reason)
        return ExitStatus(error.exit_code, reason, step, error.kind)

    if isinstance(error, errors.KubetuneError):
        reason = str(error)
        if run_dir is not None:
            reason = exit_status.reason_of(error)
        logs.ERROR.error("%s", reason)
        return ExitStatus(error.exit_code, reason, error=type(error).__name__)

    # Errors of the operating system that a user can fix, such as a full disk.
    fault = files.fault_of(error)
    if fault is not None:
        logs.ERROR.error("%s", fault)
        return ExitStatus(fault.exit_code, str(fault))
    # Anything else nobody has thought of.
    logs.family_logger("ERROR").critical("this is a bug in kubetune", exc_info=error)
    return ExitStatus(errors.BUG, f"{type(error).__name__}: {error}")


def hold(run_dir: Path, rank: int) -> AbstractContextManager[None]:
    """Keep other processes from writing to the run directory, if no agent does. Raise EnvironmentFault, naming one."""
    if rank != 0 or processes.AGENT_PID in os.environ:
        return nullcontext()
    return place.hold(run_dir, node=0)


def open_run(argv: list[str], rank: int) -> tuple[Config, Path]:
    """Return the config and the run directory: one that a launcher made, or a new one from a file or flags."""
    from kubetune.config.load import load_resolved
    from kubetune.supervisor.command_line import add_run_arguments, config_from_args, parse

    # A launcher has made the run directory.
    if len(argv) == 1 and (Path(argv[0]) / RESOLVED).is_file():
        run_dir = Path(argv[0])
        config = load_resolved(run_dir / RESOLVED)
        log_to_run(config.logging.level, run_dir, rank)
        return config, run_dir

    # By hand, under torchrun: rank 0 makes it.
    from kubetune.supervisor.local import create_run_dir, dated

    logs.configure("INFO", rank=rank)  # for warnings about the config
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
    log_to_run(config.logging.level, run_dir, rank)
    return config, run_dir


def work(
    config: Config,
    run_dir: Path,
    stop: StopRequest,
    end: Callable[[BaseException], None] | None = None,
) -> tuple[State, str]:
    """Prepare the data, join the other ranks, train. Return the last state and, on rank 0, a remark on the run.

    `end`: ends the process at once for data that cannot be used.
    """
    cpu.keep_memory()
    processes.try_threads()

    # Before any process group: ranks that wait here wait for a file lock, not in a collective, which would time out.
    with Preparation(config, run_dir, end) as preparation:
        import_libraries()
        from kubetune.data.prepared.identity import Check
        from kubetune.distributed import process_group
        from kubetune.tasks import task_of

        # Still while the data are prepared: what this task needs.
        with collector.paused():
            task = task_of(config.task_name)
            if config.lora is not None:
                import peft  # noqa: F401
        data, config = preparation.result()

    rank = int(os.environ.get("RANK", "0"))
    # On one rank alone. A thread reads the base's files while the model is loaded, and is waited for before resuming.
    base = None
    if rank == 0:
        base = Check(config, run_dir)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        stop.leave_to_kernel()  # waiting for other ranks is done in C++

    logs.STEP.info("joining the other ranks")
    # A rank that waits has more patience than the heartbeat, so that the rank that hangs is the one that reports it.
    patience = config.training.timeout_seconds
    with heartbeat.watch(run_dir, rank, patience):
        heartbeat.beat("joining")
        with process_group.join(timeout_seconds=patience + heartbeat.WAITING_SECONDS) as world:
            return _train(config, run_dir, data, task, world, stop, base)


def _train(
    config: Config,
    run_dir: Path,
    data: Prepared,
    task: Task,
    world: World,
    stop: StopRequest,
    base: Check | None,
) -> tuple[State, str]:
    """Plan the run, record plan and data in its directory, train, judge."""
    from kubetune.data.findings.kept_data import record
    from kubetune.scoring import kept_questions
    from kubetune.training.judgement import conclude
    from kubetune.training.start import choices
    from kubetune.training.start.facts import log_start
    from kubetune.training.train import end_alone, train

    heartbeat.beat("starting")
    ranks = int(os.environ.get(RANKS, world.size))
    device: Literal["cuda", "cpu"] = "cpu"
    if world.device.type == "cuda":
        device = "cuda"
    # All ranks compute the same plan from the same sizes, so nothing is sent.
    plan = make_plan(config, **sizes(data), world_size=ranks, device=device)
    num_tokens = planned_tokens(plan, data)
    config = choices.decide(config, plan, run_dir, world, num_tokens, width_of(data))
    log_start(plan, world, data, config.task)
    if world.is_main:
        files.write_atomic(run_dir / metrics.PLAN, plan.to_json(), within=run_dir)
        record(run_dir, data)
        num_questions = config.logging.before_after
        if config.classifies:
            num_questions = 0  # a classifier answers no questions
        kept_questions.keep(run_dir, data.spec, data.eval, num_questions)

    if RANKS in os.environ:
        state, remark = end_alone(config, plan, run_dir, data, world, base)
    else:
        state, remark = train(config, plan, run_dir, data, task, world, stop, base)
    heartbeat.beat("report")
    try:
        conclude(config.evaluation, run_dir, state, world)
    finally:
        # The last line, so that nobody takes those above for a success.
        if remark:
            logs.RESULT.warning("%s", remark)
    return state, remark
