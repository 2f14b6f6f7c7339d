"""What `kubetune evaluate` measures on: the run's evaluation data or other data, as rows, with remarks on them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.config.schema import Config, DataConfig, EvaluationConfig
from kubetune.data.findings.checked import findings_of
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.sentences import find
from kubetune.data.prepared.prepare import prepare
from kubetune.data.prepared.rows import Rows
from kubetune.data.spec import DataSpec
from kubetune.data.text.class_labels import Labels
from kubetune.result.inference.requirements import other_sources
from kubetune.rundir import checkpoints


def rows_of(
    config: Config, checkpoint: Path, *, is_other: bool
) -> tuple[Rows, Rows | None, tuple[str, ...]]:
    """Return the rows to evaluate on, those that must not be forgotten, and remarks on both.

    `checkpoint`: what is evaluated. `is_other`: the rows are those of `--data`, which are in the place of `data.train`;
    nothing else is measured then.
    """
    try:
        prepared = prepare(config)
    except errors.DataError as error:
        if not is_other:
            raise
        # The user knows these data by the option. Keys below it, such as data.train.columns, are the run's.
        problems = []
        for problem in error.problems:
            problems.append(re.sub(r"data\.train(?!\.)", "--data", problem))
        raise errors.DataError(problems) from None

    if is_other:
        names = {"train": "--data"}
        findings = find(DataSpec.of(config), prepared.stats, prepared.tokenizer, names=names)
        return prepared.train, None, _remarks(findings, {"train"})

    assert prepared.eval is not None
    remarks = _remarks(findings_of(prepared), {"eval", "forget"})
    trained_on = checkpoints.load_state(checkpoint).data_fingerprint
    if trained_on not in ("", prepared.fingerprint):
        remarks = (_of_changed_data(config.data), *remarks)
    return prepared.eval, prepared.forget, remarks


def _of_changed_data(data: DataConfig) -> str:
    """Return the remark on data that are no longer those that the model was trained on."""
    changed = "warning: the data, or the tokenizer, have changed since the model was trained, so"
    if isinstance(data.eval, float):
        return (
            f"{changed} data.eval: {data.eval:g} holds out other rows now, and the model may have been trained on them. "
            "Give rows that it has not seen by --data"
        )
    return f"{changed} these numbers may be of other rows than those of the run"


def _remarks(findings: Iterable[Finding], splits: set[str]) -> tuple[str, ...]:
    """Return the findings about some splits, in lines."""
    return tuple([finding.line for finding in findings if finding.split in splits])


def without_rewards(
    evaluation: EvaluationConfig, *, has_functions: bool
) -> tuple[EvaluationConfig, tuple[str, ...]]:
    """Return an evaluation whose answers no reward of `task: grpo` judges, and a remark if one would.

    Rewards are the run's own code and models, which only its training starts.
    """
    generate = evaluation.generate
    if generate is None or "reward" not in generate.metric:
        return evaluation, ()
    metric = tuple(name for name in generate.metric if name != "reward")
    kept = None
    if metric or has_functions or evaluation.metrics is not None:
        kept = generate.model_copy(update={"metric": metric})
    remark = (
        "reward is measured only by the evaluations of the training; `kubetune report` shows them"
    )
    return evaluation.model_copy(update={"generate": kept}), (remark,)


def of_other_data(
    of_run: DataConfig, model_path: str, data: str, labels: Labels | None
) -> dict[str, Any]:
    """Return the sections of the config that `--data` changes."""
    # Other data take the place of those to train on, which are then the only ones.
    sources = other_sources(of_run, model_path, data)
    changed: dict[str, Any] = {"data": of_run.model_copy(update={"train": sources, "eval": None})}
    if labels is not None:
        # Other data may lack some of the classes.
        changed["classification"] = labels.section()
    return changed
