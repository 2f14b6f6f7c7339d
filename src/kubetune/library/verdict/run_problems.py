"""All that stands against a run before it starts: problems that keep it from training, and warnings.

A warning is what this machine lacks now, since a plan may be for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kubetune.config.schema import Config
from kubetune.data.reading.hub import require_base_folder, require_model
from kubetune.data.reading.sources import require_hub_data
from kubetune.errors import NOTHING_WRITTEN, ConfigError, EnvironmentFault, KubetuneError
from kubetune.library.verdict.installed import require_extras, require_store, require_token
from kubetune.library.verdict.judges import (
    require_metrics,
    require_named_models,
    require_rewards,
)
from kubetune.library.verdict.model_integrity import require_whole_model
from kubetune.library.verdict.places import (
    require_cache,
    require_output,
    require_report_place,
)
from kubetune.library.verdict.planned import require_plan
from kubetune.library.verdict.trained_parts import (
    require_experts,
    require_known_to_servers,
    require_targets_in_doubt,
    require_training,
)
from kubetune.plan.base_model import require_kind
from kubetune.plan.devices import missing_gpus
from kubetune.plan.model_shapes import ModelFiles
from kubetune.supervisor.services import require_services


def problems_of(
    config: Config,
    environ: Mapping[str, str],
    *,
    here: bool,
    model_files: ModelFiles | None = None,
) -> list[KubetuneError]:
    """Return what the run file, the model and this machine's files and extras have against a run, rows left aside.

    `here`: the run is to be on this machine, so that its model, its extras and its keys have to be here too.
    `model_files`: those of the model if the caller reads them too.
    """
    lora = config.lora
    model = config.model
    if model_files is None:
        model_files = ModelFiles(model.path, environ)
    weights = model_files.weights
    checks: list[Callable[[], None]] = []
    if here:
        checks += _checks_of_machine(config, environ, model_files)
    elif Path(config.model.path).expanduser().is_dir():
        # The pods of a cluster may mount what is not here.
        checks.append(partial(require_base_folder, Path(config.model.path).expanduser()))
    checks += [
        partial(require_whole_model, model_files, has_code=model.trust_remote_code),
        partial(require_kind, config.task, model_files),
        partial(require_metrics, config.evaluation),
        partial(require_rewards, config.rewards),
        partial(require_named_models, config, environ, here=here),
        partial(require_report_place, config.logging.report_json),
        partial(require_experts, config.training, weights),
        partial(require_training, lora, model, config.quantization, config.sight, weights),
        partial(require_known_to_servers, config.grpo.servers, lora, weights),
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
            require_targets_in_doubt(lora, model, config.task_name, config.sight, weights)
        except ConfigError as error:
            problems.append(error)
    return problems


def _checks_of_machine(
    config: Config, environ: Mapping[str, str], model_files: ModelFiles
) -> list[Callable[[], None]]:
    """Return the checks of what a run needs of the machine that it starts on."""
    return [
        partial(require_model, config.model, environ),
        partial(require_extras, config.quantization, config.training.optim, config.evaluation),
        partial(require_services, config.tracking, config.hooks, config.mirror),
        partial(require_output, config.output or "outputs"),
        partial(require_cache, config.data.cache, environ),
        partial(require_token, config.push),
        partial(require_store, config.mirror, environ),
        partial(require_hub_data, config.sources, environ),
        partial(require_plan, config, model_files, environ),
    ]


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
            lines.setdefault(text.removesuffix(NOTHING_WRITTEN).rstrip(" ."))
    return list(lines)


def _require_pods(config: Config) -> None:
    """Raise ConfigError for what `submit` refuses before it asks a cluster."""
    # Runs here do without the code of manifests.
    from kubetune.k8s.manifests import local_files
    from kubetune.k8s.manifests.run_spec import plan_without_data
    from kubetune.library.clusters import checked_manifests

    checked_manifests(config, plan_without_data(config), local_files(config))


def warnings_of(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return as sentences what a run lacks here now: GPUs, and servers that somebody may start yet."""
    if config.kubernetes is not None:
        return []
    missing = missing_gpus(config.compute, environ)
    warnings = [missing] if missing else []
    if config.task in ("grpo", "distill"):
        from kubetune.library.verdict.servers import unreachable_servers

        warnings += unreachable_servers(config.task, config.grpo.servers, config.distill)
    return warnings
