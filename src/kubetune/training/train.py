"""Train a whole run on one rank: build its parts, resume where it left off, train to the end, report."""

from __future__ import annotations

from functools import partial

from kubetune import errors
from kubetune.distributed import process_group
from kubetune.models.adapters import fp8
from kubetune.rundir.checkpoints import State, load_state, tidy
from kubetune.training.final_report import report
from kubetune.training.loop import loop
from kubetune.training.saving.resuming import newest, restore
from kubetune.training.start import preflight, warm_up
from kubetune.training.start.base_measures import measure_base
from kubetune.training.start.memory_budget import MemoryBudget
from kubetune.training.start.memory_trials import explaining_shortage
from kubetune.training.start.opened_log import open_run_log
from kubetune.training.start.outlook import record_start
from kubetune.training.start.parts import build
from kubetune.training.start.rank_start import RankStart
from kubetune.training.start.run_forecast import forecast_run, settle


def train(start: RankStart) -> tuple[State, str]:
    """Train a run to its end. All ranks call it.

    Return the last state and, on rank 0, a remark on the run, mostly empty. Raise Preempted after a stop with a
    committed checkpoint, Diverged before a bad update, LostPeer if other ranks are gone.
    """
    config = start.config
    world = start.world
    costs = forecast_run(start)
    budget = MemoryBudget(config, costs, world.device)
    # Losses of peers and shortages of memory may come up anywhere: a sharded model talks with other ranks in each layer.
    with process_group.noticing_losses(), explaining_shortage(budget, world.rank):
        run = build(start, costs.memory)
        costs = settle(start, run.plan, costs)
        state = restore(run)
        if world.is_main:
            record_start(start, run, state, costs)

        # Trials, which change no weight.
        if start.training.fp8:
            model = run.learner.model
            first_loss = partial(warm_up.loss_ahead, run, state)
            fp8.adopt(model, run.learner.kernels, world.device, first_loss)
        if start.training.preflight:
            preflight.rehearse(run, state, MemoryBudget(config, costs, world.device))

        # Until here a stop ends the process at once. From here it is obeyed where nothing is lost.
        start.stop.defer()
        if config.needs_base:
            measure_base(run, state)
        with open_run_log(start, state) as run_log:
            with run.checkpointer, run.learner.undo:
                state = loop(run, state, run_log)
            run.movement.conclude()
            # Some trackers keep the report when the log closes.
            return state, report(start, state)


def end_alone(start: RankStart) -> tuple[State, str]:
    """Do what is left after the last checkpoint of a run of several nodes, on rank 0, without the others or the model.

    Return as `train` does. Raise LostPeer if the checkpoint turns out to be damaged: then all have to train again.
    """
    training = start.training
    folder = newest(start.run_dir, start.base)
    state = State()
    if folder is not None:
        state = load_state(folder)
    evaluates = start.data.eval is not None
    patience = training.early_stopping_patience
    if not state.is_last(start.plan.num_steps, evaluates=evaluates, patience=patience):
        raise errors.LostPeer(
            f"the last checkpoint is damaged, so all nodes have to train again after step {state.step}. A Job does not "
            "start those again that ended with 0: then run `kubetune delete` and `kubetune submit`, which keep the results"
        )
    # An earlier start may have died between the checkpoint's commit and its links.
    tidy(start.run_dir, state, training.save_total_limit)
    with open_run_log(start, state):
        return state, report(start, state)
