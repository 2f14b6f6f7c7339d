"""`kubetune serve --check`: ask a server whether it serves what was trained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kubetune.base.humanize import visible
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, prints_json
from kubetune.cli.tables import GREEN, RED, YELLOW, coloured, print_fact
from kubetune.errors import ConfigError, GateFailed
from kubetune.plugins.serving.served_targets import split_name

if TYPE_CHECKING:
    from kubetune.result.served.finding import Report

# Seconds for all questions, also to a server that is still starting.
TIMEOUT = 300.0
OPTIONS = ("model", "timeout", "json")
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


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Check each target at the address. The exit code is that of a gate where one of them is not proved."""
    if args.timeout <= 0:
        raise ConfigError(f"--timeout is {args.timeout:g}; expected more than 0")
    if args.model and len(args.targets) > 1:
        raise ConfigError(
            "--model names one model, and there are several: put NAME= in front of each"
        )
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
