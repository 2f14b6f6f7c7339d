"""Benchmarks of a run: `kubetune evaluate RUN_DIR --benchmarks …`, and those that its run file asks for.

    python -m kubetune.result.inference.benchmarks RUN_DIR

The latter are measured by a process of its own, after the ranks have gone and their memory with them. It decides the
gate if that names one of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import files, logs
from kubetune.base.humanize import counted
from kubetune.base.terminal import is_brief
from kubetune.config import consent
from kubetune.config.resolved import read_config
from kubetune.config.schema.evaluation import BenchmarksConfig
from kubetune.result.inference.requirements import require_benchmarks
from kubetune.result.inference.result import default_device, open_result
from kubetune.rundir import checkpoints, metrics
from kubetune.scoring import harness, verdict
from kubetune.tasks import causal_lm


def main(argv: Sequence[str]) -> int:
    """Run what the run file of a run that has ended asks for. Return an exit code."""
    run_dir = Path(argv[0])
    logs.configure("INFO", brief=is_brief())
    try:
        _measure(run_dir)
    # A failed gate is a result, and no failure of the benchmarks.
    except errors.GateFailed as error:
        logs.ERROR.error("%s", error)
        return error.exit_code
    except errors.KubetuneError as error:
        logs.ERROR.error("%s", error)
        metrics.record_event(
            run_dir,
            "benchmarks",
            ok=False,
            reason=logs.scrub(str(error)),
        )
        return error.exit_code

    return errors.OK


def _measure(run_dir: Path) -> None:
    """Write benchmarks.json, unless it is there, and the verdict with it. Raise GateFailed if that does not hold."""
    config = read_config(run_dir)
    wanted = config.evaluation.benchmarks
    if wanted is None:
        raise errors.ConfigError(
            f"{run_dir} asks for no benchmarks; give --benchmarks to kubetune evaluate"
        )

    # Tasks may be code of the user's own folder.
    consent.require(consent.effects_of(config, [consent.TASKS]), run_dir)

    # A run that was stopped after its benchmarks does not measure them again.
    step = checkpoints.load_state(checkpoints.choose(run_dir, "best")).step
    known = metrics.read_benchmarks(run_dir, step)
    if known.get("wanted") != wanted.model_dump(mode="json") or "base" not in known:
        logs.EVAL.log(
            logs.NOTICE,
            "%s of lm-evaluation-harness: %s",
            counted(len(wanted.tasks), "task"),
            ", ".join(wanted.tasks),
        )
        evaluate_benchmarks(run_dir, wanted, with_base=True)
        known = metrics.read_benchmarks(run_dir, step)
        for line in known["compared"]:
            logs.RESULT.log(logs.NOTICE, "%s", verdict.line_in_words(line))
        metrics.record_event(
            run_dir,
            "benchmarks",
            ok=True,
            tasks=list(wanted.tasks),
        )

    verdict.judge_benchmarks(config.evaluation, run_dir, step, known["compared"])


def evaluate_benchmarks(
    run_dir: Path,
    wanted: BenchmarksConfig,
    which: str = "best",
    *,
    with_base: bool = False,
    model: str | None = None,
    trust_code: str | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure a run's checkpoint, and with `with_base` the model before training too.

    Return `{"tuned": {task: {metric: value}}, "base": …}`, which is written to benchmarks.json of the run too. Raise
    ConfigError for tasks that are unknown, models that are not for text, or if the harness is not installed.
    """
    result = open_result(run_dir, which, model, trust_code)
    require_benchmarks(run_dir, result.trained.task, answers_text=result.trained.answers_text)

    # Tasks are looked up before the model is loaded, so that a wrong name costs no time.
    manager = harness.task_manager(wanted)
    with result.checked():
        learner = result.task.load(result.spec, result.checkpoint, default_device())

    sides = {"tuned": harness.run(learner, result.checkpoint, wanted, manager)}
    if with_base:
        with result.as_base(learner.model) as base:
            # The same model with its adapters off, or another one.
            asked = learner
            if base is not learner.model:
                asked = causal_lm.TASK.learner_of(base, result.spec)
            sides["base"] = harness.run(asked, result.checkpoint, wanted, manager)

    values = {}
    for name, side in sides.items():
        values[name] = {task: benchmark.values for task, benchmark in side.items()}

    compared = []
    if with_base:
        compared = harness.compared(sides["base"], sides["tuned"], wanted.tasks)

    # `wanted` says what was asked for: another start measures again if that has changed.
    facts: Mapping[str, Any] = {
        "step": checkpoints.load_state(result.checkpoint).step,
        "wanted": wanted.model_dump(mode="json"),
        "time": metrics.now(),
        **values,
        "compared": compared,
    }
    text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    files.write_atomic(run_dir / metrics.BENCHMARKS, text, within=run_dir)
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
