"""`kubetune train`: fine-tune on this machine, with everything it takes said before it starts."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kubetune.base.processes import output_on_stderr
from kubetune.base.signals import Relay
from kubetune.errors import OK
from kubetune.supervisor.command_line import add_run_arguments, sources_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--on-event",
        metavar="COMMAND",
        help="call it for each event, as JSON on its standard input (hooks.on_event)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print how it ended as JSON, and everything else on standard error",
    )


def run(args: argparse.Namespace) -> int:
    """Train to the end, or to a stop; returns the exit code. Mistakes of the config raise before any step."""
    if not args.json:
        return _train(args)[0]
    with output_on_stderr():
        code, run_dir = _train(args)
    from kubetune.cli.json_answers import print_json
    from kubetune.rundir import exit_status, metrics

    status = exit_status.read_exit_status(run_dir)
    facts = {
        "run_dir": str(run_dir),
        "exit_code": code,
        "reason": status.reason if status else None,
        "step": status.step if status else None,
        "report": metrics.read_report(run_dir) if (run_dir / metrics.REPORT).is_file() else None,
    }
    print_json(facts)
    return code


def _train(args: argparse.Namespace) -> tuple[int, Path]:
    """The exit code, and the run directory."""
    with Relay() as relay:
        # Imported here, since SIGTERM is heard from the line above on.
        from kubetune.base.yaml_reader import read_file
        from kubetune.cli.local.watch import next_steps
        from kubetune.cli.prepare.plan import show_notes
        from kubetune.cli.tables import print_fact
        from kubetune.config.load import load_config
        from kubetune.library.plan_text import describe
        from kubetune.library.plans import plan_here
        from kubetune.supervisor.local import launch_run

        show_notes()
        path, settings = sources_of(args, os.environ)
        file = read_file(path) if path is not None else None
        config = load_config(file, **settings)
        if args.on_event is not None:
            hooks = config.hooks.model_copy(update={"on_event": args.on_event})
            config = config.model_copy(update={"hooks": hooks})
        config, plan = plan_here(config)
        run_dir = Path(str(config.output))
        for label, text in describe(config, plan, None):
            if label != "tokens":
                print_fact(label, text, 17)
        sys.stdout.flush()
        code = launch_run(
            config, plan, run_dir, source=file.text if file is not None else None, relay=relay
        )
        if code == OK:
            print(next_steps(run_dir, config.task), flush=True)
        return code, run_dir
