"""`kubetune data check` of data without a model: the kinds of the records, and the columns that nothing reads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kubetune.base.humanize import counted, shell_word, unused_keys, visible
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer
from kubetune.cli.program import program
from kubetune.errors import ConfigError, DataError
from kubetune.supervisor.command_line import columns_of

if TYPE_CHECKING:
    from rich.console import Console

    from kubetune.data.findings.finding import Finding
    from kubetune.data.inspect.shapes import Shapes
    from kubetune.data.unread_columns import LeftOut


def check_shapes_of(args: argparse.Namespace, console: Console) -> Answer:
    """Return the kinds of the records of a source, and what is wrong with them. Tokens are not looked at."""
    from kubetune.config.schema import SourceConfig
    from kubetune.data.findings.group_findings import of_names
    from kubetune.data.findings.split_files import located_sources
    from kubetune.data.inspect.shapes import check_shapes
    from kubetune.data.reading.record_problems import SHOWN
    from kubetune.data.reading.sources import not_read, require_hub_data
    from kubetune.data.unread_columns import left_out

    if args.overrides:
        raise ConfigError(
            f"{args.overrides[0]} changes a run file, and {args.target} is none; leave it out"
        )

    source = SourceConfig(path=args.target, columns=columns_of(args.columns or ()))
    require_hub_data({"train": [source]}, os.environ)
    # With --json every problem is kept, else as many as are shown.
    with busy("reading records"):
        shapes = check_shapes(source, keep=None if args.json else SHOWN)
    # Image files in a folder are data if records name images.
    has_images = any("images" in kind for kind in shapes.kinds)
    files_not_read = not_read([source], images=has_images)
    facts_of_columns = shapes.columns.to_json(shapes.kinds.total())
    columns = list(left_out(facts_of_columns, source.path))
    named = list(of_names(located_sources([source])))
    error = _error_of(shapes, named, args.target)

    def show() -> None:
        _show_shapes(shapes, columns, files_not_read, named, console)
        if error is None:
            show_next(args)

    problems = shapes.problems
    facts = {
        "ok": error is None,
        "records": shapes.kinds,
        "unused_keys": shapes.unused,
        "unused_columns": facts_of_columns,
        "taken": shapes.readings,
        "files_not_read": files_not_read,
        "findings": [finding.to_json() for finding in named],
        "blank_lines": problems.blank_lines,
        "doubts": problems.doubts,
        "problems": {"total": problems.total, "first": problems.first},
    }
    return Answer(facts, show, error=error)


def _error_of(shapes: Shapes, named: Sequence[Finding], path: str) -> DataError | None:
    """Return why records cannot be used: bad ones, names of files that call answers bad, or none at all."""
    if shapes.problems.total:
        return shapes.problems.error()
    refused = [finding.line for finding in named if finding.severity == "error"]
    if refused:
        return DataError(refused)
    if not shapes.kinds:
        return DataError(f"{path} holds no records. Nothing was written.")
    return None


def _show_shapes(
    shapes: Shapes,
    columns: Sequence[LeftOut],
    files_not_read: Mapping[str, int],
    named: Sequence[Finding],
    console: Console,
) -> None:
    """Print the kinds of the records, and the columns and files that nothing reads."""
    for kind, number in shapes.kinds.most_common():
        console.print(f"{counted(number, 'record')} of kind {kind}")
    problems = shapes.problems
    if problems.total:
        console.print(f"{counted(problems.total, 'record')} that cannot be used")
    for reading, number in shapes.readings.most_common():
        console.print(f"{reading}, in {counted(number, 'record')}", markup=False)
    if problems.blank_lines:
        console.print(f"{counted(problems.blank_lines, 'blank line')} among them, skipped")
    for doubt in problems.doubts:
        console.print(visible(f"warning: {doubt}", keep=""), markup=False)
    for column in columns:
        sentence = f"`{column.name}` ({column.what}) is not used. {column.advice}"
        console.print(visible(sentence), markup=False)
    for finding in named:
        console.print(visible(f"{finding.severity}: {finding.line}"), markup=False)
    explained = {column.name for column in columns}
    others = {key: number for key, number in shapes.unused.items() if key not in explained}
    for line in (unused_keys(others), unused_keys(files_not_read, "files not read")):
        if line:
            console.print(line, markup=False)
    console.print("Tokens were not checked; that needs --model, or a run file.")


def show_next(args: argparse.Namespace) -> None:
    """Print the command that comes after a check: a plan of the run file, or a run file for the data."""
    target = shell_word(args.target)
    command = f"{program()} plan {target}"
    if args.target.endswith((".yaml", ".yml")):
        for override in args.overrides:
            command += f" {shell_word(override)}"
    else:
        model = f" --model {shell_word(args.model)}" if args.model else ""
        columns = ""
        if args.columns:
            columns = f" --columns {' '.join(map(shell_word, args.columns))}"
        command = f"{program()} init {target}{columns}{model} -o run.yaml"
    print(visible(f"Next: {command}"))
