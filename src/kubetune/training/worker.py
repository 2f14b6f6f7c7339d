"""One rank of a run: `python -m kubetune.worker RUN_DIR`, or by hand under torchrun with a config file or flags.

    torchrun --nnodes 2 --nproc-per-node 4 … -m kubetune.worker run.yaml output=/shared/run

It sets up what must come before torch is imported, then trains. The exit code is one of errors.py, and is also written
to `logs/rank-N.exit.json`, because torchrun itself ends with 1 whatever code its children had.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kubetune.base import logs, processes
from kubetune.base.cpu import heap
from kubetune.config.schema import Config
from kubetune.rundir import heartbeat
from kubetune.rundir.checkpoints import State
from kubetune.training import rank_end
from kubetune.training.start.data_preparation import Preparation
from kubetune.training.start.libraries import import_task
from kubetune.training.start.opening import hold, open_run
from kubetune.training.stop import StopRequest


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
                end = partial(rank_end.end_at_once, folder, rank)
            state, remark = work(config, run_dir, stop, end)
            status = rank_end.status_of_done(state.step, remark)
    except Exception as error:
        status = rank_end.status_of(error, run_dir)

    if run_dir is not None:
        rank_end.write_status(run_dir, rank, status)
    return status.code


def work(
    config: Config,
    run_dir: Path,
    stop: StopRequest,
    end: Callable[[BaseException], None] | None = None,
) -> tuple[State, str]:
    """Prepare the data, join the other ranks, train. Return the last state and, on rank 0, a remark on the run.

    `end`: ends the process at once for data that cannot be used.
    """
    heap.keep_memory()
    processes.try_threads()

    # Before any process group: ranks that wait here wait for a file lock, not in a collective, which would time out.
    with Preparation(config, run_dir, end) as preparation:
        task = import_task(config.task_name, trains_adapter=config.lora is not None)
        from kubetune.data.prepared.identity import Check
        from kubetune.data.text.tokenizer import cache_folder
        from kubetune.distributed import process_group
        from kubetune.training.rank import train_rank

        data, config = preparation.result()

    rank = int(os.environ.get("RANK", "0"))
    # On one rank alone. A thread reads the base's files while the model is loaded, and is waited for before resuming.
    base = None
    if rank == 0:
        base = Check(config.model, cache_folder(config.data.cache), run_dir)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        stop.leave_to_kernel()  # waiting for other ranks is done in C++

    logs.STEP.info("joining the other ranks")
    # A rank that waits has more patience than the heartbeat, so that the rank that hangs is the one that reports it.
    patience = config.training.timeout_seconds
    with heartbeat.watch(run_dir, rank, patience):
        heartbeat.beat("joining")
        with process_group.join(timeout_seconds=patience + heartbeat.WAITING_SECONDS) as world:
            return train_rank(config, run_dir, data, task, world, stop, base)
