"""`kubetune data`: check, prepare and convert data."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.humanize import counted, shell_word, unused_keys, visible
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.prepare import data_convert
from kubetune.cli.program import program
from kubetune.errors import (
    OK,
    USER,
    ConfigError,
    DataError,
    EnvironmentFault,
    KubetuneError,
    ModelError,
)
from kubetune.plan.base_model import require_kind
from kubetune.supervisor.command_line import columns_of

if TYPE_CHECKING:
    from rich.console import Console

    from kubetune.config.schema import Config
    from kubetune.data.columns import LeftOut
    from kubetune.data.inspect.check import Report, Sample, Shapes
    from kubetune.data.inspect.gallery import Gallery
    from kubetune.data.reading.record_problems import Problems
    from kubetune.data.text.tokenizer import Tokenizer

# The finding that is about the run, not about its data.
OF_RUN = "run"
CLASSES_SHOWN = 20
# Characters of the longest bar of a histogram.
WIDEST_BAR = 40
# A row's stretches that are trained, and those between them, of which a terminal shows so many.
MOST_PIECES = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of the verb and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check", help="find every bad record and say what would be trained; writes nothing"
    )

    check.add_argument("target", help="run file, or a data file, folder or hub data set")
    check.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="changes to the run file"
    )
    check.add_argument(
        "--model", help="model whose tokenizer is used; needed for tokens when TARGET is data"
    )
    check.add_argument(
        "--columns",
        nargs="+",
        metavar="EXPECTED=NAME",
        help="columns of other names in a data file, such as prompt=question completion=solution",
    )
    check.add_argument(
        "--samples", type=int, default=2, metavar="N", help="rendered rows to show (default 2)"
    )
    add_json(check, "the report as JSON, with every bad record")
    check.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write it as a page too, with rows as the model sees them",
    )

    prepare = actions.add_parser(
        "prepare", help="tokenise the data of a run into the cache, as `train` does"
    )
    prepare.add_argument("target", help="run file")
    prepare.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="changes to the run file"
    )
    add_json(prepare, "the statistics as JSON")

    convert = actions.add_parser(
        "convert", help="turn any data, or a published data set, into JSON lines to train on"
    )
    data_convert.add_arguments(convert)


def run(args: argparse.Namespace) -> int:
    """Do what `args.action` says and return the exit code."""
    actions = {"check": _check, "prepare": _prepare, "convert": data_convert.run}
    return actions[args.action](args)


def _load(args: argparse.Namespace) -> Config:
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
def _check(args: argparse.Namespace) -> Answer:
    """Check the data of a run; without a model, the shapes of records alone."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    is_run_file = args.target.endswith((".yaml", ".yml"))
    if not is_run_file and not args.model:
        if args.html:
            raise ConfigError("--html shows rows as a model sees them; give --model, or a run file")
        return _check_shapes(args, console)

    report = _report_on(args, is_run_file=is_run_file)
    return _checked(args, report, console)


def _report_on(args: argparse.Namespace, *, is_run_file: bool) -> Report:
    """Look at all rows, and at all else that keeps the run from training."""
    from kubetune.data.findings.finding import Finding
    from kubetune.data.inspect.check import check
    from kubetune.data.inspect.gallery import Gallery
    from kubetune.data.reading.record_problems import SHOWN
    from kubetune.data.reading.sources import require_sources
    from kubetune.data.text.tokenizer import cache_folder, load_tokenizer
    from kubetune.library.verdict.problems import problems_of, require_none, sentences
    from kubetune.rundir.starts import day_of

    config = _load(args)
    require_sources(config.sources)
    # Of data without a run file nobody has said yet what is to be done with them.
    others: list[KubetuneError] = []
    if is_run_file:
        others = problems_of(config, os.environ, here=config.kubernetes is None)

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
        if gallery is not None:
            work.count("writing the page", None, 0)
            _write_page(args.html, config, report, gallery, tokenizer)
    of_run = [Finding(OF_RUN, "error", "", text) for text in sentences(others)]
    report.findings = (*of_run, *report.findings)
    return report


def _checked(args: argparse.Namespace, report: Report, console: Console) -> Answer:
    """Return what a check says: for people, for programs, and as an error if something is wrong."""

    def show() -> None:
        _show(report, console)
        if args.html:
            console.print(f"wrote {args.html}; open it in a browser, no network is needed")
        if report.ok:
            _show_next(args)

    # Whoever sees the report on a terminal has read there what keeps training from beginning.
    is_seen = not args.json and sys.stdout.isatty()
    error: DataError | None = None
    if not report.ok and not is_seen:
        error = DataError(report.errors)
        # Bad records are counted behind their lines.
        if report.problems.total:
            of_run = [finding.line for finding in report.findings if finding.id == OF_RUN]
            error = DataError([*of_run, *report.problems.error().problems])
    exit_code = USER
    if report.ok:
        exit_code = OK
    return Answer(report.to_json(), show, exit_code=exit_code, error=error)


def _write_page(
    output: Path, config: Config, report: Report, gallery: Gallery, tokenizer: Tokenizer
) -> None:
    from importlib.util import find_spec

    from kubetune.config.naming import model_short_name
    from kubetune.data.inspect.survey import survey
    from kubetune.data.length_bars import bars
    from kubetune.data.spec import DataSpec
    from kubetune.reporting.data_page import write_data_page

    data = config.data
    # A run without a name is called as its files are.
    names = [Path(source.path).name for source in data.train]
    title = config.name or ", ".join(names)

    # What the page says about the run. Languages are named only where the library that knows them is installed.
    settings = {
        "title": title,
        "model": model_short_name(config.model.tokenizer or config.model.path),
        "task": config.task,
        "max_length": data.max_length,
        "overlong": data.overlong,
        "train_on": data.train_on,
        "has_languages": find_spec("py3langid") is not None,
    }

    # One bar for each range of lengths.
    length_bars = {}
    for split, lengths in report.lengths.items():
        length_bars[split] = bars(lengths.elements(), data.max_length)
    profiles = {}
    for split, profile in report.profiles.items():
        profiles[split] = profile.to_json(report.lengths[split], data.max_length)

    facts = {
        "check": report.to_json(),
        "survey": survey(data, config.record_kind, config.training.seed),
        "rows": gallery.rows(tokenizer, DataSpec.of(config).splits),
        "lengths": length_bars,
        "profiles": profiles,
        "settings": settings,
    }
    write_data_page(output, facts)


def _check_shapes(args: argparse.Namespace, console: Console) -> Answer:
    """Check of which kind the records of a source are, without looking at tokens."""
    from kubetune.config.schema import SourceConfig
    from kubetune.data.columns import left_out
    from kubetune.data.inspect.check import check_shapes
    from kubetune.data.reading.record_problems import SHOWN
    from kubetune.data.reading.sources import not_read

    if args.overrides:
        raise ConfigError(
            f"{args.overrides[0]} changes a run file, and {args.target} is none; leave it out"
        )

    # With --json every problem is kept, else as many as are shown.
    source = SourceConfig(path=args.target, columns=columns_of(args.columns or ()))
    most_problems: int | None = SHOWN
    if args.json:
        most_problems = None
    with busy("reading records"):
        shapes = check_shapes(source, keep=most_problems)
    problems = shapes.problems
    kinds = shapes.kinds
    # Image files in a folder are data if records name images.
    has_images = any("images" in kind for kind in kinds)
    files_not_read = not_read([source], images=has_images)

    records = sum(kinds.values())
    columns = list(left_out(shapes.columns.to_json(records), source.path))

    def show() -> None:
        _show_shapes(shapes, columns, files_not_read, console)
        if kinds and not problems.total:
            _show_next(args)

    error = None
    if problems.total:
        error = problems.error()
    elif not kinds:
        error = DataError(f"{args.target} holds no records. Nothing was written.")
    facts = {
        "ok": error is None,
        "records": kinds,
        "unused_keys": shapes.unused,
        "unused_columns": shapes.columns.to_json(records),
        "taken": shapes.readings,
        "files_not_read": files_not_read,
        "blank_lines": problems.blank_lines,
        "problems": {"total": problems.total, "first": problems.first},
    }
    return Answer(facts, show, error=error)


def _show_shapes(
    shapes: Shapes, columns: Sequence[LeftOut], files_not_read: Mapping[str, int], console: Console
) -> None:
    """Print of which kind records are, and what in them and beside them nothing reads."""
    for kind, number in shapes.kinds.most_common():
        console.print(f"{counted(number, 'record')} of kind {kind}")
    problems = shapes.problems
    if problems.total:
        console.print(f"{counted(problems.total, 'record')} that cannot be used")
    for reading, number in shapes.readings.most_common():
        console.print(f"{reading}, in {counted(number, 'record')}", markup=False)
    if problems.blank_lines:
        console.print(f"{counted(problems.blank_lines, 'blank line')} among them, skipped")
    for column in columns:
        sentence = f"`{column.name}` ({column.what}) is not used. {column.advice}"
        console.print(visible(sentence), markup=False)
    named = {column.name for column in columns}
    others = {key: number for key, number in shapes.unused.items() if key not in named}
    for line in (unused_keys(others), unused_keys(files_not_read, "files not read")):
        if line:
            console.print(line, markup=False)
    console.print("Tokens were not checked; that needs --model, or a run file.")


def _show_next(args: argparse.Namespace) -> None:
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


def _show(report: Report, console: Console) -> None:
    """Print a report for people."""
    from rich.text import Text

    from kubetune.data.inspect.check import histogram

    labelled = report.labels is not None
    for split, stats in report.stats.items():
        console.print(Text.assemble((split, "bold"), f": {_counts(stats, labelled)}"))
        # A split of one source has nothing to compare.
        if len(stats["sources"]) > 1:
            for source in stats["sources"]:
                line = f"  {visible(source['path'])}: {_counts(source, labelled)}"
                console.print(line, markup=False)
        if stats["classes"]:
            console.print(f"  labels: {_classes(Counter(stats['classes']))}", markup=False)
        _show_histogram(histogram(report.lengths[split]), console)

    _show_samples(report, console)
    if report.date:
        console.print(
            f"the chat template writes a date: {report.date} (data.date)", highlight=False
        )
    if report.saved_share:
        share = f"{report.saved_share:.0%} of the tokens, as far as the first rows show"
        console.print(
            f"shared beginnings: {share}, computed once (data.share_prefixes)", highlight=False
        )

    # What is wrong comes last, where a terminal still shows it.
    _show_findings(report, console)
    _show_problems(report.problems, console)
    console.print()
    if report.ok:
        console.print("[bold green]ready to train[/bold green]")
    else:
        console.print("[bold red]not ready to train[/bold red]")


def _show_problems(problems: Problems, console: Console) -> None:
    """Print the first records that cannot be used, each with its line, and the number of the others."""
    from kubetune.data.reading.record_problems import SHOWN

    sentences = problems.sentences()
    for text in sentences[:SHOWN]:
        console.print(text, markup=False)
    if len(sentences) > SHOWN:
        console.print(f"and {len(sentences) - SHOWN:,} more")


_COLOURS = {"error": "red", "warning": "yellow", "note": "default"}


def _show_findings(report: Report, console: Console) -> None:
    from rich.text import Text

    from kubetune.data.findings.finding import NOTHING_FOUND
    from kubetune.data.findings.sentences import BAD_RECORDS

    console.print()
    for finding in report.findings:
        # The lines of bad records follow, so nobody needs to be told where to find them.
        line = finding.sentence if finding.id == BAD_RECORDS else finding.line
        console.print(Text(f"{finding.severity}: {line}", style=_COLOURS[finding.severity]))
    if not report.findings:
        console.print(NOTHING_FOUND)


def _classes(rows: Counter[str]) -> str:
    """Return the classes with the most rows and their numbers."""
    classes = []
    for name, count in rows.most_common(CLASSES_SHOWN):
        classes.append(f"{visible(name, keep='')} × {count:,}")
    if len(rows) > CLASSES_SHOWN:
        classes.append(f"{len(rows) - CLASSES_SHOWN:,} more")
    return ", ".join(classes)


def _show_samples(report: Report, console: Console) -> None:
    number = 0
    for sample, answer in zip(report.samples, report.sample_answers, strict=True):
        # The rejected answer belongs to the row of the chosen one before it.
        if answer != "rejected":
            number += 1
        pieces = [(visible(text), is_trained) for text, is_trained in shortened(sample)]
        _show_sample(number, answer, pieces, console)


def _show_sample(number: int, answer: str, sample: Sample, console: Console) -> None:
    from rich.text import Text

    what = "what is trained"
    if answer:
        what = f"the {answer} answer"

    # Answers to a prompt are drawn, so nothing of its row is trained.
    if answer == "none":
        console.print(
            f"\n[bold]row {number}[/bold] (a prompt: answers to it are drawn, and rewarded)"
        )
        prompt = "".join(text for text, is_trained in sample if not is_trained)
        console.print(Text(prompt))
        return

    # Brackets mark what is trained:  Question: 2+2? ⟦4⟧. Colours repeat it, as not everybody sees them.
    has_colour = console.color_system and not console.no_color
    colour = ""
    if has_colour:
        colour = "red" if answer in ("rejected", "bad") else "green"
    console.print(f"\n[bold]row {number}[/bold] ({what} stands between ⟦ and ⟧)")
    marked = Text()
    for text, is_trained in sample:
        if is_trained:
            marked.append(f"⟦{text}⟧", colour)
        else:
            marked.append(text, "dim" if has_colour else "")
    console.print(marked)


def shortened(sample: Sample, most: int = 400) -> Sample:
    """Return a row for a terminal: without the middle of long pieces, and without the middle ones of many pieces."""
    half = most // 2
    pieces = []
    for text, is_trained in sample:
        if len(text) > most:
            text = f"{text[:half]} … {len(text) - most:,} characters … {text[-half:]}"
        pieces.append((text, is_trained))

    # The first and the last pieces stay, with a gap that says how many it stands for.
    left_out = len(pieces) - MOST_PIECES
    if left_out <= 0:
        return pieces
    gap = (f"\n… {counted(left_out, 'piece')} …\n", False)
    return [*pieces[: MOST_PIECES // 2], gap, *pieces[-MOST_PIECES // 2 :]]


def _counts(stats: dict[str, Any], labelled: bool) -> str:
    """Return rows, records and tokens of a split or a source; the share that is trained where rows have no labels."""
    rows = counted(stats["rows"], "row")
    records = counted(stats["records"], "record")
    text = f"{rows} of {records}, {counted(stats['tokens'], 'token')}"
    if labelled:
        return text
    share = stats["trained_tokens"] / max(1, stats["tokens"])
    return f"{text}, {share:.1%} trained"


def _show_histogram(bars: Any, console: Console) -> None:
    """Print a bar for each range of lengths; several ranges without rows become an ellipsis."""
    counts = dict(bars)
    most_rows = max(counts.values(), default=0)
    # Neighbours with rows are one group, those without another:   [5 2] [0 0 0] [1]
    for has_rows, group in groupby(counts.items(), key=lambda bar: bar[1] > 0):
        neighbours = list(group)
        if not has_rows and len(neighbours) > 1:
            console.print(f"  {'…':>13}")
            continue
        for label, count in neighbours:
            # Rounded up, so that a range with few rows shows too.
            blocks = "█" * math.ceil(WIDEST_BAR * count / most_rows)
            console.print(f"  {label:>13} tokens {blocks} {count:,}")


@prints_json
def _prepare(args: argparse.Namespace) -> Answer:
    """Prepare the data of a run in the cache."""
    from kubetune.data.findings.checked import findings_of, prepare_run

    config = _load(args)
    require_kind(config.task, config.model.path, os.environ)
    with busy("loading the tokenizer") as work:
        prepared = prepare_run(config, progress=partial(work.count, "preparing records", None))
        findings = findings_of(prepared)

    def show() -> None:
        for split, stats in prepared.stats.items():
            print(f"{split}: {_counts(stats, prepared.labels is not None)}")
        for finding in findings:
            print(f"{finding.severity}: {finding.line}")
        print(visible(f"prepared data: {prepared.path}"))

    facts = {
        "path": str(prepared.path),
        "fingerprint": prepared.fingerprint,
        "splits": prepared.stats,
        "findings": [finding.to_json() for finding in findings],
    }
    return Answer(facts, show)
