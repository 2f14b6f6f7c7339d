"""`kubetune evaluate`: the evaluation of a run's checkpoint, on its own evaluation data or on other data."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base.humanize import shown_on, visible
from kubetune.base.signals import stoppable
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.result.export import add_result

if TYPE_CHECKING:
    from kubetune.result.inference.evaluate_run import Evaluation

TITLE = "true \\ predicted"

# Pairs of classes that are listed if the matrix is too wide.
MIX_UPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
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
        help="file for the prediction of a classifier on each row, as JSON lines (default RUN_DIR/predictions.jsonl)",
    )
    parser.add_argument(
        "--compare",
        metavar="RUN_DIR|base",
        help="compare the answers of earlier evaluations with those of another run, or of the model before training; "
        "nothing is evaluated again",
    )
    parser.add_argument(
        "--benchmarks",
        metavar="TASK,…",
        help="tasks of lm-evaluation-harness, such as arc_easy, instead of the run's data",
    )
    parser.add_argument(
        "--with-base",
        action="store_true",
        help="run the benchmarks on the model before training too",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N questions of each benchmark"
    )
    parser.add_argument(
        "--tasks-folder",
        type=Path,
        metavar="DIR",
        help="folder with more task files for benchmarks",
    )
    add_json(parser, "JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Print every metric of the task, or a comparison, or benchmarks."""
    _require_one_question(args)
    # SIGTERM ends an evaluation like Ctrl-C: no file is half written.
    with stoppable():
        if args.compare:
            return _compare(args)
        if args.benchmarks:
            return _benchmark(args)
        return _evaluate(args)


def _evaluate(args: argparse.Namespace) -> Answer:
    """Measure a checkpoint on the run's evaluation data, or on other data."""
    # What is wrong is refused before the imports, which take seconds.
    from kubetune.result.inference.requirements import (
        other_sources,
        require_evaluation_data,
        require_result,
    )

    config = require_result(args.run_dir, args.checkpoint, args.model)
    if args.data is None:
        require_evaluation_data(config.data, args.run_dir)
    else:
        other_sources(config.data, config.model.path, args.data)
    # The imports make many objects that stay: looking for garbage among them is lost time.
    from kubetune.base import collector

    with busy(f"loading the model of {visible(str(args.run_dir))}") as work:
        with collector.paused():
            from kubetune.result.inference.evaluate_run import evaluate_run
        evaluation = evaluate_run(
            args.run_dir,
            args.checkpoint,
            args.data,
            args.predictions,
            model=args.model,
            trust_code=args.trust_code,
            progress=work.count,
        )
    # Remarks go to standard error, so that --json stays JSON.
    for line in evaluation.remarks:
        print(shown_on(sys.stderr, line), file=sys.stderr)
    if evaluation.predictions is not None:
        print(f"predictions: {evaluation.predictions}", file=sys.stderr)

    facts: dict[str, Any] = dict(evaluation.metrics)
    if evaluation.confusion:
        facts |= {"confusion": evaluation.confusion, "names": evaluation.names}
    return Answer(facts, lambda: _show(evaluation), indent=None)


def _show(evaluation: Evaluation) -> None:
    """Print the metrics, and a classifier's confusion matrix."""
    for name, value in evaluation.metrics.items():
        print(f"{name:<26} {value:.6g}")
    if evaluation.confusion:
        columns = get_terminal_size((120, 0)).columns
        print()
        for line in confusion_lines(evaluation.confusion, evaluation.names, columns):
            print(line)


def _require_one_question(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together, rather than ignore one."""
    asked = []
    for name in ("compare", "benchmarks", "data", "predictions"):
        if getattr(args, name):
            asked.append(name)
    if len(asked) > 1 and asked != ["data", "predictions"]:
        raise errors.ConfigError(
            f"--{asked[0]} and --{asked[1]} ask for different things; give only one of them"
        )

    # Options of benchmarks would do nothing without them.
    for name in ("with_base", "limit", "tasks_folder"):
        if getattr(args, name) and not args.benchmarks:
            raise errors.ConfigError(f"--{name.replace('_', '-')} is for --benchmarks")
    if args.limit is not None and args.limit < 1:
        raise errors.ConfigError(f"--limit: found {args.limit}; expected at least 1")


def _compare(args: argparse.Namespace) -> Answer:
    """Compare the answers of two earlier evaluations."""
    from kubetune.result.inference.compare import compare_runs, table

    comparisons = compare_runs(args.run_dir, args.compare, args.checkpoint)
    # The other run is the standard, so it comes first.
    names = (Path(args.compare).name, args.run_dir.name)

    def show() -> None:
        print("\n".join(table(comparisons, names)))

    return Answer([comparison.facts() for comparison in comparisons], show, indent=None)


def _benchmark(args: argparse.Namespace) -> Answer:
    """Run benchmarks of lm-evaluation-harness."""
    from kubetune.base.processes import output_on_stderr
    from kubetune.config.schema.evaluation import BenchmarksConfig
    from kubetune.result.inference.benchmarks import evaluate_benchmarks
    from kubetune.result.inference.requirements import require_result

    require_result(args.run_dir, args.checkpoint, args.model)
    tasks = tuple(task for task in args.benchmarks.split(",") if task)
    folder = None
    if args.tasks_folder:
        folder = str(args.tasks_folder)
    wanted = BenchmarksConfig(tasks=tasks, limit=args.limit, tasks_folder=folder)
    # The harness prints its progress, which is no result.
    with output_on_stderr():
        results = evaluate_benchmarks(
            args.run_dir,
            wanted,
            args.checkpoint,
            with_base=args.with_base,
            model=args.model,
            trust_code=args.trust_code,
        )

    def show() -> None:
        for side, tasks_of_side in results.items():
            for task, values in tasks_of_side.items():
                for name, value in values.items():
                    print(f"{side:<6} {task:<24} {name:<28} {value:.4g}")

    return Answer(results, show, indent=None)


def confusion_lines(counts: list[list[int]], names: Sequence[str], columns: int) -> list[str]:
    """Return a confusion matrix as lines: true classes down, predicted classes across.

    If the names are too wide for so many columns, numbers head the table; if the numbers are too wide too,
    the classes that are confused most often are listed.
    """
    # With names:    true \\ predicted   cat   dog      With numbers:    true \\ predicted   0   1
    #                cat                  8     2                       0 cat              8   2
    numbers = [str(number) for number in range(len(names))]
    numbered_names = [f"{number} {name}" for number, name in enumerate(names)]
    for rows, heads in ((names, names), (numbered_names, numbers)):
        lines = _matrix(counts, rows, heads)
        if max(map(len, lines)) <= columns:
            return lines
    return mix_up_lines(counts, names)


def _matrix(counts: list[list[int]], rows: Sequence[str], heads: Sequence[str]) -> list[str]:
    """Return a matrix as lines, with a name for each row and a head for each column."""
    cells = [list(heads)]
    for row in counts:
        cells.append([str(count) for count in row])

    # All columns have the width of the widest cell, so that the matrix looks like one.
    widest = 0
    for line in cells:
        widest = max(widest, *map(len, line))
    cell_width = widest + 2
    names = [TITLE, *rows]
    name_width = max(map(len, names))

    lines = []
    for name, line in zip(names, cells, strict=True):
        aligned = "".join(cell.rjust(cell_width) for cell in line)
        lines.append(name.ljust(name_width) + aligned)
    return lines


def mix_up_lines(counts: list[list[int]], names: Sequence[str]) -> list[str]:
    """Return the pairs of classes that are confused most often, as lines."""
    pairs = []
    for true, row in enumerate(counts):
        for predicted, count in enumerate(row):
            if count and true != predicted:
                pairs.append((count, true, predicted))
    # The most frequent first; of equals, in the order of the classes.
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    rows = [("true", "predicted", "rows")]
    for count, true, predicted in pairs[:MIX_UPS]:
        rows.append((names[true], names[predicted], f"{count:,}"))

    true_width = 2 + max(len(row[0]) for row in rows)
    predicted_width = 2 + max(len(row[1]) for row in rows)
    shown = ""
    if len(pairs) > MIX_UPS:
        shown = f", {MIX_UPS} of {len(pairs):,}"
    whole = f"--json prints the whole matrix of {len(names)} classes"
    lines = [f"Classes that are confused most often{shown} ({whole})"]
    for true_name, predicted_name, count_text in rows:
        lines.append(f"{true_name:<{true_width}}{predicted_name:<{predicted_width}}{count_text:>6}")
    return lines
