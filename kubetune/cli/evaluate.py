"""`kubetune evaluate`: the evaluation of a run's checkpoint, on its own evaluation data or on other data."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kubetune import errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--data", help="data to evaluate on instead of the run's own")
    parser.add_argument("--checkpoint", default="best", help="best, last or a step (default best)")
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="where to write what a classifier says of each row, as JSON lines (default RUN_DIR/predictions.jsonl)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print every metric of the task."""
    from kubetune.evaluate import evaluate_run

    found = evaluate_run(args.run_dir, args.checkpoint, args.data, args.predictions)
    if found.predictions is not None:
        print(f"predictions: {found.predictions}", file=sys.stderr)
    if args.json:
        matrix = {"confusion": found.confusion, "names": found.names} if found.confusion else {}
        print(json.dumps(found.metrics | matrix))
        return errors.OK
    for name, value in found.metrics.items():
        print(f"{name:<26} {value:.6g}")
    if found.confusion:
        print("\n".join(["", *confusion_lines(found.confusion, found.names)]))
    return errors.OK


def confusion_lines(counts: list[list[int]], names: Sequence[str]) -> list[str]:
    """A confusion matrix as lines: true classes down, predicted ones across."""
    width = max(len(text) for text in (*names, *(str(n) for row in counts for n in row))) + 2
    title = "true \\ predicted"
    first = max(len(title), *(len(name) for name in names))
    rows = zip((title, *names), [names, *counts], strict=True)
    return [f"{name:<{first}}" + "".join(f"{cell:>{width}}" for cell in row) for name, row in rows]
