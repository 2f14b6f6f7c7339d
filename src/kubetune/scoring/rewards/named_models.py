"""Judge a model that a run file names beside its own, a reward's or a teacher, by its files, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kubetune import errors
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import read_config
from kubetune.config.schema import DataConfig, DistillConfig, ModelConfig, RewardConfig
from kubetune.data.inspect.estimate import load_here
from kubetune.data.reading.hub import is_local, require_model
from kubetune.plan import model_shapes
from kubetune.rundir.adapter_settings import choose_trained

# Tasks whose result says how likely a text is.
LANGUAGE_TASKS: Final = ("causal_lm", "distill", "grpo", "preference")
_EXPECTED: Final = "expected a classifier with one output, or a run of `task: reward_model`"


@dataclass(frozen=True)
class NamedModel:
    """A model that a run file names beside its own."""

    key: str  # of the run file, for messages
    path: str  # a run directory, a folder, or a name on the hub
    revision: str | None
    is_teacher: bool  # it says how likely tokens are; else it is a reward model

    @classmethod
    def of_reward(cls, reward: RewardConfig, key: str = "rewards") -> NamedModel:
        """Return the model of a reward that is by a model."""
        path = reward.reward_model or reward.teacher
        assert path is not None, "the config has checked that the reward is by a model"
        return cls(key, path, reward.revision, reward.teacher is not None)

    @classmethod
    def of_distillation(cls, distill: DistillConfig) -> NamedModel:
        """Return the teacher of `task: distill`."""
        assert distill.model is not None, "the config has checked that there is a teacher"
        return cls("distill.teacher", distill.model, distill.revision, is_teacher=True)


def require_named_model(
    named: NamedModel, learner: ModelConfig, data: DataConfig, environ: Mapping[str, str]
) -> None:
    """Raise ConfigError or ModelError for a named model that cannot be used. No weights are read.

    `learner`, `data`: of the run that learns from it.
    """
    path = named.path
    run_dir = Path(path).expanduser()
    # A run directory, which has its config.
    if (run_dir / RESOLVED).is_file():
        of_run = read_config(run_dir)
        require_task(run_dir, of_run.task_name, named)
        try:
            choose_trained(run_dir, of_run.lora)
        except (errors.ConfigError, errors.ModelError) as error:
            raise type(error)(f"{named.key}: {error}") from None
        model = of_run.model
    else:
        model = ModelConfig(
            path=path, revision=named.revision, local_files_only=learner.local_files_only
        )
    try:
        require_model(model, environ)
    except errors.ModelError as error:
        raise errors.ModelError(f"{named.key}: {error}") from None
    if named.is_teacher:
        _require_same_tokens(named, model, learner, data)
    elif not (run_dir / RESOLVED).is_file():
        _require_classifier(path, environ)


def require_task(run_dir: Path, task: str, named: NamedModel) -> None:
    """Raise ConfigError for a run whose task (`Config.task_name`) makes no such model."""
    tasks = LANGUAGE_TASKS if named.is_teacher else ("reward_model",)
    if task not in tasks:
        raise errors.ConfigError(
            f"{named.key}: {run_dir} is a run of `task: {task}`; expected one of {', '.join(tasks)}"
        )


def other_tokens(key: str, teacher: str, of_teacher: str, tokenizer: str) -> errors.ModelError:
    """Return the error for a teacher whose tokens are not those of the model that learns."""
    return errors.ModelError(
        f"{key}: the teacher {teacher} has other tokens than the model that learns ({of_teacher}, not "
        f"{tokenizer}), so it can say nothing of them; expected a teacher with the same tokenizer"
    )


def other_outputs(path: str, number: int) -> errors.ModelError:
    """Return the error for a classifier that has not one output."""
    return errors.ModelError(
        f"rewards: {path} has {number} outputs; expected a reward model, which has one"
    )


def lacking_weights(path: str, names: str) -> errors.ModelError:
    """Return the error for a model without the weights of a reward model's output."""
    return errors.ModelError(
        f"rewards: {path} lacks weights ({names}), so it is no reward model; {_EXPECTED}"
    )


def _require_same_tokens(
    named: NamedModel, teacher: ModelConfig, learner: ModelConfig, data: DataConfig
) -> None:
    # What the hub has is compared when the model is loaded.
    if not is_local(teacher.path) or not Path(learner.path).expanduser().is_dir():
        return
    of_teacher = load_here(teacher, data)
    tokenizer = load_here(learner, data)
    if of_teacher.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise other_tokens(named.key, named.path, of_teacher.name, tokenizer.name)


def _require_classifier(path: str, environ: Mapping[str, str]) -> None:
    """Raise ModelError for a model that has not one output by its config.json, as transformers reads it."""
    facts = model_shapes.read_config(path, environ)
    if facts is None:
        return
    labels = facts.get("id2label")
    number = len(labels) if labels else facts.get("num_labels", 2)
    if number == 1:
        return
    classes = [str(name) for name in facts.get("architectures") or []]
    if classes and all(name.endswith("ForCausalLM") for name in classes):
        raise lacking_weights(path, "those of its output")
    raise other_outputs(path, number)
