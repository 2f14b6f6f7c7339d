"""The sections of a run's config that `kubetune evaluate` changes: no rewards, and the data of `--data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubetune.config.schema import DataConfig, EvaluationConfig
from kubetune.data.text.class_labels import Labels
from kubetune.result.inference.requirements import other_sources, require_evaluation_data


def without_rewards(
    evaluation: EvaluationConfig, *, has_functions: bool
) -> tuple[EvaluationConfig, tuple[str, ...]]:
    """Return an evaluation in which no reward of `task: grpo` judges answers, and a remark if one would.

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


def data_sections(
    of_run: DataConfig, run_dir: Path, model_path: str, data: str | None, labels: Labels | None
) -> dict[str, Any]:
    """Return the sections of the config that `--data` changes. Raise ConfigError if there is nothing to evaluate on."""
    if data is None:
        require_evaluation_data(of_run, run_dir)
        return {}
    # Other data take the place of those to train on, which are then the only ones.
    sources = other_sources(of_run, model_path, data)
    changed: dict[str, Any] = {"data": of_run.model_copy(update={"train": sources, "eval": None})}
    if labels is not None:
        # Other data may lack some of the classes.
        changed["classification"] = labels.section()
    return changed
