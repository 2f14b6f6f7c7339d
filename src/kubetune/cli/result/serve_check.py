"""`kubetune serve --check`: ask a server whether it serves what was trained."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base.humanize import visible
from kubetune.base.logs import scrub
from kubetune.base.signals import stoppable
from kubetune.base.terminal import GREEN, RED, YELLOW, coloured
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, prints_json
from kubetune.cli.tables import print_fact
from kubetune.errors import OK, ConfigError, GateFailed
from kubetune.plugins.serving.served_targets import split_name
from kubetune.rundir import metrics

if TYPE_CHECKING:
    from kubetune.result.served.finding import Report
    from kubetune.result.served.watch import Watched

# Seconds for all questions, also to a server that is still starting.
TIMEOUT = 300.0
OPTIONS = ("model", "timeout", "json", "watch")
_COLOURS = {"right": GREEN, "wrong": RED, "differs": YELLOW, "unknown": YELLOW}
_LABEL_WIDTH = 18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that only --check takes."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="with --check: what the server calls it; left out: the run's name",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"with --check: time for all questions, also to a server that is starting (default {TIMEOUT:g})",
    )
    parser.add_argument(
        "--watch",
        type=float,
        metavar="SECONDS",
        help="with --check: ask again and again, with so many seconds between; changes go to the run's hooks, numbers to "
        "Prometheus",
    )


def run(args: argparse.Namespace) -> int:
    """Check once, or for ever."""
    for option in ("timeout", "watch"):
        seconds = getattr(args, option)
        if seconds is not None and seconds <= 0:
            raise ConfigError(f"--{option} is {seconds:g}; expected more than 0")
    if not re.match("https?://.", args.check):
        raise ConfigError(
            f"--check is {args.check}; expected an address such as http://localhost:8000"
        )
    if args.model and len(args.targets) > 1:
        raise ConfigError(
            "--model names one model, and there are several: put NAME= in front of each"
        )
    if args.watch is None:
        return _check(args)
    _watch(args)
    return OK


def _watch(args: argparse.Namespace) -> None:
    """Check for ever, and print a line where something has changed."""
    from kubetune.library.results import check_server
    from kubetune.result.served.known_model import known_model
    from kubetune.result.served.watch import Watched, watch

    models = []
    for word in args.targets:
        name, path = split_name(word)
        known = known_model(Path(path))
        name = args.model or name
        ask = partial(check_server, path, args.check, name=name or None, timeout=args.timeout)
        models.append(Watched.of_run(name or known.name, ask, known.run_dir, args.trust_code))
    with stoppable():
        for _ in watch(models, args.watch):
            for model in models:
                if model.is_news:
                    _print_news(model, as_json=args.json)


def _print_news(model: Watched, *, as_json: bool) -> None:
    facts = {
        "time": metrics.now(),
        "model": model.name,
        "state": model.state,
        "reason": model.reason,
    }
    line = (
        f"{facts['time']} {model.name}: {model.state}{': ' if model.reason else ''}{model.reason}"
    )
    if as_json:
        line = json.dumps(facts)
    print(visible(scrub(line)), flush=True)


@prints_json
def _check(args: argparse.Namespace) -> Answer:
    """Check each target at the address. The exit code is that of a gate where one of them is not proved."""
    reports = []
    with busy(f"asking {visible(args.check)}"):
        from kubetune.library.results import check_server
        from kubetune.result.served.check import reason_against

        for word in args.targets:
            name, path = split_name(word)
            model = args.model or name or None
            reports.append(check_server(path, args.check, name=model, timeout=args.timeout))
    reasons = [reason for reason in map(reason_against, reports) if reason]
    error = GateFailed("\n".join(reasons)) if reasons else None
    facts = [report.to_json() for report in reports]
    return Answer(facts, lambda: _show(reports), error=error)


def _show(reports: Sequence[Report]) -> None:
    """Print each point, with the first places at which ids differ."""
    for report in reports:
        print(visible(f"{report.model} at {report.url}"))
        for finding in report.findings:
            colour = _COLOURS[finding.state]
            print_fact(finding.point, f"{finding.state}: {finding.text}", _LABEL_WIDTH, colour)
            for place in finding.places:
                line = f"{place.before}⟨{coloured(place.expected, GREEN)}⟩⟨{coloured(place.served, RED)}⟩"
                print_fact("", line, _LABEL_WIDTH)
            for line in finding.lines:
                print_fact("", line, _LABEL_WIDTH)
