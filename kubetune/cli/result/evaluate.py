"""`kubetune evaluate`: the evaluation of a run's checkpoint, on its own evaluation data or on other data."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size

from kubetune import errors
from kubetune.cli.result.export import add_base

TITLE = "true \\ predicted"
MIX_UPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="data to evaluate on instead of the run's own: a path, or what a run file may have as data.train, such as "
        "'{path: glue/sst2, split: validation}'",
    )
    parser.add_argument("--checkpoint", default="best", help="best, last or a step (default best)")
    add_base(parser)
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="where to write what a classifier says of each row, as JSON lines (default RUN_DIR/predictions.jsonl)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print every metric of the task."""
    from kubetune.models import fast_import

    with fast_import.sparingly():
        from kubetune.inference.evaluate import evaluate_run
    found = evaluate_run(args.run_dir, args.checkpoint, args.data, args.predictions, model=args.model)
    if found.predictions is not None:
        print(f"predictions: {found.predictions}", file=sys.stderr)
    if args.json:
        matrix = {"confusion": found.confusion, "names": found.names} if found.confusion else {}
        print(json.dumps(found.metrics | matrix))
        return errors.OK
    for name, value in found.metrics.items():
        print(f"{name:<26} {value:.6g}")
    if found.confusion:
        print("\n".join(["", *confusion_lines(found.confusion, found.names, get_terminal_size((120, 0)).columns)]))
    return errors.OK


def confusion_lines(counts: list[list[int]], names: Sequence[str], columns: int) -> list[str]:
    """A confusion matrix as lines: true classes down, predicted ones across.

    Where the names are too wide for so many columns, numbers head the table; where these are, the classes that are
    taken for others most often are listed.
    """
    numbers = [str(number) for number in range(len(names))]
    numbered = [f"{number} {name}" for number, name in zip(numbers, names, strict=True)]
    for classes, heads in ((names, names), (numbered, numbers)):
        width = max(len(text) for text in (*heads, *(str(n) for row in counts for n in row))) + 2
        first = max(len(TITLE), *(len(name) for name in classes))
        if first + width * len(names) <= columns:
            rows = zip((TITLE, *classes), [heads, *counts], strict=True)
            return [f"{name:<{first}}" + "".join(f"{cell:>{width}}" for cell in row) for name, row in rows]
    return mix_up_lines(counts, names)


def mix_up_lines(counts: list[list[int]], names: Sequence[str]) -> list[str]:
    """Pairs of classes that are taken for one another most often."""
    classes = range(len(names))
    pairs = sorted((-counts[i][j], i, j) for i in classes for j in classes if i != j and counts[i][j])
    shown = [("true", "predicted", "rows"), *((names[i], names[j], f"{-n:,}") for n, i, j in pairs[:MIX_UPS])]
    first, second, _ = (max(map(len, column)) + 2 for column in zip(*shown, strict=True))
    more = f", {MIX_UPS} of {len(pairs):,}" if len(pairs) > MIX_UPS else ""
    title = f"Classes taken for another most often{more} (--json prints the whole matrix of {len(names)} classes)"
    return [title, *(f"{true:<{first}}{said:<{second}}{n:>6}" for true, said, n in shown)]
