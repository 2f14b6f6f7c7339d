"""`kubetune train`: fine-tune on this machine, with everything it takes said before it starts."""

from __future__ import annotations

import argparse
import json
import os
from datetime import datetime
from pathlib import Path

from kubetune.base.gpus import visible_gpus
from kubetune.base.humanize import counted
from kubetune.base.processes import output_on_stderr
from kubetune.base.signals import Relay
from kubetune.cli.local.watch import next_steps
from kubetune.cli.prepare.plan import describe, show_notes
from kubetune.config.flags import add_run_arguments, config_from_args, run_file
from kubetune.config.naming import default_output
from kubetune.config.schema import Config
from kubetune.data.inspect.estimate import estimate_rows
from kubetune.data.reading.hub import check_model_folder
from kubetune.errors import OK, EnvironmentFault
from kubetune.planning.base_model import require_kind
from kubetune.planning.plan import make_plan
from kubetune.rundir import exit_status, metrics
from kubetune.supervisor.local import launch_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="print how it ended as JSON, and everything else on standard error"
    )


def run(args: argparse.Namespace) -> int:
    """Train to the end, or to a stop; returns the exit code. Mistakes of the config raise before anything starts."""
    if not args.json:
        return _train(args)[0]
    with output_on_stderr():
        code, run_dir = _train(args)
    status = exit_status.read_exit_status(run_dir)
    facts = {
        "run_dir": str(run_dir),
        "exit_code": code,
        "reason": status.reason if status else None,
        "step": status.step if status else None,
        "report": metrics.read_report(run_dir) if (run_dir / metrics.REPORT).is_file() else None,
    }
    print(json.dumps(facts, indent=2))
    return code


def _train(args: argparse.Namespace) -> tuple[int, Path]:
    """The exit code, and the run directory."""
    show_notes()
    with Relay() as relay:
        config = config_from_args(args, os.environ)
        check_model_folder(config.model)
        require_kind(config, os.environ)
        _require_place_for_report(config)
        run_dir = Path(config.output) if config.output else _new_run_dir(config)
        config = config.model_copy(update={"output": str(run_dir)})
        rows, eval_rows = estimate_rows(config)
        gpus = visible_gpus(os.environ)
        plan = make_plan(config, rows, eval_rows, gpus)
        if plan.device == "cuda" and plan.processes_per_node > gpus:
            fewer = f"compute.gpus_per_node={gpus}, or " if gpus else ""
            raise EnvironmentFault(
                f"the run wants {counted(plan.processes_per_node, 'GPU')} on this machine, which has {gpus}; set "
                f"{fewer}compute.gpus_per_node=0 and compute.processes to train on the CPU"
            )
        for label, text in describe(config, plan, None):
            if label != "tokens":
                print(f"{label:<17} {text}", flush=True)
        code = launch_run(config, plan, run_dir, source=run_file(args), relay=relay)
        if code == OK:
            print(next_steps(run_dir, config.task), flush=True)
        return code, run_dir


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


def _new_run_dir(config: Config) -> Path:
    """The default run directory, numbered when another run began there in the same minute."""
    first = Path(default_output(config, datetime.now()))
    return next(path for n in range(1, 1000) if not (path := first if n == 1 else Path(f"{first}-{n}")).exists())
