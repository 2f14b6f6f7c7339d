"""Open the log of one start of a run, with its files, its bar and its trackers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from kubetune.base.terminal import CLEAR, is_brief
from kubetune.base.terminal.progress_bar import Progress, is_wanted
from kubetune.rundir import heartbeat, machine, metrics
from kubetune.rundir.checkpoints import State
from kubetune.rundir.totals import read_totals, runaway, runaway_line
from kubetune.rundir.tracking import trackers
from kubetune.training.epochs.run_table import RunTable
from kubetune.training.run_log import RunLog
from kubetune.training.start.rank_start import RankStart


@contextmanager
def open_run_log(start: RankStart, state: State) -> Iterator[RunLog]:
    """Yield the log of one start of a run, which continues from `state`."""
    plan = start.plan
    run_dir = start.run_dir
    world = start.world
    # Other ranks get one too, so that the loop need not ask which rank it is on.
    run_log = RunLog(
        start.training,
        plan,
        run_dir,
        world,
        state,
    )
    if not world.is_main:
        yield run_log
        return
    with ExitStack() as alone, ExitStack() as stack:
        run_log.numbers = stack.enter_context(
            metrics.MetricsLog(run_dir, state.step, state.evaluated_step)
        )
        run_log.epochs.remember(run_dir, state.step)

        # Each is closed at the end, in the opposite order, also after an error.
        config = start.config
        tracker = trackers.open_tracker(
            config,
            run_dir,
            state.step,
            write_page=partial(_write_page, run_dir),
        )
        run_log.tracker = stack.enter_context(tracker)
        if is_brief(config.logging.level):
            run_log.table = RunTable(plan, start.training.metric_for_best_model)
            print(CLEAR, end="")
            run_log.table.remember(run_dir, state)
            stack.callback(run_log.table.end)
        stack.enter_context(machine.recorded(run_dir, lambda: run_log.last_step, tracker.note_load))
        run_log.bar = stack.enter_context(
            Progress(plan.num_steps, state.step, is_wanted(world.rank))
        )
        # Closed first: what trackers have still to send needs no other rank.
        stack.callback(alone.enter_context, heartbeat.busy_alone())
        yield run_log

        # Only after a run that came to its end.
        losses = runaway(read_totals(run_dir))
        if losses is not None:
            run_log.tracker.tell("loss_runaway", runaway_line(losses))


def _write_page(run_dir: Path, file: Path) -> None:
    from kubetune.reporting import write_report  # at the end, not before the first step

    write_report([run_dir], file)
