"""Refuse judges of answers that cannot work: metrics, rewards, and models that rewards or a distillation name.

No code of theirs is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kubetune.config.code_files import (
    CodeFile,
    read_code,
    require_answers,
    require_functions,
    require_imports,
    signature_of,
)
from kubetune.config.schema import Config, RewardConfig
from kubetune.config.schema.evaluation import EvaluationConfig, OwnMetricsConfig, packages_of
from kubetune.data.reward_forms import columns_of
from kubetune.errors import ConfigError, ModelError
from kubetune.extras import require
from kubetune.library.verdict.model_integrity import require_whole_model
from kubetune.plan.model_shapes import ModelFiles


def require_metrics(evaluation: EvaluationConfig) -> None:
    """Raise ConfigError for metrics that lack packages, their file or functions. The file is read, not run."""
    if evaluation.generate is not None:
        require("evaluation.generate.metric", *packages_of(evaluation.generate.metric))
    if evaluation.metrics is not None:
        _require_own_metrics(evaluation.metrics)


def _require_own_metrics(metrics: OwnMetricsConfig) -> None:
    """Raise ConfigError for functions that are not in their file, or cannot be called as metrics are."""
    from kubetune.scoring.own_functions import misfit, require_file

    code = read_code("evaluation.metrics", require_file(metrics))
    require_functions(code, metrics.functions)
    require_imports(code)
    problems = []
    for function in metrics.functions:
        signature = signature_of(code, function)
        problem = "" if signature is None else misfit(code.path, function, signature)
        if problem:
            problems.append(problem)
    if problems:
        raise ConfigError(problems)
    for function in metrics.functions:
        require_answers(code, function, may_wait=False)


def require_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Raise ConfigError or MissingExtra for rewards that cannot be loaded, or are no rewards. No code of theirs is run."""
    if not rewards:
        return
    from kubetune.scoring.rewards.built_in import reward_of
    from kubetune.scoring.rewards.pool import with_absolute_file

    for number, reward in enumerate(rewards):
        reward = with_absolute_file(reward)
        if reward.file is not None and reward.function is not None:
            code = read_code(f"rewards[{number}]", Path(reward.file))
            _require_own_reward(code, reward.function)
        elif not reward.is_model:
            reward_of(reward)


def _require_own_reward(code: CodeFile, function: str) -> None:
    """Raise ConfigError for a function that is not in its file, or cannot be called as rewards are."""
    require_functions(code, [function])
    require_imports(code)
    signature = signature_of(code, function)
    try:
        if signature is not None:
            columns_of(signature, f"{code.path}: {function}")
    except ValueError as error:
        raise ConfigError(f"rewards: {error}") from None
    require_answers(code, function, may_wait=True)


def require_named_models(config: Config, environ: Mapping[str, str], *, here: bool) -> None:
    """Raise ConfigError or ModelError for models of rewards, or a teacher, that are not here or of another kind.

    A run elsewhere may find them there; only those that are here are judged.
    """
    if config.task != "distill" and not any(reward.is_model for reward in config.rewards):
        return
    from kubetune.config.schema.distill import ITSELF
    from kubetune.scoring.rewards.named_models import NamedModel, require_named_model

    named = []
    for number, reward in enumerate(config.rewards):
        if reward.is_model:
            kind = "teacher" if reward.teacher is not None else "reward_model"
            named.append(NamedModel.of_reward(reward, f"rewards[{number}].{kind}"))
    if config.task == "distill" and config.distill.model not in (None, ITSELF):
        named.append(NamedModel.of_distillation(config.distill))
    for model in named:
        if here or Path(model.path).expanduser().is_dir():
            require_named_model(model, config.model, config.data, environ)
            try:
                require_whole_model(ModelFiles(model.path, environ))
            except ModelError as error:
                raise ModelError(f"{model.key}: {error}") from None
