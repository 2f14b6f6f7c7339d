"""The verdict on a run before it starts: every problem that would keep it from training, as a sentence.

`init`, `data check`, `plan`, the page's form and `train` ask here, so that they say the same of the same run, and none
of them names the next command beside a problem. What is judged is all that the run file, the files at hand and the
installed extras decide. Nothing of the user's is run, no weights are read and no torch is imported. The rows are judged
by `data/inspect`, whose findings of severity `error` are problems too; they follow these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kubetune.base.files import user_cache
from kubetune.config.code_files import require_functions, require_imports, signature_of
from kubetune.config.schema import Config, LoraConfig, RewardConfig, TrainingConfig
from kubetune.config.schema.evaluation import EvaluationConfig, OwnMetricsConfig, packages_of
from kubetune.config.schema.model import ModelConfig
from kubetune.config.schema.tracking import PushConfig, TrackingConfig
from kubetune.data.reading.hub import hub_token, require_base_folder, require_model
from kubetune.errors import ConfigError, EnvironmentFault, KubetuneError
from kubetune.extras import require
from kubetune.library.built_targets import require_targets_elsewhere
from kubetune.plan.base_model import may_lack_targets, require_kind, require_targets
from kubetune.plan.linears import Trainable, part_of, trained_by_part
from kubetune.plan.model_shapes import read_weights

_WRITTEN = " Nothing was written."


def problems_of(config: Config, environ: Mapping[str, str], *, here: bool) -> list[KubetuneError]:
    """Return what the run file, the model and this machine's files and extras have against a run, rows left aside.

    `here`: the run is to be on this machine, so that its model, its extras and its keys have to be here too.
    """
    checks: list[Callable[[], None]] = []
    if here:
        checks += [
            partial(require_model, config.model, environ),
            partial(_require_extras, config),
            partial(_require_output, config.output or "outputs"),
            partial(_require_cache, config.data.cache, environ),
            partial(_require_checkpoint, config),
            partial(_require_token, config.push),
        ]
    elif Path(config.model.path).expanduser().is_dir():
        # The pods of a cluster may mount what is not here.
        checks.append(partial(require_base_folder, Path(config.model.path).expanduser()))
    checks += [
        partial(require_kind, config.task, config.model.path, environ),
        partial(_require_metrics, config.evaluation),
        partial(_require_rewards, config.rewards),
        partial(_require_named_models, config, environ, here=here),
        partial(_require_report_place, config.logging.report_json),
        partial(_require_experts, config.training, config.model.path, environ),
        partial(_require_training, config, environ),
    ]
    if not here and config.kubernetes is not None:
        checks.append(partial(_require_pods, config))
    problems = []
    for check in checks:
        try:
            check()
        except KubetuneError as error:
            problems.append(error)
    # It takes seconds, so it comes last, for runs that are right in all else.
    if not problems:
        try:
            _require_targets_in_doubt(config.lora, config.model, config.task_name, environ)
        except ConfigError as error:
            problems.append(error)
    return problems


def require_none(problems: Sequence[KubetuneError]) -> None:
    """Raise the problems, all of them in one error. Its exit code is 2, whatever they are."""
    if len(problems) == 1 and not isinstance(problems[0], EnvironmentFault):
        raise problems[0]
    if problems:
        raise ConfigError(sentences(problems))


def sentences(problems: Iterable[KubetuneError | str]) -> list[str]:
    """Return the problems as sentences, each once, without words on what was written."""
    lines: dict[str, None] = {}
    for problem in problems:
        texts = getattr(problem, "problems", None) or [str(problem)]
        for text in texts:
            lines.setdefault(text.removesuffix(_WRITTEN).rstrip("."))
    return list(lines)


def needs_bitsandbytes(quantization: str, optim: str) -> str:
    """Return the setting that needs bitsandbytes, as it is written; empty where none does."""
    if quantization not in ("none", "auto"):
        return f"quantization: {quantization}"
    if optim == "adamw_8bit":
        return f"training.optim: {optim}"
    return ""


def _require_extras(config: Config) -> None:
    """Raise MissingExtra for a library that the run needs here, ConfigError for a key or command that it lacks."""
    setting = needs_bitsandbytes(config.quantization, config.training.optim)
    if setting:
        require(setting, "bitsandbytes", after=_WRITTEN)
    if config.evaluation.benchmarks is not None:
        require("evaluation.benchmarks", "lm_eval", after=_WRITTEN)
    # Most runs have none of these, whose code takes its time to import.
    if config.tracking != TrackingConfig():
        from kubetune.rundir.tracking import trackers

        trackers.check_installed(config.tracking)
    if config.hooks.on_event is not None:
        from kubetune.supervisor.observers import hooks

        hooks.check(config.hooks)
    if config.mirror is not None:
        from kubetune.rundir.mirror import stored_run

        stored_run.check_installed(config.mirror)


def _require_metrics(evaluation: EvaluationConfig) -> None:
    """Raise ConfigError for metrics whose packages, file or functions are not here. The file is read, not run."""
    if evaluation.generate is not None:
        require("evaluation.generate.metric", *packages_of(evaluation.generate.metric))
    if evaluation.metrics is not None:
        _require_own_metrics(evaluation.metrics)


def _require_own_metrics(metrics: OwnMetricsConfig) -> None:
    """Raise ConfigError for functions that are not in their file, or cannot be called as metrics are."""
    from kubetune.scoring.own_functions import misfit, require_file

    key = "evaluation.metrics"
    file = require_file(metrics)
    require_functions(key, file, metrics.functions)
    require_imports(key, file)
    problems = []
    for function in metrics.functions:
        signature = signature_of(key, file, function)
        problem = "" if signature is None else misfit(file, function, signature)
        if problem:
            problems.append(problem)
    if problems:
        raise ConfigError(problems)


def _require_rewards(rewards: Sequence[RewardConfig]) -> None:
    """Raise ConfigError or MissingExtra for rewards that cannot be loaded, or are no rewards. No code of theirs is run."""
    if not rewards:
        return
    from kubetune.scoring.rewards.forms import form_of
    from kubetune.scoring.rewards.pool import with_absolute_file

    for number, reward in enumerate(rewards):
        reward = with_absolute_file(reward)
        if reward.is_model:
            continue
        if not reward.is_code:
            from kubetune.scoring.rewards.built_in import reward_of

            reward_of(reward)
            continue
        assert reward.file is not None
        assert reward.function is not None
        key = f"rewards[{number}]"
        file = Path(reward.file)
        require_functions(key, file, [reward.function])
        require_imports(key, file)
        signature = signature_of(key, file, reward.function)
        if signature is None:
            continue
        try:
            form_of(signature.parameters, f"{file}: {reward.function}")
        except ValueError as error:
            raise ConfigError(f"rewards: {error}") from None


def _require_named_models(config: Config, environ: Mapping[str, str], *, here: bool) -> None:
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
    if config.task == "distill" and config.distill.teacher != ITSELF:
        named.append(NamedModel.of_distillation(config.distill))
    for model in named:
        if here or Path(model.path).expanduser().is_dir():
            require_named_model(model, config, environ)


def _require_pods(config: Config) -> None:
    """Raise ConfigError for what `submit` refuses before it asks a cluster."""
    # Runs here do without the code of manifests.
    from kubetune.k8s.manifests import local_files
    from kubetune.k8s.manifests.run_spec import plan_without_data
    from kubetune.library.clusters import checked_manifests

    checked_manifests(config, plan_without_data(config), local_files(config))


def _require_token(push: PushConfig | None) -> None:
    """Raise ConfigError for an upload at the end of a run that has no token for the hub."""
    if push is None or hub_token() is not None:
        return
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError(
            f"push: there is no token for the hub, so {push.repo} would get nothing; set HF_TOKEN to one that may write, "
            "or run `hf auth login`"
        )


def _require_output(output: str) -> None:
    """Raise ConfigError for a run directory that cannot be written."""
    _require_writable("output", Path(output).expanduser().absolute())


def _require_cache(cache: str | None, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a folder of prepared data that cannot be written, named or not."""
    folder = user_cache(environ) / "kubetune"
    if cache is not None:
        folder = Path(cache).expanduser()
    _require_writable("data.cache", folder.absolute())


def _require_checkpoint(config: Config) -> None:
    """Raise ConfigError if the run has to continue, and there is nothing that it could continue from."""
    # A mirror may hold the checkpoints; only the start fetches them.
    if config.training.resume != "must" or config.output is None or config.mirror is not None:
        return
    run_dir = Path(config.output).expanduser()
    if not any((run_dir / "checkpoints").glob("step-*")):
        raise ConfigError(
            f"training.resume is must, but {run_dir} has no checkpoint; `auto` would start there"
        )


def _require_report_place(report: str | None) -> None:
    """Raise ConfigError if the report cannot be written; after training it is too late."""
    if report is None:
        return
    path = Path(report).absolute()
    if path.is_dir():
        raise ConfigError(
            f"logging.report_json: {path} is a folder; give the name of a file.{_WRITTEN}"
        )
    from kubetune.rundir.report import require_place_of_report

    _require_writable("logging.report_json", path.parent)
    require_place_of_report(path)


def _require_writable(key: str, folder: Path) -> None:
    """Raise ConfigError unless the folder can be written, or made."""
    # Folders that are missing will be made in the nearest one that exists.
    nearest = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        raise ConfigError(
            f"{key}: {folder} cannot be made, as {nearest} is no folder; give another place.{_WRITTEN}"
        )
    if not os.access(nearest, os.W_OK):
        raise ConfigError(
            f"{key}: {folder} cannot be written, as {nearest} is not yours to write; give a place that is, such as "
            f"{key}=outputs/my-run.{_WRITTEN}"
        )


def _require_experts(training: TrainingConfig, model_path: str, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a loss of routers is set for a model that has no experts."""
    weights = read_weights(model_path, environ)
    # Shapes that were computed from config.json need not have every part.
    if weights is None or not weights.stated:
        return
    parts = {part_of(name) for name in weights.shapes}
    if "router" in parts or "experts" in parts:
        return
    for name in ("router_aux_loss_coef", "router_z_loss_coef"):
        value = getattr(training, name)
        if value:
            raise ConfigError(
                f"training.{name}: found {value:g}, but this model has no experts; leave it out"
            )


def _require_targets(
    lora: LoraConfig | None, model: ModelConfig, environ: Mapping[str, str]
) -> None:
    """Raise ConfigError for target modules that the names of the weights show to be missing."""
    weights = read_weights(model.path, environ)
    if lora is not None and weights is not None and not model.trust_remote_code:
        require_targets(lora, weights)


def _require_targets_in_doubt(
    lora: LoraConfig | None, model: ModelConfig, task: str, environ: Mapping[str, str]
) -> None:
    """Raise ConfigError for target modules that the model lacks, where the names of its weights leave that open.

    Another process builds the model without weights, as this one imports no torch.
    """
    weights = read_weights(model.path, environ)
    # Code of the model itself is not run before training.
    if lora is None or weights is None or model.trust_remote_code:
        return
    if may_lack_targets(lora, weights):
        require_targets_elsewhere(lora, model, task, weights)


def _require_training(config: Config, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for targets that the model lacks, or if not one parameter of it would be trained."""
    _require_targets(config.lora, config.model, environ)
    weights = read_weights(config.model.path, environ)
    lora = config.lora
    # Regular expressions are for whole names, which files and models write differently.
    is_open = lora is not None and (
        lora.target_parameters
        or (isinstance(lora.target_modules, str) and lora.target_modules != "all-linear")
    )
    if weights is None or not weights.stated or is_open or config.model.trust_remote_code:
        return
    if "quantization_config" in weights.config:
        return
    if not trained_by_part(Trainable(lora, config.sight), weights).total():
        raise ConfigError(
            f"lora.target_modules: none of the {weights.parameters:,} parameters of the model would be trained, as "
            "all that is named is frozen, or can have no adapter; name other modules, or all-linear"
        )
