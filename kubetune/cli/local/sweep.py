"""`kubetune sweep`: find the settings that serve best, by many runs here or on a cluster."""

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
from kubetune.base import processes
from kubetune.base.files import holder, lock, locker
from kubetune.base.signals import Relay
from kubetune.cli.json_answers import print_json
from kubetune.cli.tables import print_table
from kubetune.config.naming import prefers_greater
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.extras import require
from kubetune.supervisor.command_line import add_run_arguments, sources_of

if TYPE_CHECKING:
    from kubetune.config.schema import Config
    from kubetune.library.sweep.recipe import Load
    from kubetune.library.sweep.record import Record, Search

ACTIONS = ("status", "best", "stop")
_TRIALS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
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
        help="who gives up losers early",
    )
    search.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="train each setting with so many seeds"
    )
    search.add_argument(
        "--parallel",
        type=int,
        metavar="N",
        help="runs at once (default: as many as there are GPUs)",
    )
    search.add_argument(
        "--search-seed", type=int, default=0, metavar="N", help="decides the values that are tried"
    )
    search.add_argument(
        "--cluster", action="store_true", help="trials as runs on the cluster of the kubeconfig"
    )
    search.add_argument(
        "-o", "--folder", type=Path, metavar="FOLDER", help="default outputs/sweep-NAME"
    )
    search.add_argument("--json", action="store_true", help="with status and best: print JSON")
    parser.epilog = (
        "ranges:\n"
        "  KEY=log(1e-5,1e-3)   between two numbers, evenly on a logarithmic scale\n"
        "  KEY=0.2..0.8         between two numbers; whole ones where KEY takes such only\n"
        "  KEY=8,16,32          one of these\n\n"
        "`kubetune sweep status|best|stop FOLDER` shows how a sweep stands, prints the\n"
        "best run file, or stops it; the same command goes on with one that was stopped\nor killed."
    )


def run(args: argparse.Namespace) -> int:
    """Search, or do what `status`, `best` and `stop` say. Raises ConfigError before anything is begun."""
    if args.inputs and args.inputs[0] in ACTIONS:
        action, *folders = args.inputs
        if len(folders) != 1:
            raise ConfigError(
                f"command line: expected `kubetune sweep {action} FOLDER`, the folder of one sweep"
            )
        _require_alone(action, args)
        return {"status": _status, "best": _best, "stop": _stop}[action](Path(folders[0]), args)
    return _search(args)


def _require_alone(action: str, args: argparse.Namespace) -> None:
    """Raise ConfigError for options that an action would ignore."""
    known, heeded = argparse.ArgumentParser(), ("inputs", *(["json"] if action != "stop" else []))
    add_arguments(known)
    given = {one.option_strings[-1] for one in known._actions if one.dest not in heeded
             and getattr(args, one.dest, one.default) != one.default}  # fmt: skip
    if given:
        raise ConfigError(
            f"command line: {', '.join(sorted(given))} says nothing to `kubetune sweep {action}`, which takes a folder"
            f"{' and --json' if 'json' in heeded else ''} only"
        )


def _search(args: argparse.Namespace) -> int:
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

    for name, least in (("trials", 1), ("repeat", 1), ("parallel", 1)):
        if (given := getattr(args, name)) is not None and given < least:
            raise ConfigError(
                f"command line: found --{name} {given}; expected {least} or more. Nothing was written."
            )
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
    # Trials begin for hours, in which the run file may be edited: they are of it as it is now.
    load = _loader(read_tree(path, **settings)[0].data, settings)
    budgets = parse_budgets(args.budget, config.compute.price_per_gpu_hour)
    metric, greater = _metric(args, config)
    _limit_trials(args, ranges)
    name = config.name or (path.stem if path is not None else "run")
    folder = args.folder or Path("outputs") / f"sweep-{name}"

    require("a search", "optuna", after=". Nothing was written.")
    from kubetune.library.sweep.start import Wishes, sweep

    wishes = Wishes(
        ranges=tuple(ranges), metric=metric, greater=greater, sampler=args.sampler, pruner=args.pruner,
        repeat=args.repeat, seed=args.search_seed, trials=args.trials, parallel=args.parallel, budgets=tuple(budgets),
        on_cluster=args.cluster,
    )  # fmt: skip
    with Relay() as relay:
        return sweep(folder, name, load, config, wishes, relay)


def _loader(source: Path | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Load:
    from kubetune.config.load import load_config

    return lambda more: load_config(
        source, **{**settings, "overrides": [*settings["overrides"], *more]}
    )


def _metric(args: argparse.Namespace, config: Config) -> tuple[str, bool]:
    """The metric's whole name, and whether more of it is better."""
    if config.data.eval is None:
        raise ConfigError(
            "data.eval: missing; trials are compared by their evaluations: set data.eval=0.05, or a file"
        )
    training = config.training
    greater = prefers_greater(training) if args.direction is None else args.direction == "maximize"
    return training.metric_for_best_model, greater


def _limit_trials(args: argparse.Namespace, ranges: Sequence[Any]) -> None:
    endless = [one for one in ranges if one.kind == "float"]
    if args.sampler == "grid" and endless:
        raise ConfigError(
            [
                f"--sampler grid: {one.key}={one} has no end of values; write those to try: KEY=a,b,c"
                for one in endless
            ]
        )
    from kubetune.library.sweep.ranges import ENDLESS, settings_in

    settings = settings_in(ranges)
    wished = args.trials or (ENDLESS if args.budget or args.sampler == "grid" else _TRIALS)
    args.trials = min(wished, settings or wished)


def _status(folder: Path, args: argparse.Namespace) -> int:
    from kubetune.library.sweep.ranges import told
    from kubetune.library.sweep.record import LOCK, read_record, read_search, state_of, summary

    search, record = read_search(folder), read_record(folder)
    if args.json:
        print_json(_facts(search, record))
        return errors.OK
    rows = []
    for trial in record.trials:
        value = "" if trial.value is None else f"{trial.value:.5g}"
        spread = "" if trial.value is None or trial.spread is None else f"± {trial.spread:.3g}"
        steps = (
            f"{max(run.step for run in trial.runs)}/{max(run.steps for run in trial.runs) or '?'}"
        )
        state = state_of(trial)
        rows.append(
            (
                trial.number,
                state,
                steps,
                f"{value} {spread}".strip(),
                told(trial.values),
                trial.reason.partition("\n")[0],
            )
        )
    print_table(("TRIAL", "STATE", "STEP", search.metric.upper(), "VALUES", "WHY"), rows)
    reason = record.reason
    if not reason and (driver := locker(folder / LOCK)) and not processes.is_alive(driver):
        reason = "its driver ended; the same command goes on" if any(record.running) else ""
    print(
        f"{summary(record)}; {record.device_hours:.3g} device hours{f'; {reason}' if reason else ''}"
    )
    return errors.OK


def _facts(search: Search, record: Record) -> dict[str, Any]:
    ranked = record.ranked(greater=search.greater)
    return {
        **asdict(record),
        "metric": search.metric,
        "device_hours": record.device_hours,
        "best": asdict(ranked[0]) if ranked else None,
    }


def _best(folder: Path, args: argparse.Namespace) -> int:
    from kubetune.library.sweep.record import BEST, read_record, read_search
    from kubetune.library.sweep.winner import best_of

    search, record = read_search(folder), read_record(folder)
    best = best_of(record, search)
    if args.json:
        print_json(asdict(best))
    elif (folder / BEST).is_file():
        print((folder / BEST).read_text("utf-8"), end="")
    else:
        raise EnvironmentFault(
            f"{folder / BEST} is gone; the command that began the sweep writes it again"
        )
    return errors.OK


def _stop(folder: Path, args: argparse.Namespace) -> int:
    from kubetune.library.sweep.record import LOCK, at_rest, read_record, read_search, write_record

    search = read_search(folder)
    with ExitStack() as held:
        try:
            held.enter_context(lock(folder / LOCK, wait=False))
        except EnvironmentFault:
            if (driver := holder(folder / LOCK)) is None:
                raise
            driver.send_signal(signal.SIGTERM)
            print(
                f"kubetune: the driver of {folder} was asked to stop; its runs save a checkpoint first"
            )
            return errors.OK
        stopped = _stop_on_cluster(search) if search.namespace is not None else []
        write_record(folder, at_rest(read_record(folder)))
    print(
        f"kubetune: {folder} has no driver that runs here"
        + "".join(f"; stopped {name}" for name in stopped)
    )
    return errors.OK


def _stop_on_cluster(search: Search) -> list[str]:
    from kubetune.library.connection import open_cluster
    from kubetune.library.sweep.remote import stop_all

    return stop_all(open_cluster(search.namespace), search.name)
