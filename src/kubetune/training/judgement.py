"""Judge a run's weights: the task's own metrics, what it forgot, what it answers, and the gate at the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.config.schema.evaluation import FORGET_LOSS
from kubetune.distributed.main_rank import on_main
from kubetune.rundir import metrics
from kubetune.scoring import harness, verdict
from kubetune.scoring.asking import answer
from kubetune.scoring.comparison import QUESTIONS, answers_file, write_lines
from kubetune.scoring.judge import Judge, Reply, Rewarded, judge_of
from kubetune.training.evaluation import evaluate
from kubetune.training.rollouts.held_out import have_answers

if TYPE_CHECKING:
    from kubetune.config.schema import SourceConfig
    from kubetune.config.schema.evaluation import BenchmarksConfig, EvaluationConfig
    from kubetune.data.prepared.prepare import Prepared
    from kubetune.distributed.process_group import World
    from kubetune.rundir.checkpoints import State
    from kubetune.training.run import Run


def open_judge(
    evaluation: EvaluationConfig,
    sources: Sequence[SourceConfig],
    data: Prepared,
    world: World,
) -> Judge | None:
    """Return the judge of a run's answers, None if no answers are asked for. `sources`: of the evaluation data.

    Raise ConfigError if the judge cannot be made, or if a benchmark does not exist.
    """
    if evaluation.benchmarks is not None:
        # Only rank 0 asks; all ranks get the error.
        on_main(partial(_require_benchmarks, evaluation.benchmarks), world)
    if data.eval is None:
        return None
    return judge_of(evaluation, data.tokenizer, sources, data.eval, world)


def _require_benchmarks(benchmarks: BenchmarksConfig) -> None:
    """Raise ConfigError for a benchmark that does not exist."""
    harness.task_manager(benchmarks)


def require_metric(name: str, values: Collection[str]) -> None:
    """Raise ConfigError unless the task has the metric that chooses the best checkpoint."""
    if name not in values:
        raise errors.ConfigError(
            f"training.metric_for_best_model is {name}; this task gives {', '.join(values)}"
        )


def judge_weights(run: Run, step: int) -> dict[str, float] | None:
    """Return all metrics of the weights after `step` steps, the same on all ranks; None if a stop came meanwhile.

    The answers are written to the run directory.
    """
    # A stop within any of these leaves no half result: the next start evaluates this step again.
    values = _of_task(run)
    if values is None:
        return None

    if run.data.forget is not None:
        of_forget = evaluate(
            run.task,
            run.learner,
            run.data.forget,
            run.plan,
            run.world,
            run.stop,
        )
        if of_forget is None:
            return None
        values[FORGET_LOSS] = of_forget["eval_loss"]

    if run.judge is None:
        return values

    answers = answer(
        run.judge,
        run.learner,
        run.world,
        lambda: run.stop.requested,
    )
    if answers is None:
        return None
    rewards = _rewards(run, answers, step)
    if rewards is None:
        return None
    # Rank 0 scores and writes, and all ranks get the numbers, on which the best checkpoint depends.
    score = partial(_score, run.judge, answers, rewards, run.checkpointer.run_dir, step)
    scores = on_main(score, run.world)
    # What the task is about comes first.
    if run.rollouts is not None:
        return scores | values
    return values | scores


def _of_task(run: Run) -> dict[str, float] | None:
    """Return the task's own metrics; None if a stop came meanwhile. Prompts without right answers have none."""
    rows = run.data.eval
    assert rows is not None
    if run.rollouts is not None and not have_answers(rows):
        return {}
    return evaluate(run.task, run.learner, rows, run.plan, run.world, run.stop)


def _rewards(
    run: Run, answers: Mapping[int, Sequence[Reply]], step: int
) -> Mapping[int, Rewarded] | None:
    """Return what a run's own rewards say of the answers, by row; nothing for other tasks; None if a stop came."""
    if run.rollouts is None or run.rollouts.held_out is None:
        return {}
    assert run.judge is not None
    return run.rollouts.held_out.judge(
        run.judge,
        answers,
        step,
        run.world,
        lambda: run.stop.requested,
    )


def _score(
    judge: Judge,
    answers: Mapping[int, Sequence[Reply]],
    rewards: Mapping[int, Rewarded],
    run_dir: Path,
    step: int,
) -> dict[str, float]:
    """Return the metrics of the answers. Write the answers, and the questions once for each run."""
    values, lines = judge.score(answers, rewards)
    # The questions are the same at every evaluation.
    questions = run_dir / metrics.ANSWERS / QUESTIONS
    if not questions.exists():
        lines_of_questions = []
        for question in judge.asked:
            prompt = judge.tokenizer.decode(question.ids)
            reference = judge.reference(question)
            lines_of_questions.append(
                {"row": question.row, "prompt": prompt, "reference": reference}
            )

        write_lines(questions, lines_of_questions, run_dir)

    write_lines(answers_file(run_dir, step), lines, run_dir)
    return values


def conclude(
    wanted: EvaluationConfig,
    run_dir: Path,
    state: State,
    world: World,
) -> None:
    """Write the verdict on a run: the best checkpoint against the base model, and the gate.

    Raise GateFailed, on every rank, if the best checkpoint misses what `evaluation.gate` asks for.
    """
    if wanted.names or wanted.gate or (run_dir / metrics.BASE).exists():
        # A run that evaluated nothing has no best step: its last weights are judged.
        step = state.best_step
        if step is None:
            step = state.step
        on_main(partial(verdict.conclude, wanted, run_dir, step), world)
