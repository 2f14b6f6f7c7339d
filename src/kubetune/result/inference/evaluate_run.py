"""`kubetune evaluate`: the evaluation of a run's checkpoint, on its own evaluation data or on other data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kubetune import errors
from kubetune.base.files import require_not_read, write_atomic
from kubetune.config import consent
from kubetune.config.schema import Config
from kubetune.config.schema.evaluation import FORGET_LOSS, GenerateConfig
from kubetune.data.spec import DataSpec
from kubetune.data.text.class_labels import Labels
from kubetune.distributed.process_group import World
from kubetune.models.learner import Learner
from kubetune.models.model_spec import ModelSpec
from kubetune.plan.plan import make_plan
from kubetune.result.inference.evaluated_config import data_sections, without_rewards
from kubetune.result.inference.evaluated_data import rows_of
from kubetune.result.inference.result import Result, default_device, open_result
from kubetune.rundir.metrics import EVALUATION, PREDICTIONS, now
from kubetune.scoring.asking import answer, remarks_on_answers
from kubetune.scoring.judge import Judge, judge_of
from kubetune.scoring.own_functions import Function
from kubetune.training.evaluation import collect, evaluate, measured
from kubetune.training.reference import of_base

# Called with what is done, of how many rows, and the number of rows done.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation."""

    metrics: dict[str, float]
    predictions: Path | None = None  # the file that holds a classifier's prediction for each row
    confusion: list[list[int]] | None = None  # [i][j]: rows of class i that were taken for class j
    names: tuple[str, ...] = ()  # of the classes of `confusion`
    remarks: tuple[str, ...] = ()  # on records that became no rows, or hold more than their rows


def evaluate_run(
    run_dir: Path,
    which: str,
    data: str | None = None,
    predictions: Path | None = None,
    *,
    model: str | None = None,
    functions: Mapping[str, Function] = MappingProxyType({}),
    trust_code: str | None = None,
    progress: Progress = lambda what, total, done: None,
) -> Evaluation:
    """Evaluate a run's checkpoint on its evaluation data, or on `data` as `other_sources` reads it.

    A classifier's predictions are also written, one JSON object a line, to `predictions` or `predictions.jsonl` of the
    run. `model`: its base, if that lies elsewhere here. `functions`: they judge answers, besides those of the
    config. `trust_code`: digest of code of the run that the user allows. `progress` is called after each batch. Raise
    ConfigError if there is nothing to evaluate on.
    """
    result = open_result(run_dir, which, model, trust_code)
    consent.require(consent.effects_of(result.trained, [consent.METRICS]), run_dir, trust_code)
    config = result.config
    if functions and config.classifies:
        raise errors.ConfigError(
            f"metrics judge answers, and a run of task {config.task} writes none"
        )

    # What differs from the run's config, by section.
    evaluated = config.evaluation
    if functions:
        # Functions judge answers, which the model has to write even if it did not in training.
        generate = evaluated.generate or GenerateConfig()
        evaluated = evaluated.model_copy(update={"generate": generate})
    evaluated, remarks = without_rewards(evaluated, has_functions=bool(functions))
    changed: dict[str, Any] = {"evaluation": evaluated}

    labels = result.task.labels_of(result.checkpoint)
    has_labels = labels is not None
    if predictions is not None:
        _check_predictions(predictions, data, config.task, run_dir, has_labels=has_labels)
    changed |= data_sections(config.data, run_dir, config.model.path, data, labels)
    config = config.model_copy(update=changed)

    is_other = data is not None
    evaluation, predicted = _evaluate(
        result, config, labels, functions, progress, is_other=is_other
    )
    evaluation = replace(evaluation, remarks=(*evaluation.remarks, *remarks))
    if predicted is not None:
        file = predictions or run_dir / PREDICTIONS
        text = ""
        for row in predicted:
            text += json.dumps(row, ensure_ascii=False) + "\n"
        write_atomic(file, text)
        evaluation = replace(evaluation, predictions=file)

    _write(run_dir, evaluation, which, data)
    return evaluation


def _evaluate(
    result: Result,
    config: Config,
    labels: Labels | None,
    functions: Mapping[str, Function],
    progress: Progress,
    *,
    is_other: bool,
) -> tuple[Evaluation, Iterator[dict[str, Any]] | None]:
    """Load the model and measure it on the rows of `config`, which `--data` names if `is_other`.

    Return also a classifier's predictions.
    """
    task = result.task
    device = default_device()
    # Only a model that was trained whole has its reference in another file: the base, which is then read too.
    reads_base = config.lora is None and config.needs_reference
    spec = ModelSpec.of(config)
    with result.checked(base=reads_base or None):
        rows, forget, remarks = rows_of(config, result.checkpoint, is_other=is_other)
        learner = task.load(spec, result.checkpoint, device)

    # As in training, with one rank: losses and metrics first, then answers.
    world = World(device=device)
    plan = make_plan(config, world_size=1)
    if config.needs_reference:
        of_base.ask_base(spec, learner, rows, plan, world)
    count = partial(progress, "evaluating rows", len(rows))
    parts = collect(task, learner, rows, plan, world, count=count)
    assert parts is not None
    metrics = measured(task, learner, rows, parts, world)
    if forget is not None:
        of_forget = evaluate(task, learner, forget, plan, world)
        assert of_forget is not None
        metrics[FORGET_LOSS] = of_forget["eval_loss"]

    sources = DataSpec.of(config).splits["train" if is_other else "eval"]
    judge = judge_of(config.evaluation, result.tokenizer, sources, rows, world, functions)
    if judge is not None:
        metrics |= _scores(judge, learner, world, progress)
        remarks += (*judge.remarks, *remarks_on_answers(learner.lm))

    confusion = task.confusion(learner, parts)
    names: tuple[str, ...] = ()
    if confusion and labels:
        # Names are shown with the matrix, and mean nothing without one.
        names = labels.names
    evaluation = Evaluation(metrics, confusion=confusion, names=names, remarks=remarks)
    return evaluation, task.predictions(learner, parts, rows)


def _scores(judge: Judge, learner: Learner, world: World, progress: Progress) -> dict[str, float]:
    """Return the metrics of the answers that the model gives."""
    count = partial(progress, "answering", len(judge.asked))
    # Nobody asks this evaluation to stop, so that there are answers.
    answers = answer(judge, learner, world, lambda: False, count)
    scores, _ = judge.score(answers or {})
    return scores


def _check_predictions(
    predictions: Path,
    data: str | None,
    task: str,
    run_dir: Path,
    *,
    has_labels: bool,
) -> None:
    """Raise ConfigError for predictions of a run that is no classifier, or that would replace the data."""
    if not has_labels:
        raise errors.ConfigError(
            f"predictions are a classifier's; {run_dir} is a run of task {task}"
        )
    if data is not None:
        require_not_read(predictions, data)


def _write(run_dir: Path, evaluation: Evaluation, which: str, data: str | None) -> None:
    """Write evaluation.json."""
    facts = asdict(evaluation)
    if evaluation.predictions is not None:
        facts["predictions"] = str(evaluation.predictions)
    facts |= {"checkpoint": which, "data": data, "time": now()}
    write_atomic(run_dir / EVALUATION, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
