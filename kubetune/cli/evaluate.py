"""`kubetune evaluate`: the evaluation of a run's checkpoint, on its own evaluation data or on other data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kubetune import errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--data", help="data to evaluate on instead of the run's own")
    parser.add_argument("--checkpoint", default="best", help="best, last or a step (default best)")
    parser.add_argument(
        "--predictions", type=Path, metavar="FILE", help="write what a classifier says of each row here, as JSON lines"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print every metric of the task."""
    from kubetune.evaluate import evaluate_run

    values = evaluate_run(args.run_dir, args.checkpoint, args.data, args.predictions)
    if args.json:
        print(json.dumps(values))
    else:
        for name, value in values.items():
            print(f"{name:<22} {value:.6g}")
    return errors.OK
