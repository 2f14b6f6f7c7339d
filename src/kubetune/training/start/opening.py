"""Open the run directory of a rank: one that a launcher made, or a new one under torchrun."""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from kubetune import errors
from kubetune.base import logs, processes
from kubetune.base.terminal import is_brief
from kubetune.config.naming import RESOLVED
from kubetune.config.schema import Config
from kubetune.supervisor import place


def hold(run_dir: Path, rank: int) -> AbstractContextManager[None]:
    """Keep other processes from writing to the run directory, if no agent does. Raise EnvironmentFault, naming one."""
    if rank != 0 or processes.AGENT_PID in os.environ:
        return nullcontext()
    return place.hold(run_dir, node=0)


def open_run(argv: list[str], rank: int) -> tuple[Config, Path]:
    """Return the config and the run directory: one that a launcher made, or a new one from a file or flags."""
    from kubetune.config.resolved import load_resolved

    # A launcher has made the run directory.
    if len(argv) == 1 and (Path(argv[0]) / RESOLVED).is_file():
        run_dir = Path(argv[0])
        config = load_resolved(run_dir / RESOLVED)
        _log_to_run(config.logging.level, run_dir, rank)
        return config, run_dir

    # By hand, under torchrun: rank 0 makes it.
    from kubetune.base.gpus import visible_gpus
    from kubetune.plan.plan import make_plan
    from kubetune.supervisor.command_line import add_run_arguments, config_from_args, parse
    from kubetune.supervisor.run_folder import check_run_dir, create_run_dir, settled

    logs.configure("INFO", rank=rank)  # for warnings about the config
    parser = argparse.ArgumentParser(prog="kubetune.worker", description="One rank of a run.")
    add_run_arguments(parser)
    config = config_from_args(parse(parser, argv), os.environ)
    if config.output is None:
        raise errors.ConfigError(
            "under torchrun every rank must know the run directory: set output=DIR"
        )

    run_dir = Path(config.output)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    plan = make_plan(config, gpus=visible_gpus(os.environ), world_size=world_size)
    config = settled(config, run_dir, plan)
    if rank == 0:
        check_run_dir(config, run_dir)
        create_run_dir(config, run_dir)
    _log_to_run(config.logging.level, run_dir, rank)
    return config, run_dir


def _log_to_run(level: str, run_dir: Path, rank: int) -> None:
    """Write log lines to the run directory from now on."""
    logs.configure(level, run_dir, rank, brief=is_brief(level))
