"""A run before it starts: its plan, its prepared data, its run directory on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base.gpus import visible_gpus
from kubetune.config.naming import default_output
from kubetune.config.schema import Config
from kubetune.data.inspect.estimate import estimate_lengths, estimate_rows, makes_data
from kubetune.data.spec import DataSpec
from kubetune.errors import ConfigError
from kubetune.library.configs import ConfigLike, config_of
from kubetune.library.verdict.run_problems import problems_of, require_none
from kubetune.plan import plan
from kubetune.plan.base_model import positions_of, require_kind
from kubetune.plan.devices import missing_gpus
from kubetune.plan.model_shapes import ModelFiles
from kubetune.plan.plan import Plan

if TYPE_CHECKING:
    from kubetune.data.inspect.lengths import Lengths
    from kubetune.data.prepared.prepare import Prepared
    from kubetune.data.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class DataSize:
    """How much data a run has, as far as this machine can tell. None for what is unknown."""

    rows: int | None
    eval_rows: int | None
    tokens: int | None  # of one epoch
    lengths: Lengths | None  # of the first rows


def measure_data(
    config: Config,
    environ: Mapping[str, str],
    model_files: ModelFiles,
    load_tokenizer: Callable[[], Tokenizer] | None = None,
) -> DataSize:
    """Return the size of a run's data, estimated from the first rows.

    Raise ConfigError for a model that the task cannot train, or rows that are too long for it.
    """
    require_kind(config.task, model_files)
    made_by_pod = makes_data(config.kubernetes)
    rows, eval_rows = estimate_rows(config.data, made_by_pod=made_by_pod)
    lengths = estimate_lengths(
        DataSpec.of(config), config.training, environ, load_tokenizer, made_by_pod=made_by_pod
    )
    if lengths is None:
        return DataSize(rows, eval_rows, None, None)
    positions = positions_of(config.task, model_files)
    if positions is not None:
        positions.require(lengths.longest)
    # A record may make several rows, if long texts are split. Its tokens stay the same.
    tokens = lengths.tokens(rows)
    return DataSize(lengths.rows(rows), lengths.rows(eval_rows), tokens, lengths)


def make_plan(config: ConfigLike, *, gpus: int | None = None) -> Plan:
    """Return batches, steps and processes of a run, as `kubetune plan` shows them.

    Nothing is written, and no model is loaded. `gpus`: those of each node; by default, those of this
    machine. Rows and tokens are estimated from the data; they are None if the data are not here.

    Raises:
        ConfigError: the config is wrong, or such a run is impossible.
        DataError: data that do not exist.
        ModelError: a tokenizer that cannot be used.
    """
    config = config_of(config)
    size = measure_data(config, os.environ, ModelFiles(config.model.path, os.environ))
    if gpus is None:
        gpus = visible_gpus(os.environ)
    return plan.make_plan(config, size.rows, size.eval_rows, gpus, tokens=size.tokens)


def prepare(config: ConfigLike, *, progress: Callable[[int], None] | None = None) -> Prepared:
    """Tokenise the data of a run, unless that was done before. Return the rows that `train` uses.

    `progress` is called with the number of records so far.

    Raises:
        ConfigError: the config is wrong.
        DataError: bad records, each with its file and line, or too few good ones. Nothing is kept.
        ModelError: the tokenizer cannot be loaded, or does not fit the task.
        EnvironmentFault: the disk is full, or a process was killed.
    """
    from kubetune.data.findings.checked import prepare_run

    return prepare_run(config_of(config), progress=progress)


def plan_here(config: Config) -> tuple[Config, Plan]:
    """Return the config, with its run directory, and the plan of a run that starts here now.

    Raise ConfigError, DataError or ModelError for what would end it at once.
    """
    problems = problems_of(config, os.environ, here=True)
    missing = missing_gpus(config.compute, os.environ)
    if config.kubernetes is None and missing:
        problems.append(ConfigError(missing))
    require_none(problems)

    # Without `output`, the name of the run directory has model, method and minute in it.
    if config.output:
        run_dir = Path(config.output)
    else:
        length = config.data.max_length
        name = default_output(config.model.path, config.lora, length, datetime.now())
        run_dir = _new_run_dir(Path(name))
    config = config.model_copy(update={"output": str(run_dir)})

    # Rows are counted, but no text is read: the run itself does that when it prepares its data.
    rows, eval_rows = estimate_rows(config.data, made_by_pod=makes_data(config.kubernetes))
    gpus = visible_gpus(os.environ)
    return config, plan.make_plan(config, rows, eval_rows, gpus)


def _new_run_dir(first: Path) -> Path:
    """Return the default run directory, with a number if another run started in the same minute."""
    path = first
    number = 1
    while path.exists():
        number += 1
        path = Path(f"{first}-{number}")
    return path
