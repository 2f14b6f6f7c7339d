"""What only the plan of a run tells: batches that cannot be, a compiler, the form of its base, its place, its folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kubetune.base.gpus import visible_gpus
from kubetune.config.schema import Config
from kubetune.plan.devices import require_compiler
from kubetune.plan.model_shapes import ModelFiles
from kubetune.plan.plan import make_plan
from kubetune.supervisor.place import find_place


def require_plan(config: Config, model_files: ModelFiles, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for batches that cannot be, no compiler, no place among nodes, or a folder of another run.

    ModelError: a base that is quantised in a form which this machine cannot load.
    """
    plan = make_plan(config, gpus=visible_gpus(environ))
    require_compiler(config.training.compile, plan.device)
    # Most bases are not quantised.
    from kubetune.library.verdict.quantised import require_loadable

    gpus = plan.processes_per_node if plan.device == "cuda" else 0
    require_loadable(model_files, gpus=gpus)
    # Each of several nodes has to know which it is.
    find_place(plan.nodes, plan.processes_per_node, environ)
    # What a mirror holds is only known when the start has fetched it.
    if config.output is not None and config.mirror is None:
        # Most plans are of runs without a folder.
        from kubetune.supervisor.run_folder import check_run_dir

        # If the folder cannot be read, `require_output` says so.
        with suppress(PermissionError):
            check_run_dir(config, Path(config.output).expanduser(), plan)
