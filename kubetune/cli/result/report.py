"""`kubetune report`: a page on one run, or on several side by side, as one HTML file that needs no network."""

from __future__ import annotations

import argparse
import os.path
from pathlib import Path

from kubetune.cli.json_answers import print_json
from kubetune.errors import OK, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        type=Path,
        nargs="?",
        metavar="RUN_DIR",
        help="run directory, or the folder of a sweep; left out where --compare names them",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN_DIR",
        help="runs to lay over it, or over each other",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: report.html in RUN_DIR, or comparison.html here",
    )
    parser.add_argument("--json", action="store_true", help="print where the page is as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is. Raises ConfigError for a folder that is no run."""
    from kubetune.library.sweep.record import SWEEP
    from kubetune.reporting import write_report

    runs = [*filter(None, (args.run_dir,)), *args.compare]
    if not runs:
        raise ConfigError(
            "report of which run? expected RUN_DIR, or --compare with several. Nothing was written."
        )
    if len(runs) == 1 and os.path.isfile(
        runs[0] / SWEEP
    ):  # not of what may not be read: said below
        from kubetune.library.sweep.page import write_page

        output = write_page(runs[0], args.output)
    else:
        output = write_report(
            runs,
            args.output or (Path("comparison.html") if len(runs) > 1 else runs[0] / "report.html"),
        )
    if args.json:
        facts = {
            "path": str(output),
            "bytes": output.stat().st_size,
            "runs": [str(run_dir) for run_dir in runs],
        }
        print_json(facts)
        return OK
    print(
        f"wrote {output} ({output.stat().st_size / 1000:,.0f} kB); open it in a browser, no network is needed"
    )
    return OK
