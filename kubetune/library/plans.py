"""A run before it starts: its plan, its prepared data, its place on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base.gpus import visible_gpus
from kubetune.base.humanize import counted
from kubetune.config.naming import default_output
from kubetune.config.schema import Config
from kubetune.data.inspect.estimate import estimate_lengths, estimate_rows, makes_data
from kubetune.data.reading.hub import check_model_folder
from kubetune.errors import EnvironmentFault
from kubetune.library.configs import ConfigLike, config_of
from kubetune.plan import plan
from kubetune.plan.base_model import positions_of, require_kind
from kubetune.plan.plan import Plan
from kubetune.rundir.report import require_place_of_report

if TYPE_CHECKING:
    from kubetune.data.prepared.prepare import Prepared


def make_plan(config: ConfigLike, *, gpus: int | None = None) -> Plan:
    """Batches, steps and processes of a run, as `kubetune plan` shows them. Nothing is loaded or written.

    `gpus`: those of each node; left out, the ones that this machine has. Rows and tokens are estimated from the data
    where these are at hand, and None where they are not.

    Raises:
        ConfigError: the config is wrong, or such a run is impossible.
        DataError: data that are nowhere.
        ModelError: a tokenizer that is of no use.
    """
    config = config_of(config)
    require_kind(config.task, config.model.path, os.environ)
    rows, eval_rows = estimate_rows(config.data, made_by_pod=makes_data(config.kubernetes))
    lengths = estimate_lengths(config, os.environ)
    positions = positions_of(config.task, config.model.path, os.environ)
    if positions is not None and lengths is not None:
        positions.require(lengths.longest)
    tokens = lengths.tokens(rows) if lengths is not None else None
    if lengths is not None:
        rows, eval_rows = lengths.rows(rows), lengths.rows(eval_rows)
    return plan.make_plan(
        config, rows, eval_rows, visible_gpus(os.environ) if gpus is None else gpus, tokens=tokens
    )


def prepare(config: ConfigLike, *, progress: Callable[[int], None] | None = None) -> Prepared:
    """Tokenise the data of a run, or find them already prepared: the rows that `train` would learn from.

    `progress` is called with the number of records done so far.

    Raises:
        ConfigError: the config is wrong.
        DataError: bad records, each with its file and line, or too few that are good. Nothing is kept then.
        ModelError: the tokenizer cannot be had, or does not fit the task.
        EnvironmentFault: the disk is full, or a process was killed.
    """
    from kubetune.data.prepared.prepare import prepare as prepare_rows

    return prepare_rows(config_of(config), progress=progress)


def plan_here(config: Config) -> tuple[Config, Plan]:
    """The config with its run directory, and the plan, of a run that is to start on this machine now.

    Raises ConfigError, DataError, ModelError or EnvironmentFault for what would end it at once.
    """
    check_model_folder(config.model)
    require_kind(config.task, config.model.path, os.environ)
    _require_place_for_report(config)
    run_dir = Path(config.output) if config.output else _new_run_dir(config)
    config = config.model_copy(update={"output": str(run_dir)})
    rows, eval_rows = estimate_rows(config.data, made_by_pod=makes_data(config.kubernetes))
    gpus = visible_gpus(os.environ)
    run_plan = plan.make_plan(config, rows, eval_rows, gpus)
    if run_plan.device == "cuda" and run_plan.processes_per_node > gpus:
        fewer = f"compute.gpus_per_node={gpus}, or " if gpus else ""
        raise EnvironmentFault(
            f"the run wants {counted(run_plan.processes_per_node, 'GPU')} on this machine, which has {gpus}; set "
            f"{fewer}compute.gpus_per_node=0 and compute.processes to train on the CPU"
        )
    return config, run_plan


def _require_place_for_report(config: Config) -> None:
    """Look now whether the report can be copied where it is wanted; after the training would be late."""
    if config.logging.report_json is None:
        return
    path = Path(config.logging.report_json).absolute()
    folder = next(parent for parent in path.parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise EnvironmentFault(
            f"logging.report_json: {path} cannot be written; give another place. Nothing was written."
        )
    require_place_of_report(path)


def _new_run_dir(config: Config) -> Path:
    """The default run directory, numbered when another run began there in the same minute."""
    first = Path(default_output(config, datetime.now()))
    return next(
        path
        for n in range(1, 1000)
        if not (path := first if n == 1 else Path(f"{first}-{n}")).exists()
    )
