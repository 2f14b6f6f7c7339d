"""`kubetune sweep`: search for the best settings, by many runs here or on a cluster."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base.locks import holder, lock
from kubetune.base.signals import Relay
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.tables import print_table
from kubetune.config.schema import Config, DataConfig, TrainingConfig
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.extras import require
from kubetune.supervisor.command_line import add_run_arguments, sources_of

if TYPE_CHECKING:
    from kubetune.library.sweep.sweep_record import Record, Search, Trial
    from kubetune.library.sweep.trial_configs import Load

# Words that take the place of the run file.
ACTIONS = ("status", "best", "stop")

_TRIALS = 20  # if neither --trials nor a budget nor a grid limits the search


# Printed below the options.
_RANGES = (
    "ranges:\n"
    "  KEY=log(1e-5,1e-3)   between two numbers, evenly on a logarithmic scale\n"
    "  KEY=0.2..0.8         between two numbers; whole ones if KEY takes only those\n"
    "  KEY=8,16,32          one of these\n\n"
    "`kubetune sweep status FOLDER` shows the state of a sweep, `sweep best FOLDER`\n"
    "prints the best run file, and `sweep stop FOLDER` stops the sweep. To continue\n"
    "a sweep that was stopped or killed, repeat the command that started it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run_arguments(parser)
    search = parser.add_argument_group("search")
    search.add_argument(
        "--metric", metavar="NAME", help="metric of evaluations (default: metric_for_best_model)"
    )
    search.add_argument(
        "--direction", choices=("minimize", "maximize"), help="default: by the metric's name"
    )
    search.add_argument(
        "--trials", type=int, metavar="N", help=f"settings to try (default {_TRIALS}; grid: all)"
    )
    search.add_argument(
        "--budget",
        action="append",
        default=[],
        metavar="AMOUNT",
        help="12gpu-hours, 3h or 200money; may be repeated",
    )
    search.add_argument(
        "--sampler", choices=("random", "grid", "tpe"), default="random", help="default random"
    )
    search.add_argument(
        "--pruner",
        choices=("none", "median", "asha", "hyperband"),
        default="none",
        help="how weaker trials are stopped early",
    )
    search.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="train each setting with N seeds"
    )
    search.add_argument(
        "--parallel",
        type=int,
        metavar="N",
        help="runs at once (default: as many as there are GPUs)",
    )
    search.add_argument(
        "--search-seed",
        type=int,
        default=0,
        metavar="N",
        help="seed that decides which values are tried",
    )
    search.add_argument(
        "--cluster", action="store_true", help="run trials on the cluster of the kubeconfig"
    )
    search.add_argument(
        "-o", "--folder", type=Path, metavar="FOLDER", help="default outputs/sweep-NAME"
    )
    add_json(search, "JSON, with status and best")
    parser.epilog = _RANGES


def run(args: argparse.Namespace) -> int:
    """Search, or do what `status`, `best` and `stop` ask for. Raise ConfigError before anything begins."""
    if args.inputs and args.inputs[0] in ACTIONS:
        action, *folders = args.inputs
        if len(folders) != 1:
            raise ConfigError(
                f"command line: expected `kubetune sweep {action} FOLDER`, the folder of one sweep"
            )
        _require_alone(action, args)
        args.folder = Path(folders[0])
        return {"status": _status, "best": _best, "stop": _stop}[action](args)
    return _search(args)


def _require_alone(action: str, args: argparse.Namespace) -> None:
    """Raise ConfigError for options that an action would ignore."""
    allowed = ["inputs", "json"]
    takes = "a folder and --json only"
    if action == "stop":
        allowed = ["inputs"]
        takes = "a folder only"

    # An option that has another value than its default was typed.
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    ignored = []
    for option in parser._actions:
        value = getattr(args, option.dest, option.default)
        if option.dest not in allowed and value != option.default:
            ignored.append(option.option_strings[-1])
    if ignored:
        raise ConfigError(
            f"command line: {', '.join(sorted(ignored))}: `kubetune sweep {action}` takes {takes}"
        )


def _search(args: argparse.Namespace) -> int:
    """Search to the end, or until a stop. Return the exit code."""
    if args.json:
        raise ConfigError(
            "command line: --json is for `kubetune sweep status` and `best`. Nothing was written."
        )
    if args.output is not None:
        raise ConfigError(
            "command line: --output is the directory of one run; -o FOLDER says where all trials go"
        )
    from kubetune.config.load import read_tree
    from kubetune.library.sweep import ranges as texts
    from kubetune.library.sweep.budget import parse as parse_budgets

    for name in ("trials", "repeat", "parallel"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise ConfigError(
                f"command line: found --{name} {number}; expected 1 or more. Nothing was written."
            )

    # Ranges are taken out of the words; what is left is as `kubetune train` takes it.
    flags = [key for key, value in vars(args).items() if "." in key and value is not None]
    args.inputs, ranges, problems = texts.split(args.inputs, flags)
    path, settings = sources_of(args, {} if args.cluster else os.environ)
    if args.metric:
        settings["overrides"].append(f"training.metric_for_best_model={args.metric}")
    if not ranges and not problems:
        raise ConfigError(
            "command line: found nothing to search; expected KEY=log(a,b), KEY=a..b or KEY=a,b,c. Nothing was written."
        )

    config = texts.check(ranges, _loader(path, settings), problems)
    # Trials start over hours, in which somebody may edit the run file: all of them use it as it is now.
    load = _loader(read_tree(path, **settings)[0].data, settings)
    budgets = parse_budgets(args.budget, config.compute.price_per_gpu_hour)
    metric, greater = _metric(args.direction, config.data, config.training)
    _limit_trials(args, ranges)
    name = config.name or (path.stem if path is not None else "run")
    folder = args.folder or Path("outputs") / f"sweep-{name}"

    require("a search", "optuna", after=". Nothing was written.")
    from kubetune.library.sweep.start import sweep
    from kubetune.library.sweep.wishes import Wishes

    wishes = Wishes(
        ranges=tuple(ranges),
        metric=metric,
        greater=greater,
        sampler=args.sampler,
        pruner=args.pruner,
        repeat=args.repeat,
        seed=args.search_seed,
        trials=args.trials,
        parallel=args.parallel,
        budgets=tuple(budgets),
        on_cluster=args.cluster,
    )
    with Relay() as relay:
        return sweep(folder, name, load, config, wishes, relay)


def _loader(source: Path | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Load:
    """Return a function that makes the config of the command line with more overrides."""
    from kubetune.config.load import load_config

    def load(more: list[str]) -> Config:
        overrides = [*settings["overrides"], *more]
        return load_config(source, **{**settings, "overrides": overrides})

    return load


def _metric(direction: str | None, data: DataConfig, training: TrainingConfig) -> tuple[str, bool]:
    """Return the metric's whole name, and True if more of it is better."""
    if data.eval is None:
        raise ConfigError(
            "data.eval: missing; trials are compared by their evaluations: set data.eval=0.05, or a file"
        )
    greater = direction == "maximize"
    if direction is None:
        greater = training.prefers_greater
    return training.metric_for_best_model, greater


def _limit_trials(args: argparse.Namespace, ranges: Sequence[Any]) -> None:
    """Set args.trials: as many as were asked for, and no more than there are settings."""
    # A grid has every value of every range.
    if args.sampler == "grid":
        problems = []
        for value_range in ranges:
            if value_range.kind == "float":
                problems.append(
                    f"--sampler grid: {value_range.key}={value_range} holds endless values; name those to try: KEY=a,b,c"
                )
        if problems:
            raise ConfigError(problems)
    from kubetune.library.sweep.ranges import ENDLESS, settings_in

    wanted = args.trials
    if not wanted:
        is_limited_otherwise = args.budget or args.sampler == "grid"
        wanted = ENDLESS if is_limited_otherwise else _TRIALS
    settings = settings_in(ranges)
    if settings is not None:
        wanted = min(wanted, settings)
    args.trials = wanted


@prints_json
def _status(args: argparse.Namespace) -> Answer:
    """Show all trials, and the state of the sweep as a whole."""
    from kubetune.library.sweep.sweep_record import read_record, read_search

    search = read_search(args.folder)
    record = read_record(args.folder)
    return Answer(_facts(search, record), lambda: _show_status(args.folder, search, record))


def _show_status(folder: Path, search: Search, record: Record) -> None:
    """Print a table of the trials, and below it why nothing goes on, if so."""
    from kubetune.library.sweep.sweep_list import sweep_state
    from kubetune.library.sweep.sweep_record import summary

    # A trial's row has the best value so far, and the settings as they were typed.
    head = ("TRIAL", "STATE", "STEP", search.metric.upper(), "VALUES", "WHY")
    print_table(head, [_row(trial) for trial in record.trials])

    line = f"{summary(record)}; {record.device_hours:.3g} device hours with the start of each trial"
    _, why = sweep_state(folder, record, search)
    if why:
        line += f"; {why}"
    print(line)


def _row(trial: Trial) -> tuple[object, ...]:
    """Return the line of a trial in the table."""
    from kubetune.library.sweep.ranges import short_text
    from kubetune.library.sweep.sweep_record import state_of

    value = ""
    if trial.value is not None:
        value = f"{trial.value:.5g}"
        if trial.spread is not None:
            value += f" ± {trial.spread:.3g}"
    reason = trial.reason.partition("\n")[0]
    settings = short_text(trial.values)
    return trial.number, state_of(trial), trial.progress, value, settings, reason


def _facts(search: Search, record: Record) -> dict[str, Any]:
    """Return what `--json` prints of a sweep."""
    best = None
    ranked = record.ranked(greater=search.greater)
    if ranked:
        best = asdict(ranked[0])
    return {
        **asdict(record),
        "metric": search.metric,
        "device_hours": record.device_hours,
        "best": best,
    }


@prints_json
def _best(args: argparse.Namespace) -> Answer:
    """Show the run file of the best trial."""
    from kubetune.library.sweep.sweep_record import BEST, read_record, read_search
    from kubetune.library.sweep.winner import best_of

    # The driver writes the file whenever there is a new best trial.
    run_file = args.folder / BEST
    best = best_of(read_record(args.folder), read_search(args.folder))

    def show() -> None:
        if not run_file.is_file():
            raise EnvironmentFault(
                f"{run_file} is missing; the command that began the sweep writes it again"
            )
        print(run_file.read_text("utf-8"), end="")

    return Answer(asdict(best), show)


def _stop(args: argparse.Namespace) -> int:
    """Ask the driver to stop. Without one on this machine, stop the trials on the cluster."""
    from kubetune.library.sweep.sweep_record import (
        LOCK,
        at_rest,
        read_record,
        read_search,
        write_record,
    )

    folder = args.folder
    search = read_search(folder)
    stopped = []
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / LOCK, wait=False))
        except EnvironmentFault:
            # Another process holds the lock: the driver, which stops its runs itself.
            driver = holder(folder / LOCK)
            if driver is None:
                raise
            driver.send_signal(signal.SIGTERM)
            print(
                f"kubetune: the driver of {folder} was asked to stop; its runs save a checkpoint first"
            )
            return errors.OK
        # No driver runs on this machine; the trials on a cluster may.
        if search.namespace is not None:
            from kubetune.library.sweep.trials_there import stop_all

            stopped = stop_all(search.namespace, search.name)
        write_record(folder, at_rest(read_record(folder)))
    names = "".join(f"; stopped {name}" for name in stopped)
    print(f"kubetune: {folder} has no driver that runs here{names}")
    return errors.OK
