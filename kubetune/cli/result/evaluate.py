"""`kubetune evaluate`: the evaluation of a run's checkpoint, on its own evaluation data or on other data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size

from kubetune import errors
from kubetune.base.humanize import shown_on
from kubetune.cli.json_answers import print_json
from kubetune.cli.result.export import add_result

TITLE = "true \\ predicted"
MIX_UPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.add_argument(
        "--data",
        metavar="DATA",
        help="data to evaluate on instead of the run's own: a path, or what a run file may have as data.train, such as "
        "'{path: glue/sst2, split: validation}'",
    )
    add_result(parser)
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="where to write what a classifier says of each row, as JSON lines (default RUN_DIR/predictions.jsonl)",
    )
    parser.add_argument(
        "--compare",
        metavar="RUN_DIR|base",
        help="compare the answers that evaluations left with those of another run, or of the model before training; "
        "nothing is evaluated anew",
    )
    parser.add_argument(
        "--benchmarks",
        metavar="TASK,…",
        help="tasks of lm-evaluation-harness, such as arc_easy, instead of own data",
    )
    parser.add_argument(
        "--with-base", action="store_true", help="benchmarks of the model before training, too"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="ask each benchmark's first N only")
    parser.add_argument(
        "--tasks-folder",
        type=Path,
        metavar="DIR",
        help="folder with more task files for benchmarks",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print every metric of the task, or a comparison, or benchmarks."""
    _require_one_question(args)
    if args.compare:
        return _compare(args)
    if args.benchmarks:
        return _benchmark(args)
    from kubetune.base import collector

    with collector.paused():
        from kubetune.result.inference.evaluate import evaluate_run
    found = evaluate_run(
        args.run_dir, args.checkpoint, args.data, args.predictions, model=args.model,
        trust_code=args.trust_code,
    )  # fmt: skip
    for line in found.remarks:
        print(shown_on(sys.stderr, line), file=sys.stderr)
    if found.predictions is not None:
        print(f"predictions: {found.predictions}", file=sys.stderr)
    if args.json:
        matrix = {"confusion": found.confusion, "names": found.names} if found.confusion else {}
        print_json(found.metrics | matrix, indent=None)
        return errors.OK
    for name, value in found.metrics.items():
        print(f"{name:<26} {value:.6g}")
    if found.confusion:
        print(
            "\n".join(
                [
                    "",
                    *confusion_lines(
                        found.confusion, found.names, get_terminal_size((120, 0)).columns
                    ),
                ]
            )
        )
    return errors.OK


def _require_one_question(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together; none is ignored."""
    given = [
        name for name in ("compare", "benchmarks", "data", "predictions") if getattr(args, name)
    ]
    if len(given) > 1 and given != ["data", "predictions"]:
        raise errors.ConfigError(
            f"--{given[0]} and --{given[1]} ask for different things; give one"
        )
    for name in ("with_base", "limit", "tasks_folder"):
        if getattr(args, name) and not args.benchmarks:
            raise errors.ConfigError(f"--{name.replace('_', '-')} is for --benchmarks")
    if args.limit is not None and args.limit < 1:
        raise errors.ConfigError(f"--limit: found {args.limit}; expected at least 1")


def _compare(args: argparse.Namespace) -> int:
    from kubetune.result.inference.compare import compare_runs, table

    found = compare_runs(args.run_dir, args.compare, args.checkpoint)
    if args.json:
        print_json([measured.facts() for measured in found], indent=None)
    else:
        print("\n".join(table(found, (Path(args.compare).name, args.run_dir.name))))
    return errors.OK


def _benchmark(args: argparse.Namespace) -> int:
    from kubetune.base.processes import output_on_stderr
    from kubetune.config.schema.evaluation import BenchmarksConfig
    from kubetune.result.inference.benchmarks import evaluate_benchmarks

    tasks = tuple(task for task in args.benchmarks.split(",") if task)
    folder = str(args.tasks_folder) if args.tasks_folder else None
    wanted = BenchmarksConfig(tasks=tasks, limit=args.limit, tasks_folder=folder)
    with output_on_stderr():  # the harness tells of its progress
        found = evaluate_benchmarks(
            args.run_dir, wanted, args.checkpoint, with_base=args.with_base, model=args.model,
            trust_code=args.trust_code,
        )  # fmt: skip
    if args.json:
        print_json(found, indent=None)
        return errors.OK
    for side, results in found.items():
        for task, values in results.items():
            print(
                *(f"{side:<6} {task:<24} {name:<28} {value:.4g}" for name, value in values.items()),
                sep="\n",
            )
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
            return [
                f"{name:<{first}}" + "".join(f"{cell:>{width}}" for cell in row)
                for name, row in rows
            ]
    return mix_up_lines(counts, names)


def mix_up_lines(counts: list[list[int]], names: Sequence[str]) -> list[str]:
    """Pairs of classes that are taken for one another most often."""
    classes = range(len(names))
    pairs = sorted(
        (-counts[i][j], i, j) for i in classes for j in classes if i != j and counts[i][j]
    )
    shown = [
        ("true", "predicted", "rows"),
        *((names[i], names[j], f"{-n:,}") for n, i, j in pairs[:MIX_UPS]),
    ]
    first, second, _ = (max(map(len, column)) + 2 for column in zip(*shown, strict=True))
    more = f", {MIX_UPS} of {len(pairs):,}" if len(pairs) > MIX_UPS else ""
    title = f"Classes taken for another most often{more} (--json prints the whole matrix of {len(names)} classes)"
    return [title, *(f"{true:<{first}}{said:<{second}}{n:>6}" for true, said, n in shown)]
