"""`kubetune data`: check, prepare and convert data."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.humanize import counted, unused_keys, visible, visible_json
from kubetune.cli.json_answers import print_json
from kubetune.cli.prepare import data_convert
from kubetune.errors import OK, USER, ConfigError, DataError
from kubetune.plan.base_model import require_kind

if TYPE_CHECKING:
    from rich.console import Console

    from kubetune.config.schema import Config
    from kubetune.data.findings.finding import Finding
    from kubetune.data.inspect.check import Report, Sample
    from kubetune.data.inspect.gallery import Gallery
    from kubetune.data.reading.problems import Problems
    from kubetune.data.text.tokenizer import Tokenizer

CLASSES_SHOWN = 20
MOST_PIECES = 24
"""A row's stretches that are trained, and those between them, of which a terminal shows so many."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        "--samples", type=int, default=2, metavar="N", help="rendered rows to show (default 2)"
    )
    check.add_argument(
        "--json", action="store_true", help="print the report as JSON, with every bad record"
    )
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
    prepare.add_argument("--json", action="store_true", help="print the statistics as JSON")
    convert = actions.add_parser(
        "convert", help="turn any data, or a published data set, into JSON lines to train on"
    )
    data_convert.add_arguments(convert)


def run(args: argparse.Namespace) -> int:
    """Do what `args.action` says and return the exit code."""
    return {"check": _check, "prepare": _prepare, "convert": data_convert.run}[args.action](args)


def _load(args: argparse.Namespace) -> Config:
    import os

    from kubetune.config.load import load_config

    flags: dict[str, Any] = {}
    path: Path | None = Path(args.target)
    if path is not None and path.suffix not in (".yaml", ".yml"):
        path, flags = None, {"data.train": args.target}
    if getattr(args, "model", None):
        flags["model.path"] = args.model
    config = load_config(path, overrides=args.overrides, flags=flags, environ=os.environ)
    require_kind(config, os.environ)
    return config


def _check(args: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    if not args.target.endswith((".yaml", ".yml")) and not args.model:
        if args.html:
            raise ConfigError("--html shows rows as a model sees them; give --model, or a run file")
        return _check_shapes(args, console)
    from kubetune.data.inspect.check import check
    from kubetune.data.inspect.gallery import Gallery
    from kubetune.data.reading.problems import SHOWN
    from kubetune.data.reading.sources import require_sources
    from kubetune.data.text.tokenizer import load_tokenizer
    from kubetune.rundir.starts import day_of

    config = _load(args)
    require_sources(config)
    cache = Path(config.data.cache).expanduser() if config.data.cache else None
    tokenizer = load_tokenizer(config.model, cache, date=day_of(config))
    gallery = Gallery() if args.html else None
    report = check(
        config, tokenizer, args.samples, keep=None if args.json else SHOWN, gallery=gallery
    )
    if gallery is not None:
        _write_page(args.html, config, report, gallery, tokenizer)
    if args.json:
        print(visible_json(json.dumps(report.to_json(), indent=2, ensure_ascii=False)))
    else:
        _show(report, console)
    if args.html and not args.json:
        console.print(f"wrote {args.html}; open it in a browser, no network is needed")
    # Whoever sees the report has read there what keeps training from beginning.
    is_seen = not args.json and sys.stdout.isatty()
    if not report.ok and not is_seen:
        text = report.problems.error() if report.problems.total else report.verdict
        print(visible(f"kubetune: {text}"), file=sys.stderr)
    return OK if report.ok else USER


def _write_page(
    output: Path, config: Config, report: Report, gallery: Gallery, tokenizer: Tokenizer
) -> None:
    from importlib.util import find_spec

    from kubetune.config.naming import model_short_name
    from kubetune.data.inspect.survey import survey
    from kubetune.data.prepared.histogram import bars
    from kubetune.data.reading.splits import split_sources
    from kubetune.reporting.data_page import write_data_page

    data = config.data
    settings = {
        "title": config.name or ", ".join(Path(source.path).name for source in data.train),
        "model": model_short_name(config.model.tokenizer or config.model.path),
        "task": config.task,
        "max_length": data.max_length,
        "overlong": data.overlong,
        "train_on": data.train_on,
        "has_languages": find_spec("py3langid") is not None,
    }
    facts = {
        "check": report.to_json(),
        "survey": survey(config),
        "rows": gallery.rows(tokenizer, split_sources(config)),
        "lengths": {
            split: bars(found.elements(), data.max_length)
            for split, found in report.lengths.items()
        },
        "profiles": {
            split: found.to_json(report.lengths[split], data.max_length)
            for split, found in report.profiles.items()
        },
        "settings": settings,
    }
    write_data_page(output, facts)


def _check_shapes(args: argparse.Namespace, console: Console) -> int:
    from kubetune.config.schema import SourceConfig
    from kubetune.data.inspect.check import check_shapes
    from kubetune.data.reading.problems import SHOWN
    from kubetune.data.reading.sources import not_read

    if args.overrides:
        raise ConfigError(
            f"{args.overrides[0]} changes a run file, and {args.target} is none; leave it out"
        )
    source = SourceConfig(path=args.target)
    problems, kinds, unused, readings = check_shapes(source, keep=None if args.json else SHOWN)
    left = not_read([source], images=any("images" in kind for kind in kinds))
    is_empty = not problems.total and not kinds
    if args.json:
        found = {"total": problems.total, "first": problems.first}
        ok = not problems.total and not is_empty
        print(
            json.dumps(
                {
                    "ok": ok,
                    "records": kinds,
                    "unused_keys": unused,
                    "taken": readings,
                    "files_not_read": left,
                    "blank_lines": problems.blank_lines,
                    "problems": found,
                },
                indent=2,
            )
        )
    else:
        for kind, number in kinds.most_common():
            console.print(f"{counted(number, 'record')} of kind {kind}")
        if problems.total:
            console.print(f"{counted(problems.total, 'record')} that cannot be used")
        for taken, number in readings.most_common():
            console.print(f"{taken}, in {counted(number, 'record')}", markup=False)
        if problems.blank_lines:
            console.print(f"{counted(problems.blank_lines, 'blank line')} among them, passed over")
        if line := unused_keys(unused):
            console.print(line, markup=False)
        if line := unused_keys(left, "files not read"):
            console.print(line, markup=False)
        console.print("Tokens were not looked at; give --model, or a run file, for that.")
    problems.raise_if_any()
    if is_empty:
        raise DataError(f"{args.target} holds no records. Nothing was written.")
    return OK


def _show(report: Report, console: Console) -> None:
    """Print a report for people."""
    from rich.text import Text

    from kubetune.data.inspect.check import histogram

    labelled = report.labels is not None
    for split, stats in report.stats.items():
        console.print(Text.assemble((split, "bold"), f": {_counts(stats, labelled)}"))
        for source in stats["sources"] if len(stats["sources"]) > 1 else []:
            console.print(f"  {visible(source['path'])}: {_counts(source, labelled)}", markup=False)
        if stats["classes"]:
            console.print(f"  labels: {_classes(Counter(stats['classes']))}", markup=False)
        _show_histogram(histogram(report.lengths[split]), console)
    _show_samples(report, console)
    if report.date:
        console.print(
            f"the chat template writes a date: {report.date} (data.date)", highlight=False
        )
    if report.spared:
        share = f"{report.spared:.0%} of the tokens, as far as the first rows show"
        console.print(
            f"shared beginnings: {share}, computed once (data.share_prefixes)", highlight=False
        )
    _show_findings(report.findings, console)
    _show_problems(report.problems, console)
    colour = "green" if report.ok else "red"
    console.print(
        f"\n[bold {colour}]{'ready to train' if report.ok else 'not ready to train'}[/bold {colour}]"
    )


_COLOURS = {"error": "red", "warning": "yellow", "note": "default"}


def _show_findings(findings: Sequence[Finding], console: Console) -> None:
    from rich.text import Text

    from kubetune.data.findings.finding import NOTHING_FOUND

    console.print()
    for finding in findings:
        console.print(Text(f"{finding.severity}: {finding.line}", style=_COLOURS[finding.severity]))
    if not findings:
        console.print(NOTHING_FOUND)


def _show_problems(problems: Problems, console: Console) -> None:
    """Print the records that cannot be used, the first ones, each with its line."""
    from kubetune.data.reading.problems import SHOWN

    shown = problems.first[:SHOWN]
    for text in shown:
        console.print(text, markup=False)
    if problems.total > len(shown):
        console.print(f"and {problems.total - len(shown):,} more")


def _classes(rows: Counter[str]) -> str:
    """Return the classes with the most rows and their numbers."""
    classes = [
        f"{visible(name, keep='')} × {count:,}" for name, count in rows.most_common(CLASSES_SHOWN)
    ]
    if len(rows) > CLASSES_SHOWN:
        classes.append(f"{len(rows) - CLASSES_SHOWN:,} more")
    return ", ".join(classes)


def _show_samples(report: Report, console: Console) -> None:
    number = 0
    for sample, answer in zip(report.samples, report.sample_answers, strict=True):
        number += answer != "rejected"
        _show_sample(
            number,
            answer,
            [(visible(text), trained) for text, trained in shortened(sample)],
            console,
        )


def _show_sample(number: int, answer: str, sample: Sample, console: Console) -> None:
    from rich.text import Text

    what = f"the {answer} answer" if answer else "what is trained"
    if console.color_system and not console.no_color:
        colour = "red" if answer in ("rejected", "bad") else "green"
        console.print(f"\n[bold]row {number}[/bold] ({what} is [{colour}]{colour}[/{colour}])")
        console.print(
            Text.assemble(*((text, colour if trained else "dim") for text, trained in sample))
        )
    else:
        console.print(f"\nrow {number} ({what} stands between ⟦ and ⟧)")
        console.print(Text("".join(f"⟦{text}⟧" if trained else text for text, trained in sample)))


def shortened(sample: Sample, most: int = 400) -> Sample:
    """A row with the middle of its longer pieces left out, and of many pieces the middle ones, for a terminal."""
    half = most // 2
    pieces = [
        (
            f"{text[:half]} … {len(text) - most:,} characters … {text[-half:]}"
            if len(text) > most
            else text,
            trained,
        )
        for text, trained in sample
    ]
    if len(pieces) <= MOST_PIECES:
        return pieces
    half, left_out = MOST_PIECES // 2, len(pieces) - MOST_PIECES
    return [*pieces[:half], (f"\n… {counted(left_out, 'piece')} …\n", False), *pieces[-half:]]


def _counts(stats: dict[str, Any], labelled: bool) -> str:
    rows, records = counted(stats["rows"], "row"), counted(stats["records"], "record")
    text = f"{rows} of {records}, {counted(stats['tokens'], 'token')}"
    if labelled:
        return text
    return f"{text}, {stats['trained_tokens'] / max(1, stats['tokens']):.1%} trained"


def _show_histogram(bars: Any, console: Console) -> None:
    counts = dict(bars)
    widest = max(counts.values(), default=0)
    for has_rows, run in groupby(counts.items(), key=lambda bar: bar[1] > 0):
        found = list(run)
        if not has_rows and len(found) > 1:
            console.print(f"  {'…':>13}")
            continue
        for label, count in found:
            console.print(f"  {label:>13} tokens {'█' * -(-40 * count // widest)} {count:,}")


def _prepare(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.status import Status

    from kubetune.data.prepared.prepare import prepare

    config = _load(args)
    with Status("preparing", console=Console(stderr=True)) as status:
        prepared = prepare(
            config, progress=lambda done: status.update(f"prepared {done:,} records")
        )
    if args.json:
        facts = {
            "path": str(prepared.path),
            "fingerprint": prepared.fingerprint,
            "splits": prepared.stats,
            "findings": [finding.to_json() for finding in prepared.findings],
        }
        print_json(facts)
        return OK
    for split, stats in prepared.stats.items():
        print(f"{split}: {_counts(stats, prepared.labels is not None)}")
    for finding in prepared.findings:
        print(f"{finding.severity}: {finding.line}")
    print(visible(f"prepared data: {prepared.path}"))
    return OK
