"""Say and record, on rank 0, what a run is going to do."""

from __future__ import annotations

from kubetune.base import files
from kubetune.data.findings.kept_data import record
from kubetune.plan.costs import Costs
from kubetune.rundir import machine, metrics
from kubetune.rundir.checkpoints import State
from kubetune.scoring import kept_questions
from kubetune.training import learner_flops
from kubetune.training.run import Run
from kubetune.training.start import auto_settings
from kubetune.training.start.rank_start import RankStart
from kubetune.training.start.run_forecast import log_forecast


def record_plan(start: RankStart) -> None:
    """Write the plan of a run, the statistics of its data, and the questions that are kept."""
    config = start.config
    run_dir = start.run_dir
    data = start.data
    files.write_atomic(run_dir / metrics.PLAN, start.plan.to_json(), within=run_dir)
    record(run_dir, data)
    num_questions = config.logging.before_after
    if config.classifies:
        num_questions = 0  # a classifier answers no questions
    kept_questions.keep(run_dir, data.spec, data.eval, num_questions)


def record_start(start: RankStart, run: Run, state: State, costs: Costs) -> None:
    """Record the event of this start, with the forecast and the facts that speeds depend on."""
    # Speeds of two starts can only be compared if these are the same.
    config = start.config
    facts = learner_flops.describe(
        run.learner,
        config.compute.peak_tflops,
        run.data.train,
        run.world.device,
        run.dtype,
        run.plan.saved_share,
    )
    # What a resumed run has to take over.
    facts |= auto_settings.as_event(start.model.model, start.training)
    facts["machine"] = machine.describe()
    facts["forecast"] = costs.kept()
    log_forecast(costs, config.compute.price_per_gpu_hour)

    event = "resume" if state.step else "start"
    metrics.record_event(
        start.run_dir,
        event,
        step=state.step,
        steps=run.plan.num_steps,
        **facts,
    )
