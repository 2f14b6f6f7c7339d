"""`kubetune data check`: find every bad record, and say what would be trained."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, prints_json
from kubetune.cli.prepare.check_page import write_page
from kubetune.cli.prepare.data_shapes import check_shapes_of, show_next
from kubetune.cli.prepare.shown_report import show as show_report
from kubetune.errors import (
    OK,
    USER,
    ConfigError,
    DataError,
    EnvironmentFault,
    KubetuneError,
    ModelError,
)
from kubetune.supervisor.command_line import columns_of

if TYPE_CHECKING:
    from rich.console import Console

    from kubetune.config.schema import Config
    from kubetune.data.inspect.check import Report


def load_target(args: argparse.Namespace) -> Config:
    """Return the config of a run file, or one that has nothing but the data that are named."""
    from kubetune.config.load import load_config

    # Data alone becomes the training data of a config that has nothing else.
    path = None
    flags: dict[str, Any] = {}
    if args.target.endswith((".yaml", ".yml")):
        path = Path(args.target)
    else:
        columns = columns_of(getattr(args, "columns", None) or ())
        flags["data.train"] = [{"path": args.target, "columns": columns}]
    if getattr(args, "model", None):
        flags["model.path"] = args.model

    return load_config(path, overrides=args.overrides, flags=flags, environ=os.environ)


@prints_json
def check_data(args: argparse.Namespace) -> Answer:
    """Check the data of a run; without a model, the shapes of records alone."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    is_run_file = args.target.endswith((".yaml", ".yml"))
    if not is_run_file and not args.model:
        if args.html:
            raise ConfigError("--html shows rows as a model sees them; give --model, or a run file")
        return check_shapes_of(args, console)

    report = _report_on(args, is_run_file=is_run_file)
    return _checked(args, report, console)


def _report_on(args: argparse.Namespace, *, is_run_file: bool) -> Report:
    """Look at all rows, and at all else that keeps the run from training."""
    from kubetune.data.findings.finding import OF_RUN, Finding
    from kubetune.data.inspect.check import check
    from kubetune.data.inspect.gallery import Gallery
    from kubetune.data.reading.record_problems import SHOWN
    from kubetune.data.reading.sources import require_hub_data, require_sources
    from kubetune.data.spec import DataSpec
    from kubetune.data.text.tokenizer import cache_folder, load_tokenizer
    from kubetune.library.verdict.run_problems import (
        problems_of,
        require_none,
        sentences,
        warnings_of,
    )
    from kubetune.rundir.starts import day_of

    config = load_target(args)
    require_sources(config.sources)
    # Without a run file it is not known yet what the data are for.
    others: list[KubetuneError] = []
    warnings: list[str] = []
    if not is_run_file:
        require_hub_data(config.sources, os.environ)
    else:
        # A process may have to build the model.
        with busy("judging the run"):
            others = problems_of(config, os.environ, here=config.kubernetes is None)
            warnings = warnings_of(config, os.environ)

    # The gallery collects rows for the page. With --json every bad record is kept, else as many as are shown.
    gallery = Gallery() if args.html else None
    most_problems = None if args.json else SHOWN
    with busy("loading the tokenizer") as work:
        try:
            cache = cache_folder(config.data.cache)
            tokenizer = load_tokenizer(config.model, cache, date=day_of(config.data))
            count = partial(work.count, "checking records", None)
            report = check(
                config, tokenizer, args.samples, keep=most_problems, gallery=gallery, count=count
            )
        except (ModelError, EnvironmentFault) as error:
            # Without a tokenizer no row is looked at, so all else that is wrong is said here.
            if others:
                require_none([*others, error])
            raise
        of_run = [Finding(OF_RUN, "error", "", text) for text in sentences(others)]
        of_run += [Finding(OF_RUN, "warning", "", text) for text in warnings]
        report.findings = (*of_run, *report.findings)
        if gallery is not None:
            work.count("writing the page", None, 0)
            write_page(args.html, config.name, DataSpec.of(config), report, gallery, tokenizer)
    return report


def _checked(args: argparse.Namespace, report: Report, console: Console) -> Answer:
    """Return what a check says: for people, for programs, and as an error if something is wrong."""
    from kubetune.data.findings.finding import OF_RUN

    def show() -> None:
        show_report(report, console)
        if args.html:
            console.print(f"wrote {args.html}; open it in a browser, no network is needed")
        if report.ok:
            show_next(args)

    # On a terminal the report has shown these errors already.
    is_seen = not args.json and sys.stdout.isatty()
    error: DataError | None = None
    if not report.ok and not is_seen:
        error = DataError(report.errors)
        # Bad records are counted after their lines.
        if report.problems.total:
            of_run = [
                finding.line
                for finding in report.findings
                if finding.id == OF_RUN and finding.severity == "error"
            ]
            error = DataError([*of_run, *report.problems.error().problems])
    exit_code = USER
    if report.ok:
        exit_code = OK
    return Answer(report.to_json(), show, exit_code=exit_code, error=error)
