"""`kubetune sync`: copy a run directory to an object store now, or fetch one from there."""

from __future__ import annotations

import argparse
import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.base import logs
from kubetune.base.humanize import shell_word
from kubetune.base.processes import output_on_stderr
from kubetune.cli.json_answers import print_json
from kubetune.config.load import read_config
from kubetune.config.naming import RESOLVED

if TYPE_CHECKING:
    from kubetune.rundir.mirror.sync import Mirror


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="RUN_DIR|ADDRESS",
        help="what to copy: a run directory, or s3://bucket/run",
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="ADDRESS|RUN_DIR",
        help="where to; left out: `mirror` of the run's config",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="how long to try again while it fails (default 10)",
    )
    parser.add_argument("--json", action="store_true", help="print what is there as JSON")


def run(args: argparse.Namespace) -> int:
    """Copy, and say how much there is."""
    with output_on_stderr() if args.json else nullcontext():
        mirror = _copied(args)
        sizes, steps = mirror.remote_files(), mirror.remote_steps()
    if args.json:
        facts = {
            "address": mirror.address,
            "files": len(sizes),
            "bytes": sum(sizes.values()),
            "steps": steps,
        }
        print_json(facts)
    else:
        print(
            f"{len(sizes)} files, {sum(sizes.values()):,} bytes at {mirror.address}; checkpoints {steps}"
        )
    return errors.OK


def _copied(args: argparse.Namespace) -> Mirror:
    """The copy, after it was sent or fetched."""
    from kubetune.rundir.mirror.copier import persistently
    from kubetune.rundir.mirror.sync import Mirror

    logs.configure("INFO")
    fetches = "://" in args.source
    if fetches and args.target is None:
        raise errors.ConfigError(
            f"kubetune sync {shell_word(args.source)}: give the folder to fetch it to. Nothing was written."
        )
    run_dir = Path(args.target if fetches else args.source)
    address = args.source if fetches else args.target or read_config(run_dir).mirror
    if not address or "://" not in address:
        raise errors.ConfigError(
            f"{run_dir}: its config has no `mirror`; say where to: kubetune sync {shell_word(run_dir)} s3://bucket/run"
        )
    mirror = Mirror(run_dir, re.sub(r"(?<![:/])/+$", "", address))
    if fetches:
        persistently(
            lambda: mirror.fetch(everything=True),
            args.minutes * 60,
            what=f"{address} cannot be read",
        )
        if not (run_dir / RESOLVED).is_file():
            raise errors.ConfigError(f"{address} holds no run. Nothing was written.")
    else:
        read_config(run_dir)  # refuses what is no run
        persistently(mirror.send, args.minutes * 60, what=f"{address} cannot be written to")
    return mirror
