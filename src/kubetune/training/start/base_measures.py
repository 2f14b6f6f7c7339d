"""Measure the model before its first step, for later evaluations to be compared with."""

from __future__ import annotations

import json
from functools import partial

from kubetune import errors
from kubetune.base import files, logs
from kubetune.distributed.main_rank import on_main
from kubetune.rundir import metrics
from kubetune.rundir.checkpoints import State
from kubetune.scoring import verdict
from kubetune.scoring.asking import remarks_on_answers
from kubetune.training.judgement import judge_weights
from kubetune.training.run import Run


def measure_base(run: Run, state: State) -> None:
    """Measure the model before its first step, once for each run: later evaluations are compared with it."""
    run_dir = run.checkpointer.run_dir
    wanted = run.evaluation
    on_main(partial(verdict.warn_of_changed_functions, wanted, run_dir), run.world)
    # A resumed run can no longer measure it: its weights have moved.
    if state.step or on_main(lambda: (run_dir / metrics.BASE).exists(), run.world):
        return
    if run.judge is not None and run.world.is_main:
        for line in remarks_on_answers(run.learner.lm):
            logs.EVAL.info("%s", line)

    values = judge_weights(run, 0)
    if values is None:
        raise errors.Preempted(0)  # stopped; the next start measures again
    if run.world.is_main:
        content = json.dumps({"metrics": values, **verdict.functions_of(wanted)}, indent=1)
        files.write_atomic(run_dir / metrics.BASE, content, within=run_dir)
        texts = [f"{name} {value:.4g}" for name, value in values.items()]
        logs.EVAL.info("before training %s", " ".join(texts))
