"""`kubetune train`: fine-tune on this machine. It prints what the run will do before it starts."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from kubetune.base.signals import Relay
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.errors import OK
from kubetune.supervisor.command_line import add_run_arguments, sources_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run_arguments(parser)
    parser.add_argument(
        "--on-event",
        metavar="COMMAND",
        help="command to run for each event; it gets the event as JSON on standard input (hooks.on_event)",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show every log line on a terminal, as a pipe does",
    )
    add_json(parser, "how the run ended as JSON, and everything else on standard error")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Train to the end, or to a stop. Mistakes of the config raise before any step."""
    exit_code, run_dir = _train(args)
    # The log has shown the rest: without --json nothing more is read or printed.
    facts = None
    if args.json:
        facts = _facts(run_dir, exit_code)
    return Answer(facts, lambda: None, exit_code)


def _facts(run_dir: Path, exit_code: int) -> dict[str, Any]:
    """Return how a run ended."""
    from kubetune.rundir import exit_status, metrics
    from kubetune.rundir.report import read_report

    reason = None
    step = None
    status = exit_status.read_exit_status(run_dir)
    if status is not None:
        reason = status.reason
        step = status.step
    report = None
    if (run_dir / metrics.REPORT).is_file():
        report = read_report(run_dir)
    return {
        "run_dir": str(run_dir),
        "exit_code": exit_code,
        "reason": reason,
        "step": step,
        "report": report,
    }


def _train(args: argparse.Namespace) -> tuple[int, Path]:
    """Train. Return the exit code and the run directory."""
    with Relay() as relay:
        # Imports take seconds, in which the relay must already hear SIGTERM.
        from kubetune.base.terminal import VERBOSE, is_brief
        from kubetune.base.yaml_reader import read_file
        from kubetune.cli.prepare.plan import show_notes
        from kubetune.cli.program import next_steps
        from kubetune.cli.tables import print_fact
        from kubetune.config.load import load_config
        from kubetune.library.plan_text import describe, opening
        from kubetune.library.plans import plan_here
        from kubetune.library.verdict.run_problems import warnings_of
        from kubetune.rundir.exit_status import DONE, read_exit_status
        from kubetune.supervisor.launch import launch_run

        # The file is read once: its text, with its comments, is kept in the run directory.
        show_notes()
        path, settings = sources_of(args, os.environ)
        file = None
        text = None
        if path is not None:
            file = read_file(path)
            text = file.text
        config = load_config(file, **settings)
        if args.on_event is not None:
            hooks = config.hooks.model_copy(update={"on_event": args.on_event})
            config = config.model_copy(update={"hooks": hooks})

        # What the run will do. How many tokens there are is known only when the data are prepared.
        with busy("judging the run"):
            config, plan = plan_here(config)
            warnings = warnings_of(config, os.environ)
        run_dir = Path(str(config.output))
        if args.verbose:
            os.environ[VERBOSE] = "1"
        if is_brief(config.logging.level):
            facts = list(opening(config, plan))
        else:
            facts = [fact for fact in describe(config, plan, None) if fact[0] != "tokens"]
        for label, fact in (*facts, *(("", f"warning: {text}") for text in warnings)):
            print_fact(label, fact, 17)
        sys.stdout.flush()

        exit_code = launch_run(config, plan, run_dir, source=text, relay=relay)
        # What went wrong in a run that came to its end is the last line of its log, with what to do about it.
        status = read_exit_status(run_dir)
        if exit_code == OK and (status is None or status.reason == DONE):
            print(next_steps(run_dir, config.task), flush=True)
        return exit_code, run_dir
