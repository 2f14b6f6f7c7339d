"""`kubetune report`: a page on one run, or on several side by side, as one HTML file that needs no network."""

from __future__ import annotations

import argparse
import os.path
from pathlib import Path

from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "run_dir",
        type=Path,
        nargs="?",
        metavar="RUN_DIR",
        help="run directory, or the folder of a sweep; left out if --compare names them",
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN_DIR",
        help="runs to show in the same charts, with the settings that differ",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: report.html in RUN_DIR, or comparison.html here",
    )
    add_json(parser, "where the page is as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Write the page and say where it is. Raise ConfigError for a folder that is no run."""
    from kubetune.library.sweep.sweep_record import SWEEP
    from kubetune.reporting import write_report

    runs = list(args.compare)
    if args.run_dir is not None:
        runs.insert(0, args.run_dir)
    if not runs:
        raise ConfigError(
            "report of which run? expected RUN_DIR, or --compare with several. Nothing was written."
        )
    if args.compare and len(runs) == 1:
        raise ConfigError(
            f"--compare lays runs over each other, and {runs[0]} is the only one; name another one, or leave out "
            "--compare for a page on it alone. Nothing was written."
        )
    # os.path.isfile, as Path.is_file raises for a folder that may not be read; write_report explains that.
    with busy("writing the page"):
        if len(runs) == 1 and os.path.isfile(runs[0] / SWEEP):
            from kubetune.library.sweep.live_page import write_page

            output = write_page(runs[0], args.output)
        else:
            default = runs[0] / "report.html"
            if len(runs) > 1:
                default = Path("comparison.html")
            output = write_report(runs, args.output or default)

    # The page is one file, which people send to each other.
    size = output.stat().st_size

    def show() -> None:
        print(f"wrote {output} ({size / 1000:,.0f} kB); open it in a browser, no network is needed")

    run_dirs = [str(run_dir) for run_dir in runs]
    return Answer({"path": str(output), "bytes": size, "runs": run_dirs}, show)
