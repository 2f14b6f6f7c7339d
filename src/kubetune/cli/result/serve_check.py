"""`kubetune serve --check`: ask a server whether it serves what was trained."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base.humanize import visible
from kubetune.base.logs import scrub
from kubetune.base.signals import stoppable
from kubetune.base.terminal import GREEN, RED, YELLOW, coloured
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, prints_json
from kubetune.cli.tables import print_fact
from kubetune.config.vllm import require_address
from kubetune.errors import OK, ConfigError, GateFailed
from kubetune.plugins.serving.served_targets import split_name

if TYPE_CHECKING:
    from kubetune.result.served.known_model import KnownModel
    from kubetune.result.served.points import ServerCheck

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
        if seconds is not None and not 0 < seconds < math.inf:
            raise ConfigError(f"--{option} is {seconds:g}; expected more than 0")
    require_address(args.check)
    if args.model and len(args.targets) > 1:
        raise ConfigError(
            "--model names one model, and there are several: put NAME= in front of each"
        )
    if args.watch is None:
        return _check(args)
    _watch(args)
    return OK


def _known(args: argparse.Namespace) -> list[tuple[str | None, KnownModel]]:
    """Return what is known of each target, with the name that requests ask for; None: the run's."""
    from kubetune.result.served.known_model import known_model

    models = []
    for word in args.targets:
        name, path = split_name(word)
        models.append((args.model or name or None, known_model(Path(path))))
    return models


def _watch(args: argparse.Namespace) -> None:
    """Check for ever, and print a line where something has changed."""
    from kubetune.result.served.server_watch import Watched, allowed_hooks, watch

    models = []
    for name, known in _known(args):
        hooks = allowed_hooks(known, args.trust_code)
        models.append(Watched(known, args.check, name, args.timeout, hooks))
    text = f"kubetune: asking {visible(args.check)} every {args.watch:g} s; what changes is printed"
    print(text, file=sys.stderr)
    with stoppable():
        for event in watch(models, args.watch):
            state = "is the model again" if event["ok"] else event["reason"]
            text = json.dumps(event) if args.json else f"{event['time']} {event['model']}: {state}"
            print(visible(scrub(text)), flush=True)


@prints_json
def _check(args: argparse.Namespace) -> Answer:
    """Check each target at the address. The exit code is that of a gate where one of them is not proved."""
    with busy(f"asking {visible(args.check)}"):
        from kubetune.result.served.server_check import check_served

        checks = []
        for name, known in _known(args):
            checks.append(check_served(known, args.check, name, args.timeout))
    reasons = [check.reason_against for check in checks if check.reason_against]
    error = GateFailed("\n".join(reasons)) if reasons else None
    return Answer([check.to_json() for check in checks], lambda: _show(checks), error=error)


def _show(checks: Sequence[ServerCheck]) -> None:
    """Print each point, with the first places at which ids differ."""
    for check in checks:
        print(visible(f"{check.model} at {check.url}"))
        for name, point in check.points.items():
            print_fact(name, f"{point.state}: {point.text}", _LABEL_WIDTH, _COLOURS[point.state])
            for place in point.differences:
                _show_ids("training", place.before, place.expected, GREEN)
                _show_ids("server", place.before, place.served, RED)
            for line in point.lines:
                print_fact("", line, _LABEL_WIDTH)


def _show_ids(who: str, before: str, text: str, colour: int) -> None:
    """Print the texts around a difference on one line, the difference in colour."""
    shown_before, shown = (visible(scrub(part).replace("\n", "\\n")) for part in (before, text))
    print(f"{'':<{_LABEL_WIDTH}} {who:<8} {shown_before}⟨{coloured(shown, colour)}⟩")
