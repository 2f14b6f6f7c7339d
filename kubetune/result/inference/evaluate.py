"""`kubetune evaluate`: the evaluation of a run's checkpoint, on its own evaluation data or on other data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from kubetune import errors
from kubetune.base.files import require_not_read, write_atomic
from kubetune.config import consent
from kubetune.config.load import load_config
from kubetune.config.schema import Config, SourceConfig
from kubetune.config.schema.evaluation import FORGET_LOSS, GenerateConfig
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.sentences import find
from kubetune.data.prepared.prepare import prepare
from kubetune.data.prepared.rows import Rows
from kubetune.distributed.process_group import World
from kubetune.plan.plan import make_plan
from kubetune.result.inference.result import default_device, open_result
from kubetune.rundir.metrics import EVALUATION, PREDICTIONS, now
from kubetune.scoring.judge import answer, judge_of, remarks_on_answers
from kubetune.scoring.own_functions import Function
from kubetune.training.evaluation import collect, evaluate, measured
from kubetune.training.start import reference


@dataclass(frozen=True)
class Evaluation:
    """Findings of an evaluation. `confusion[i][j]`: rows of class i taken for class j, of those in `names`.

    `predictions`: the file that holds what a classifier said of each row. `remarks`: lines on records that are no rows,
    or hold more than these.
    """

    metrics: dict[str, float]
    predictions: Path | None = None
    confusion: list[list[int]] | None = None
    names: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def other_sources(config: Config, data: str) -> tuple[SourceConfig, ...]:
    """The sources that `data` names: a path, or what a run file may have as `data.train`, as text.

    What it leaves out about columns and format is taken from the run's own data, which other data mostly look like.
    Raises ConfigError.
    """
    is_section = data.lstrip()[:1] in ("{", "[") and not Path(data).exists()
    flags = {"model.path": config.model.path} | ({} if is_section else {"data.train": data})
    given = load_config(
        None, overrides=[f"data.train={data}"] if is_section else [], flags=flags
    ).data.train
    if len(weights := {source.weight for source in given}) == 1 and weights != {1.0}:
        raise errors.ConfigError(
            f"--data: found weight {weights.pop():g}, and no source of another weight; weights are the mix that "
            "several sources are evaluated in: leave it out. Nothing was evaluated."
        )
    own = config.data.eval if isinstance(config.data.eval, tuple) else config.data.train
    alike = {key: getattr(own[0], key) for key in ("columns", "format")}
    alike = {
        key: value
        for key, value in alike.items()
        if all(getattr(source, key) == value for source in own)
    }
    return tuple(
        source.model_copy(
            update={key: alike[key] for key in alike if key not in source.model_fields_set}
        )
        for source in given
    )


def _rows(config: Config, *, is_given: bool) -> tuple[Rows, Rows | None, tuple[str, ...]]:
    """The rows to evaluate on, those that must not be forgotten, and remarks on them.

    `is_given`: those of `--data`, which stand where those of training do; nothing else is measured then.
    """
    try:
        prepared = prepare(config)
    except errors.DataError as error:
        if not is_given:
            raise
        raise errors.DataError(
            [problem.replace("data.train", "--data") for problem in error.problems]
        ) from None
    if is_given:
        findings = find(config, prepared.stats, prepared.tokenizer, names={"train": "--data"})
        return prepared.train, None, _remarks(findings, {"train"})
    assert prepared.eval is not None
    return prepared.eval, prepared.forget, _remarks(prepared.findings, {"eval", "forget"})


def _remarks(findings: Iterable[Finding], splits: set[str]) -> tuple[str, ...]:
    """Return the findings about some splits, in lines."""
    return tuple(finding.line for finding in findings if finding.split in splits)


def _asking(config: Config) -> Config:
    """The config with answers to judge. Raises ConfigError for a task that writes none."""
    if config.classifies:
        raise errors.ConfigError(
            f"metrics judge answers, and a run of task {config.task} writes none"
        )
    evaluation = config.evaluation.model_copy(
        update={"generate": config.evaluation.generate or GenerateConfig()}
    )
    return config.model_copy(update={"evaluation": evaluation})


def evaluate_run(
    run_dir: Path,
    which: str,
    data: str | None = None,
    predictions: Path | None = None,
    *,
    model: str | None = None,
    own: Mapping[str, Function] = MappingProxyType({}),
    trust_code: str | None = None,
) -> Evaluation:
    """Evaluate a run's checkpoint on its evaluation data, or on `data` as `other_sources` reads it.

    A classifier's predictions are also written, one JSON object a line, to `predictions` or `predictions.jsonl` of the
    run. `model`: its base, where that lies elsewhere here. `own`: functions that judge answers, besides those of the
    config. `trust_code`: digest of code of the run that the user allows. Raises ConfigError when the run has no
    evaluation data and none are given.
    """
    result = open_result(run_dir, which, model, trust_code)
    consent.require(consent.code_of(result.trained, [consent.METRICS]), run_dir, trust_code)
    config, folder = result.config, result.checkpoint
    device, task = default_device(), result.task
    if own:
        config = _asking(config)
    labels = task.labels_of(folder)
    if predictions is not None and labels is None:
        raise errors.ConfigError(
            f"predictions are a classifier's; {run_dir} is a run of task {config.task}"
        )
    if data is not None:
        if predictions is not None:
            require_not_read(predictions, data)
        sources = config.data.model_copy(
            update={"train": other_sources(config, data), "eval": None}
        )
        config = config.model_copy(update={"data": sources})
        if labels is not None:
            # other data may lack some of the classes
            config = config.model_copy(update={"classification": labels.section()})
    elif not config.data.eval:
        raise errors.ConfigError(f"{run_dir} has no evaluation data; give some with --data")
    whole_reference = (
        config.lora is None and config.task == "preference" and config.preference.needs_reference
    )
    with result.checked(base=whole_reference or None):
        rows, kept, remarks = _rows(config, is_given=data is not None)
        learner = task.load(config, folder, device)
    world = World(device=device)
    plan = make_plan(config, world_size=1)
    reference.ask_base(config, learner, rows, plan, world)
    parts = collect(task, learner, rows, plan, world)
    assert parts is not None
    if (said := task.predictions(learner, parts, rows)) is not None:
        predictions = predictions or run_dir / PREDICTIONS
        write_atomic(
            predictions, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in said)
        )
    matrix = task.confusion(learner, parts)
    names = labels.names if matrix and labels else ()
    metrics = measured(task, learner, rows, parts, world)
    if kept is not None:
        metrics[FORGET_LOSS] = (evaluate(task, learner, kept, plan, world) or {})["eval_loss"]
    judge = judge_of(
        config, result.tokenizer, rows, world, "eval" if data is None else "train", own
    )
    if judge is not None:
        remarks = (*remarks, *judge.remarks, *remarks_on_answers(learner.lm))
        metrics |= judge.score(answer(judge, learner, world, lambda: False) or {})[0]
    found = Evaluation(metrics, predictions, matrix, names, remarks)
    facts = {
        **asdict(found),
        "predictions": str(predictions) if predictions else None,
        "checkpoint": which,
        "data": data,
        "time": now(),
    }
    write_atomic(run_dir / EVALUATION, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    return found
