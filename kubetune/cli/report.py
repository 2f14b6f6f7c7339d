"""`kubetune report`: a page on one run, or on several side by side, as one HTML file that needs no network."""

from __future__ import annotations

import argparse
from pathlib import Path

from kubetune.errors import OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--compare", type=Path, nargs="+", default=[], metavar="RUN_DIR", help="other runs to lay over it"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: report.html in RUN_DIR, or comparison.html here"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is. Raises ConfigError for a folder that is no run."""
    from kubetune.report import write_report

    default = Path("comparison.html") if args.compare else args.run_dir / "report.html"
    output = write_report([args.run_dir, *args.compare], args.output or default)
    print(f"wrote {output} ({output.stat().st_size / 1000:,.0f} kB); open it in a browser, no network is needed")
    return OK
